"""The exactness matrix: every family, attention implementation and dtype against a full prefill by transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import BY_NAME, LONGROPE_BOUNDARY, MOVABLE, SUPPORTED_HERE, Family, build, build_fresh, random_ids
from matrix import LONGER, REORDERED, Cell, cells, exact_prefix, full_repair, no_reuse_error, shift_error, yardstick
from scenario import engine, greedy, logits, plain_logits, prompt, relative_error

FLOAT32_REPAIR = 1e-4
FLOAT32_PREFIX = 1e-5


def over(families: list[Family]) -> list[Any]:
    """Parameters for every cell; the plainest cell of a family is in the smoke set."""

    def smoke(cell: Cell) -> bool:
        return cell.dtype is torch.float32 and cell.attention == BY_NAME[cell.family].attention[0]

    return [pytest.param(c, id=str(c), marks=[pytest.mark.smoke] if smoke(c) else []) for c in cells(families)]


def bound(cell: Cell, float32: float, input_ids: torch.Tensor) -> float:
    return float32 if cell.dtype is torch.float32 else yardstick(cell, input_ids)


@pytest.mark.parametrize("cell", over(SUPPORTED_HERE))
def test_no_reuse_equals_plain_transformers(cell: Cell) -> None:
    error, same_tokens = no_reuse_error(cell)
    assert same_tokens
    assert error <= bound(cell, FLOAT32_PREFIX, prompt())


@pytest.mark.parametrize("cell", over([f for f in SUPPORTED_HERE if f.reuse != "none"]))
def test_exact_prefix_serves_the_very_bytes_and_continues_like_transformers(cell: Cell) -> None:
    result = exact_prefix(cell)
    assert result.report.exact_tokens == prompt().shape[1]
    assert result.report.fresh_tokens == LONGER.shape[1] - prompt().shape[1]
    assert result.same_rows
    assert result.same_logits, "not the bits of transformers' own continuation"
    assert result.error <= bound(cell, FLOAT32_PREFIX, LONGER)


@pytest.mark.parametrize("cell", over(MOVABLE))
def test_moved_chunks_that_are_repaired_in_full_equal_a_full_prefill(cell: Cell) -> None:
    error, report = full_repair(cell)
    assert report.fallback is None
    assert report.moved_tokens == report.repaired_tokens > 150
    assert error <= bound(cell, FLOAT32_REPAIR, REORDERED)


@pytest.mark.parametrize("strategy", ["selective", "cacheblend", "guided"])
@pytest.mark.parametrize("cell", [c for c in over(MOVABLE) if c.values[0].dtype is torch.float32])
def test_every_strategy_at_a_full_budget_equals_a_full_prefill(cell: Cell, strategy: str) -> None:
    error, report = full_repair(cell, strategy)
    assert report.moved_tokens == report.repaired_tokens > 150
    assert error <= FLOAT32_REPAIR


@pytest.mark.parametrize("cell", over(MOVABLE))
def test_first_layer_rows_of_a_moved_chunk_are_the_rows_computed_there(cell: Cell) -> None:
    assert shift_error(cell) <= (1e-5 if cell.dtype is torch.float32 else 2**-6)


@pytest.mark.smoke
@pytest.mark.parametrize("family", [f for f in SUPPORTED_HERE if f.reuse == "exact"], ids=lambda f: f.name)
def test_a_model_that_cannot_move_chunks_says_why_and_never_moves_one(family: Family) -> None:
    model = build(family.name, family.attention[0])
    kv = engine(model)
    assert kv.support.moved_refused
    greedy(kv.generate, prompt("0123"), 1)
    moved = prompt("3120")
    out = greedy(kv.generate, moved, 4)
    assert out.report.moved_tokens == 0
    assert out.report.exact_tokens == 40, "the system prompt"
    assert relative_error(logits(out.output), plain_logits(model, moved, 4)) <= FLOAT32_PREFIX


@pytest.mark.parametrize("family", [f for f in SUPPORTED_HERE if f.reuse == "exact"], ids=lambda f: f.name)
def test_a_record_lost_between_plan_and_load_leaves_no_hole_in_such_a_model(family: Family) -> None:
    model = build(family.name, family.attention[0])
    kv = engine(model)
    greedy(kv.generate, prompt(), 1)
    lost = [s.record_id for s in kv.plan(prompt())][3]
    read = kv.store.get_many
    kv.store.get_many = lambda ids: read([i for i in ids if i != lost])  # type: ignore[method-assign]
    out = greedy(kv.generate, prompt(), 4)
    assert 0 < out.report.exact_tokens < prompt().shape[1] - 1
    assert relative_error(logits(out.output), plain_logits(model, prompt(), 4)) <= FLOAT32_PREFIX


@pytest.mark.smoke
def test_a_recurrent_model_goes_to_transformers_and_says_why() -> None:
    kv = engine(build("mamba", "eager"))
    greedy(kv.generate, prompt(), 1)
    out = greedy(kv.generate, prompt(), 4)
    assert out.report.exact_tokens == out.report.moved_tokens == 0
    assert "key/value cache" in (out.report.fallback or "")


@pytest.mark.parametrize("name", [n for n in ("deepseek-v3.2", "glm-dsa") if BY_NAME[n] in SUPPORTED_HERE])
def test_a_sparse_attention_model_goes_to_transformers_and_names_its_index_keys(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kv = engine(model := build(name))
    assert "index keys" in caplog.text
    greedy(kv.generate, prompt(), 1)
    out = greedy(kv.generate, LONGER, 4)
    assert out.report.fresh_tokens == LONGER.shape[1]
    assert "index keys" in (out.report.fallback or "")
    assert torch.equal(logits(out.output), plain_logits(model, LONGER, 4))


@pytest.mark.parametrize("beyond", [-50, -1, 0, 1, 2, 50])
def test_longrope_never_mixes_its_two_regimes(beyond: int) -> None:
    kv = engine(model := build_fresh("longrope-phi3"), recompute_head_tokens=10_000)
    length = LONGROPE_BOUNDARY + beyond
    base = random_ids(length + 40, seed=3)
    for ids in (base[:, :180], base[:, 60:length], base[:, :length], base[:, 40:], base[:, 40:]):
        out = greedy(kv.generate, ids, 4)
        assert out.report.fallback is None
        assert relative_error(logits(out.output), plain_logits(model, ids, 4)) <= FLOAT32_REPAIR


def test_dynamic_scaling_is_not_reused_beyond_its_trained_length() -> None:
    kv = engine(build_fresh("llama-dynamic"))
    ids = random_ids(560, seed=3)
    greedy(kv.generate, ids[:, :200], 1)
    assert greedy(kv.generate, ids[:, :500], 2).report.exact_tokens == 200
    assert kv.support.refuses_length(560)
