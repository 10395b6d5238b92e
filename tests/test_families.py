"""The exactness matrix: every family, attention implementation and dtype against a full prefill by transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from families import BY_NAME, LONGROPE_BOUNDARY, MOVABLE, SUPPORTED_HERE, Family, build, build_fresh, random_ids
from kvboost.hf import compat, probe
from kvboost.hf.load import load_rows
from kvboost.types import Kind
from scenario import engine, greedy, join, logits, plain_logits, prompt, relative_error

FLOAT32_REPAIR = 1e-4
FLOAT32_PREFIX = 1e-5
MIXTURES = {"mixtral", "qwen3-moe", "deepseek-v3"}  # in 16 bit a router tie may go the other way: float32 only

Cell = tuple[str, str, torch.dtype]


def every_cell(families: list[Family]) -> Iterator[Cell]:
    for family in families:
        for attention in family.attention:
            yield family.name, attention, torch.float32
            if family.name not in MIXTURES:
                yield family.name, attention, torch.bfloat16


def cells(families: list[Family]) -> list[Any]:
    return [pytest.param(cell, id="-".join(map(label, cell))) for cell in every_cell(families)]


def label(value: object) -> str:
    return str(value).removeprefix("torch.")


def tolerance(cell: Cell, float32: float, input_ids: torch.Tensor) -> float:
    """float32: given. bfloat16: twice what eager and SDPA differ by in transformers alone, over the same tokens."""
    name, attention, dtype = cell
    if dtype is torch.float32:
        return float32
    reference = prompt_logits(build(name, attention, dtype), input_ids)
    if len(BY_NAME[name].attention) == 1:  # one implementation: its distance from float32 is the yardstick
        return relative_error(reference, prompt_logits(build(name, attention), input_ids))
    other = "eager" if attention == "sdpa" else "sdpa"
    return 2 * relative_error(reference, prompt_logits(build(name, other, dtype), input_ids))


def prompt_logits(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids).logits[0].float()


def last_logits(generate: object, input_ids: torch.Tensor) -> torch.Tensor:
    return logits(greedy(generate, input_ids, 1))


@pytest.mark.parametrize("cell", cells(SUPPORTED_HERE))
def test_no_reuse_equals_plain_transformers(cell: Cell) -> None:
    model = build(*cell)
    ids = prompt()
    out = greedy(engine(model).generate, ids)
    assert out.report.fresh_tokens == ids.shape[1]
    assert torch.equal(out.output.sequences, greedy(model.generate, ids).sequences)
    assert relative_error(logits(out.output), plain_logits(model, ids)) <= tolerance(cell, FLOAT32_PREFIX, ids)


@pytest.mark.parametrize(
    "cell", cells([f for f in SUPPORTED_HERE if f.reuse != "none"]), ids=lambda c: "-".join(map(label, c))
)
def test_exact_prefix_serves_the_very_bytes_and_continues_like_transformers(cell: Cell) -> None:
    model = build(*cell)
    first, more = prompt(), random_ids(20, seed=77)
    longer = join(first, more)
    kv = engine(model)
    assert greedy(kv.generate, first, 1).report.fresh_tokens == first.shape[1]
    reference = probe.run(model, first)
    records = kv.store.get_many([s.record_id for s in kv.plan(longer) if s.record_id]).records

    layout = kv.support.require_layout()
    rows, _ = load_rows(kv.plan(longer), records, layout, 0, first.shape[1])
    for ours, theirs in zip(compat.make_dynamic_cache(*layout.per_layer(rows)).layers, reference.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)

    out = greedy(kv.generate, longer, 4)
    assert out.report.exact_tokens == first.shape[1]
    assert out.report.fresh_tokens == more.shape[1]
    own = greedy(
        model.generate, longer, 4, **{compat.CACHE_ARGUMENT: reference, "attention_mask": torch.ones_like(longer)}
    )
    assert torch.equal(logits(out.output), logits(own)), "not the bits of transformers' own continuation"
    error = relative_error(logits(out.output), plain_logits(model, longer, 4))
    assert error <= tolerance(cell, FLOAT32_PREFIX, longer)


@pytest.mark.parametrize("cell", cells(MOVABLE))
def test_moved_chunks_that_are_repaired_in_full_equal_a_full_prefill(cell: Cell) -> None:
    model = build(*cell)
    kv = engine(model, recompute_head_tokens=10_000)
    greedy(kv.generate, prompt("0123"), 1)
    moved = prompt("3120", head=random_ids(47, seed=5))
    out = greedy(kv.generate, moved, 1)
    assert out.report.fallback is None
    assert out.report.moved_tokens == out.report.repaired_tokens > 150
    assert relative_error(logits(out.output), plain_logits(model, moved, 1)) <= tolerance(cell, FLOAT32_REPAIR, moved)


@pytest.mark.parametrize("cell", cells(MOVABLE))
def test_first_layer_keys_of_a_moved_chunk_are_the_keys_computed_there(cell: Cell) -> None:
    model = build(*cell)
    kv = engine(model, recompute_strategy="none")
    greedy(kv.generate, prompt("0123"), 1)
    moved = prompt("3120", head=random_ids(47, seed=5))
    plan = kv.plan(moved)
    records = kv.store.get_many([s.record_id for s in plan if s.record_id]).records
    layout = kv.support.require_layout()
    rows, _ = load_rows(plan, records, layout, 0, moved.shape[1] - 1)
    ours = compat.make_dynamic_cache(*layout.per_layer(rows)).layers[0]
    truth = probe.run(model, moved).layers[0]
    assert plan.count(Kind.MOVED) > 150
    for span in plan.spans(Kind.MOVED):
        for slot in ("keys", "values"):
            a, b = (getattr(layer, slot)[:, :, span.start : span.stop].float() for layer in (ours, truth))
            limit = 1e-5 if cell[2] is torch.float32 else 2**-6
            assert (a - b).abs().max() <= limit * b.abs().max()


@pytest.mark.parametrize("family", [f for f in SUPPORTED_HERE if f.reuse == "exact"], ids=lambda f: f.name)
def test_a_model_that_cannot_move_chunks_says_why_and_never_moves_one(family: Family) -> None:
    model = build(family.name, family.attention[0])
    kv = engine(model)
    assert kv.support.moved_refused
    greedy(kv.generate, prompt("0123"), 1)
    moved = prompt("3120")
    out = greedy(kv.generate, moved, 4)
    assert out.report.moved_tokens == 0
    assert out.report.exact_tokens == 40  # the system prompt
    assert relative_error(logits(out.output), plain_logits(model, moved, 4)) <= FLOAT32_PREFIX


def test_a_recurrent_model_goes_to_transformers_and_says_why() -> None:
    model = build("mamba", "eager")
    kv = engine(model)
    greedy(kv.generate, prompt(), 1)
    out = greedy(kv.generate, prompt(), 4)
    assert out.report.exact_tokens == out.report.moved_tokens == 0
    assert "plain key/value cache" in (out.report.fallback or "")


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
    model = build_fresh("llama-dynamic")
    kv = engine(model)
    ids = random_ids(560, seed=3)
    greedy(kv.generate, ids[:, :200], 1)
    out = greedy(kv.generate, ids[:, :500], 2)
    assert out.report.exact_tokens == 200
    assert kv.support.refuses_length(560)
