"""`kvboost bench timing` runs, its control sees hits and its guesses do not; its AUC and interval are right."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import timing

KINDS = ("known", "fresh")
values = st.lists(st.integers(0, 9).map(float), min_size=2, max_size=12)


@given(values, values)
def test_the_auc_counts_pairs(known: list[float], fresh: list[float]) -> None:
    pairs = list(itertools.product(known, fresh))
    share = sum((a < b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    found = timing.auc(known, fresh)
    assert found.auc == pytest.approx(share)
    assert 0 <= found.low <= found.auc <= found.high <= 1
    other = timing.auc(fresh, known)
    assert (other.auc, other.low, other.high) == pytest.approx((1 - found.auc, 1 - found.high, 1 - found.low))


def test_classes_that_never_meet_are_told_apart_for_certain() -> None:
    assert timing.auc([1, 2, 3], [4, 5, 6]) == timing.Auc(1.0, 1.0, 1.0)
    assert timing.auc([4, 5, 6], [1, 2, 3]) == timing.Auc(0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="two values"):
        timing.auc([1], [2, 3])


@pytest.mark.parametrize("shift", [0.0, 0.8])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(shift: float) -> None:
    """Normal values with a distance: the AUC is that of the normal distribution at the distance over root two."""
    rng = np.random.default_rng(3)
    truth = {0.0: 0.5, 0.8: 0.71420}[shift]
    found = [timing.auc(rng.normal(size=60), rng.normal(shift, size=80)) for _ in range(400)]
    held = np.mean([f.low <= truth <= f.high for f in found])
    assert 0.91 <= held <= 0.98
    assert np.mean([f.auc for f in found]) == pytest.approx(truth, abs=0.01)


def test_no_two_documents_share_a_run() -> None:
    writer = timing.Writer(40)
    documents = [writer.document().lower().rstrip(".").split() for _ in range(200)]
    runs = [tuple(d[i : i + 4]) for d in documents for i in range(len(d) - 3)]
    assert len(set(runs)) > 0.999 * len(runs)
    assert {len(d) for d in documents} == {40}


def test_a_small_run_hits_within_a_tenant_and_never_across(shared_data: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    small = ["--probes", "8", "--round", "4", "--words", "30", "--cache-mib", "16", "--threads", "1"]
    model = ["--model", str(shared_data / "models" / "stories260K-llama")]
    result = timing.main([*small, *model, "--disk-mib", "16", "--out", str(out)])
    assert json.loads(out.read_text()) == result
    assert result["another_tenant"]["probes"] == [8, 8]
    assert result["the_same_tenant"]["probes"] == [2, 2]
    assert result["the_same_tenant"]["known_cached"] > 0.95
    strangers = [result["the_same_tenant"]["fresh_cached"], *(result["another_tenant"][f"{k}_cached"] for k in KINDS)]
    assert max(strangers) < 0.1
    assert result["prompt_tokens"] > 50
