"""What the benchmarks conclude with: paired bootstrap, McNemar, and only the cases that all systems have."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

import cells
from compare import Result, by_system, mcnemar, p95, paired_bootstrap, report, spread
from gate import COVERAGE, features, fit
from kvboost.errors import InputError
from kvboost.repair.gate import WEIGHTS


def result(case: str, system: str, kl: float, **signs: float) -> Result:
    return Result(case, "code", False, "related", system, 0.15, 100, 15, 1.0, kl, 1.0, 32.0, signs)


def test_mcnemar_counts_only_what_differs() -> None:
    assert mcnemar([True, False, True], [True, False, True]) == 1.0
    assert mcnemar([True] * 10, [False] * 10) == pytest.approx(2 / 2**10)
    right = [True] * 8 + [False] * 2 + [True] * 50
    other = [False] * 8 + [True] * 2 + [True] * 50
    assert mcnemar(right, other) == pytest.approx(0.109375), "the binomial test on 2 of 10"


def test_a_paired_bootstrap_sees_a_small_difference_that_every_pair_shows() -> None:
    rng = np.random.default_rng(1)
    theirs = rng.lognormal(-4, 1, 60)
    difference, low, high = paired_bootstrap(theirs * 0.9, theirs, np.mean)
    assert low < difference < high < 0
    _, low, high = paired_bootstrap(rng.permutation(theirs), theirs, np.mean)
    assert low < 0 < high
    _, _, high = paired_bootstrap(theirs * 0.5, theirs, p95)
    assert high < 0


def test_what_was_measured_on_one_case_is_drawn_together() -> None:
    rng = np.random.default_rng(2)
    theirs, ours = rng.lognormal(-4, 1, (2, 30))
    names = [f"case {i:02}" for i in range(30)]
    once = paired_bootstrap(ours, theirs, np.mean, names)
    assert once == paired_bootstrap(ours, theirs, np.mean)
    thrice = paired_bootstrap(np.repeat(ours, 3), np.repeat(theirs, 3), np.mean, [n for n in names for _ in range(3)])
    assert thrice == pytest.approx(once), "copies of the same evidence make no interval narrower"


def test_a_report_tells_of_no_cell_that_a_system_lacks() -> None:
    rows = [result("a", "one", 1.0), result("a", "two", 2.0), replace(result("b", "one", 3.0), kind="logs")]
    assert list(report(rows)["cells"]) == ["code, related"]
    with pytest.raises(InputError, match="no case was measured with all"):
        report([rows[1], rows[2]])


def test_only_prompts_that_every_system_has_are_compared() -> None:
    rows = by_system([result("a", "one", 1.0), result("a", "two", 2.0), result("b", "one", 3.0)])
    assert {s: list(r) for s, r in rows.items()} == {s: [("a", "related")] for s in ("one", "two")}
    assert spread([0.0, 1.0]) == {"mean": 0.5, "p95": pytest.approx(0.95), "worst": 1.0}


def test_the_fit_of_the_gate_covers_what_it_says_and_finds_a_law_that_is_there() -> None:
    rng = np.random.default_rng(0)
    results = []
    for i in range(400):
        signs = {name: float(rng.uniform(0.01, 1)) for name in WEIGHTS}
        kl = 0.1 * np.prod([v**0.7 for v in signs.values()]) * rng.lognormal(0, 0.3)
        results.append(result(str(i), "guided", float(kl), **signs))
    weights = fit(results)
    assert weights[1:] == pytest.approx([0.7, 0.7], abs=0.1)
    x, y = features(results)
    assert np.mean(y <= x @ weights) == pytest.approx(COVERAGE, abs=0.01)


def test_the_committed_cases_are_what_their_seed_draws_and_no_document_is_in_two_splits(shared_data: object) -> None:
    committed = json.loads(cells.CELLS.read_text())
    cases = cells.load(list(cells.KINDS), list(cells.SPLITS))
    assert len(cases) == len(committed["cases"]) == 4 * sum(cells.SPLITS.values())
    drawn = [c for kind in cells.KINDS for c in cells.draw(kind, random.Random(f"{cells.SEED} {kind}"))]
    assert sorted(drawn, key=lambda c: c.name) == sorted(cases, key=lambda c: c.name)
    for kind in cells.KINDS:
        seen = {
            split: {d for c in cases if (c.kind, c.split) == (kind, split) for d in (*c.documents, *c.others)}
            for split in cells.SPLITS
        }
        assert not seen["tune"] & seen["test"]
        assert not seen["calibrate"] & seen["test"]
        size = len(cells.pool(kind))
        assert all(max(numbers) < size for numbers in seen.values())
    hard = [c.template >= 0 for c in cases]
    assert sum(hard) * 2 >= len(hard), "half of the prompts need two documents, an order or a negation"
