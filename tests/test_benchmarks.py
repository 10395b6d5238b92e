"""The benchmarks run, and their figures are about what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import eviction
import fidelity
import gate
import gpu_check
import prefix


@pytest.fixture(scope="module")
def checked() -> dict[str, Any]:
    """Documents are longer than `RUN_TOKENS` of the gate, as in the check itself: of shorter ones it computes more."""
    return gpu_check.main(["--miniature", "--repeats", "1", "--lengths", "1280", "1600"])


def test_the_gpu_check_is_exact_where_it_promises_to_be(checked: dict[str, Any]) -> None:
    exactness = checked["exactness"]
    assert exactness["no_reuse"] == 0.0
    assert exactness["exact_prefix"] <= 1e-5
    assert exactness["all_repaired"] <= 1e-4
    assert 0 < exactness["yardstick"] <= 1e-5, "eager and SDPA are two implementations of one function"
    assert exactness["no_reuse_fresh_tokens"] == exactness["tokens"]
    assert checked["ok"]


def test_the_gpu_check_times_what_it_names(checked: dict[str, Any]) -> None:
    assert [r["tokens"] for r in checked["rows"]] == [1280 + gpu_check.HEAD_TOKENS, 1600 + gpu_check.HEAD_TOKENS]
    assert checked["skipped"] == []
    for row in checked["rows"]:
        documents = row["tokens"] - gpu_check.HEAD_TOKENS - gpu_check.QUESTION_TOKENS
        assert row["prefix_exact_tokens"] == documents
        assert row["moved_tokens"] > 0.7 * documents
        assert 0 < row["moved_repaired_tokens"] < 0.3 * row["moved_tokens"]
        assert row["fallbacks"] == []
        assert min(row[f"{name}_s"] for name in ("full", "cold", "prefix", "moved")) > 0


def test_the_gpu_check_ends_with_its_result_as_one_json_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "results.jsonl"
    result = gpu_check.main(["--miniature", "--repeats", "1", "--limit-s", "0", "--out", str(out)])
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(out.read_text()) == result
    assert result["rows"] == []
    assert result["skipped"] == [384, 768, 1536], "the time is up before the first"


def test_prefixes_of_every_share_are_reused_and_exact(smollm2_dir: Path, shared_data: Path) -> None:
    result = prefix.main(
        ["--model", str(smollm2_dir), "--tokens", "250", "--shares", "0.02", "0.6", "--repeats", "1", "--threads", "1"]
    )
    assert [r["prefix"] / r["tokens"] for r in result["rows"]] == pytest.approx([0.02, 0.6], abs=0.005)
    for row in result["rows"]:
        assert row["prefix"] + row["computed"] == row["tokens"]
        assert abs(row["kl_worst"]) < 1e-5


def test_eviction_is_told_beside_lru_and_the_bound(shared_data: Path, tmp_path: Path) -> None:
    result = eviction.main(["--quick", "--workloads", "rag", "--out", str(tmp_path / "r.jsonl")])
    assert json.loads((tmp_path / "r.jsonl").read_text()) == result
    assert [r["share"] for r in result["results"]] == [0.05, 0.1, 0.3]
    for row in result["results"]:
        assert max(row[p] for p in eviction.SHOWN) == row["belady"]
    assert min(result["novel"]["importance"].values()) >= 0.9
    assert max(result["novel"]["lru"].values()) < 0.1, "the mixes do flood a store that takes everything in"


def test_a_recorded_run_of_fidelity_is_reported_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "prompts": 2.0,
        "kl_mean": 0.01,
        "kl_p95": 0.02,
        "kl_worst": 0.02,
        "top1": 1,
        "first_divergence": 32,
        "charged": 0,
    }
    lines = [
        {"benchmark": "fidelity", "model": model, "dtype": "float32", "tokens": 9, "rows": [{"method": "none", **row}]}
        for model in ("older", "newer")
    ]
    recorded = tmp_path / "fidelity.jsonl"
    recorded.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["fidelity", "--report", str(recorded), "--plot", str(tmp_path / "drawn")])
    fidelity.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"] == lines[1:], "the last run of a file counts"
    assert all((tmp_path / f"drawn.{suffix}").stat().st_size > 1000 for suffix in ("svg", "png"))


def test_the_recorded_pool_of_the_gate_is_within_what_is_promised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Path(gate.__file__).parent / "results"
    models = ("smollm2", "gemma3")
    calibrated, held_out = ([str(results / f"{part}-{m}.jsonl") for m in models] for part in ("calibrate", "test"))
    names = ("buglocal-shifted", "buglocal-gemma3", "workloads", "workloads-gemma3")
    traffic = [str(results / f"{name}.jsonl") for name in names]
    monkeypatch.setattr(sys, "argv", ["gate", *calibrated, "--held-out", *held_out, "--first-tokens", *traffic])
    gate.main()
    pooled = json.loads(capsys.readouterr().out.splitlines()[-1])["pooled"]
    for mix in ("warm", "all"):
        assert pooled["balanced"][mix]["mean"] <= 0.02
        assert pooled["balanced"][mix]["p99"] <= 0.1
        assert pooled["fast"][mix]["mean"] <= 0.1
    assert pooled["balanced"]["all"]["prompts"] == pooled["fast"]["all"]["prompts"]
    assert 1000 <= pooled["balanced"]["warm"]["prompts"] < pooled["balanced"]["all"]["prompts"]
