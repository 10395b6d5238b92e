"""The measurements of the exactness matrix, one function each.

`test_families.py` asserts them, `benchmarks/exactness.py` writes them down. An error is the largest difference over
the largest value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from families import BY_NAME, Family, build, random_ids
from kvboost import ReuseReport
from kvboost.hf import compat, probe
from kvboost.hf.load import load_rows
from kvboost.types import Kind
from scenario import engine, greedy, join, logits, plain_logits, prompt, relative_error

# in 16 bit a router tie may go the other way: float32 only
MIXTURES = {"mixtral", "qwen3-moe", "deepseek-v3", "deepseek-v3.2", "glm-dsa"}
REORDERED = prompt("3120", head=random_ids(47, seed=5))
LONGER = join(prompt(), random_ids(20, seed=77))


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix."""

    family: str
    attention: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.family}-{self.attention}-{str(self.dtype).removeprefix('torch.')}"

    def model(self) -> PreTrainedModel:
        return build(self.family, self.attention, self.dtype)


def cells(families: list[Family]) -> Iterator[Cell]:
    for family in families:
        for attention in family.attention:
            yield Cell(family.name, attention, torch.float32)
            if family.name not in MIXTURES:
                yield Cell(family.name, attention, torch.bfloat16)


def yardstick(cell: Cell, input_ids: torch.Tensor) -> float:
    """bfloat16: twice what eager and SDPA differ by in transformers alone, over the same tokens.

    A family with one implementation only is measured against its own float32.
    """
    reference = prompt_logits(cell.model(), input_ids)
    if len(BY_NAME[cell.family].attention) == 1:
        return relative_error(reference, prompt_logits(build(cell.family, cell.attention), input_ids))
    other = "eager" if cell.attention == "sdpa" else "sdpa"
    return 2 * relative_error(reference, prompt_logits(build(cell.family, other, cell.dtype), input_ids))


def prompt_logits(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids).logits[0].float()


def no_reuse_error(cell: Cell) -> tuple[float, bool]:
    """Logits of a prompt that nothing is known of, and whether the tokens are those of transformers."""
    model, ids = cell.model(), prompt()
    out = greedy(engine(model).generate, ids)
    assert out.report.fresh_tokens == ids.shape[1]
    same = torch.equal(out.output.sequences, greedy(model.generate, ids).sequences)
    return relative_error(logits(out.output), plain_logits(model, ids)), same


@dataclass(frozen=True)
class PrefixResult:
    """`same_rows`: the loaded rows are bit-equal; `same_logits`: bit-equal to transformers' own continuation."""

    same_rows: bool
    same_logits: bool
    error: float
    report: ReuseReport


def exact_prefix(cell: Cell) -> PrefixResult:
    """A longer prompt behind one that was served before."""
    model, first = cell.model(), prompt()
    kv = engine(model)
    greedy(kv.generate, first, 1)
    reference = probe.run(model, first)
    ours = loaded_cache(kv, LONGER, first.shape[1])
    pairs = zip(ours.layers, reference.layers, strict=True)
    same_rows = all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)
    out = greedy(kv.generate, LONGER, 4)
    arguments = {compat.CACHE_ARGUMENT: reference, "attention_mask": torch.ones_like(LONGER)}
    same_logits = torch.equal(logits(out.output), logits(greedy(model.generate, LONGER, 4, **arguments)))
    return PrefixResult(
        same_rows, same_logits, relative_error(logits(out.output), plain_logits(model, LONGER, 4)), out.report
    )


def full_repair(cell: Cell, strategy: str = "epic") -> tuple[float, ReuseReport]:
    """Reordered documents of which every moved row is recomputed, against a full prefill."""
    model = cell.model()
    kv = engine(model, recompute_strategy=strategy, recompute_ratio=1.0)
    greedy(kv.generate, prompt("0123"), 1)
    out = greedy(kv.generate, REORDERED, 1)
    return relative_error(logits(out.output), plain_logits(model, REORDERED, 1)), out.report


def shift_error(cell: Cell) -> float:
    """First-layer rows of moved chunks against the rows that the model computes there."""
    model = cell.model()
    kv = engine(model, recompute_strategy="none")
    greedy(kv.generate, prompt("0123"), 1)
    ours = loaded_cache(kv, REORDERED, REORDERED.shape[1] - 1).layers[0]
    truth = probe.run(model, REORDERED).layers[0]
    plan = kv.plan(REORDERED)
    assert plan.count(Kind.MOVED) > 150
    return max(
        relative_error(*(getattr(la, slot)[:, :, span.start : span.stop].float() for la in (ours, truth)))
        for span in plan.spans(Kind.MOVED)
        for slot in ("keys", "values")
    )


def loaded_cache(kv: Any, input_ids: torch.Tensor, num_rows: int) -> Any:
    """The rows that the engine would load for a prompt, before anything is computed."""
    plan = kv.plan(input_ids)
    layout = kv.support.require_layout()
    with kv.store.get_many([s.record_id for s in plan if s.record_id]) as lease:
        rows, _ = load_rows(plan, lease.records, layout, 0, num_rows)
    return compat.make_dynamic_cache(*layout.per_layer(rows))
