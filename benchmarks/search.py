"""The search for `guided`: ingredients of a repair strategy, screened on the `tune` cases at one charged budget.

    python benchmarks/search.py [--gemma] --out FILE [--limit 10] [--shard 0/2] [--variants NAME ...]

Not a part of the product: what won stands in `kvboost.repair.guided`, what did not in `docs/log.md`. A variant replaces
the strategy `guided` for one call.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import cells
import repair
from compare import Result, report
from kvboost import KVBoost
from kvboost.config import Settings
from kvboost.hf.assembly import Assembly
from kvboost.hf.attention import Look
from kvboost.hf.correction import CorrectingLayer, shrunken_mean
from kvboost.hf.embedded import GEMMA3, SMOLLM2, ensure
from kvboost.hf.signals import value_change
from kvboost.repair import STRATEGIES
from kvboost.repair.guided import later_full_layers, question, sample
from kvboost.repair.selection import Selection, heads, moved_positions, no_rows, top
from kvboost.types import Int32Array

BUDGET = repair.BUDGET


@dataclass(frozen=True)
class Variant:
    """One way to choose rows."""

    mass: str = "later"  # later | all | valued (times |V|) | peak (largest over heads) | rooted (square root)
    step: int = 0  # of the sampled grid; 0: none
    correct: bool = True  # let the sample correct the other rows
    power: float = 0.0  # of the value change at layer 1, on the candidates
    candidates: float = 0.4  # share of the moved rows whose value change is measured
    heads: int = 0  # rows at the head of every run besides
    spread: int = 0  # smooth the score over so many neighbours to each side
    prior: float = 0.0  # extra weight of rows near the head of their chunk
    blind: bool = False  # no question probe at all
    pooled: bool = False  # shrink towards the mean of all runs, not towards nothing
    slots: str = "both"  # what the sample corrects: both | values | keys


VARIANTS: Mapping[str, Variant] = {
    "attention": Variant(),
    "peak": Variant(mass="peak"),
    "attention, grid 25": Variant(step=25),
    "peak, grid 25": Variant(mass="peak", step=25),
    "attention, grid 12": Variant(step=12),
    "peak, grid 12": Variant(mass="peak", step=12),
    "|V|, grid 12": Variant(mass="valued", step=12),
    "root, grid 12": Variant(mass="rooted", step=12),
    "attention, grid 12, uncorrected": Variant(step=12, correct=False),
    "attention, grid 12, heads 4": Variant(step=12, heads=4),
    "attention, grid 12, pooled": Variant(step=12, pooled=True),
    "attention, grid 12, values only": Variant(step=12, slots="values"),
    "attention x change, grid 12": Variant(step=12, power=0.5),
    "grid 7": Variant(step=7, blind=True),
    "grid 7, pooled": Variant(step=7, blind=True, pooled=True),
}
BASELINES = ("none", "epic", "cacheblend", "cacheblend-kl")


class Chooser:
    """A strategy made of a variant; what the question attends to is measured once per assembled prompt."""

    def __init__(self) -> None:
        self.variant = Variant()
        self._seen: dict[str, torch.Tensor] = {}

    def forget(self) -> None:
        self._seen = {}

    def __call__(self, assembly: Assembly, settings: Settings) -> Selection:
        v, plan = self.variant, assembly.plan
        moved = moved_positions(plan)
        asked = question(plan)
        probed = 0.0 if v.blind else float(len(asked))
        score = torch.ones(len(moved)) if v.blind else self.mass(assembly, asked)[torch.from_numpy(moved).long()]
        if v.power:
            score, cost = self._times_change(assembly, moved, score)
            probed += cost
        if v.spread:
            window = 2 * v.spread + 1
            score = torch.nn.functional.avg_pool1d(score[None], window, 1, v.spread)[0]
        if v.prior:
            offset = np.concatenate([np.arange(len(s.span)) for s in plan if s.kind.value == "moved"])
            score = score * (1 + v.prior * torch.from_numpy(np.exp(-offset / 16)).float())
        score = score.clone()
        sampled = sample(plan, v.step)
        first = heads(plan.runs, [v.heads] * len(plan.runs))
        score[np.searchsorted(moved, np.union1d(sampled, first))] = float("inf")
        rows = top(moved, score, BUDGET * len(moved) - probed)
        if v.blind:
            rows = sampled
        return Selection(rows, sampled if v.correct else no_rows(), probed)

    def mass(self, assembly: Assembly, asked: Int32Array) -> torch.Tensor:
        """The question's attention per position, float32 [T]."""
        if not self._seen:
            self._seen = look_all(assembly, asked)
        return self._seen[self.variant.mass]

    def _times_change(self, assembly: Assembly, moved: Int32Array, score: torch.Tensor) -> tuple[torch.Tensor, float]:
        keep = top(moved, score, self.variant.candidates * len(moved))
        change, cost = value_change(assembly, assembly.positions(keep), 1)
        out = torch.zeros_like(score)
        at = torch.from_numpy(np.searchsorted(moved, keep))
        out[at] = score[at] * change.pow(self.variant.power)
        return out, cost


def look_all(assembly: Assembly, asked: Int32Array) -> dict[str, torch.Tensor]:
    """Every kind of attention mass from one forward of the question."""
    rows = assembly.positions(asked)
    kinds = ("later", "all", "valued", "peak", "rooted")
    mass = {k: torch.zeros(assembly.plan.num_tokens) for k in kinds}
    later = set(later_full_layers(assembly))

    def observe(look: Look) -> None:
        weights = look.log_weights().exp_()
        keys = look.block.keys
        mass["all"][keys] += weights.mean(0).sum(0)
        if look.layer not in later:
            return
        mass["later"][keys] += weights.mean(0).sum(0)
        mass["peak"][keys] += weights.amax(0).sum(0)
        mass["rooted"][keys] += weights.sqrt().mean(0).sum(0)
        norm = look.value[:, keys].float().norm(dim=-1)
        norm = norm.repeat_interleave(weights.shape[0] // norm.shape[0], 0)
        mass["valued"][keys] += (weights.sum(1) * norm).mean(0) / norm.mean()

    hidden = assembly.fresh_positions()
    hidden[rows] = False
    assembly.forward(rows, assembly.splice_layers(rows), observe=observe, hidden=hidden)
    return mass


def pooled_mean(change: torch.Tensor, chunk: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """As `shrunken_mean`, in two steps: of all chunks together, then of what each has besides."""
    one = torch.zeros_like(chunk)
    common = shrunken_mean(change, one, counts.sum()[None])
    return common + shrunken_mean(change - common, chunk, counts)


def slot_filter(slots: str) -> Callable[..., None]:
    """`CorrectingLayer._correct`, for one slot only."""
    original = CorrectingLayer._correct

    def correct(self: CorrectingLayer, stored: torch.Tensor, fresh: torch.Tensor, *, rotated: bool) -> None:
        if slots == "both" or rotated == (slots == "keys"):
            original(self, stored, fresh, rotated=rotated)

    return correct


@contextlib.contextmanager
def patched(chooser: Chooser) -> Iterator[Callable[[str], None]]:
    """Yields what switches to a variant by name; everything is as before afterwards."""
    with contextlib.ExitStack() as stack:
        inner = stack.enter_context(contextlib.ExitStack())

        def switch(name: str) -> None:
            inner.close()
            if name in BASELINES:
                return
            chooser.variant = VARIANTS[name]
            inner.enter_context(mock.patch.dict(STRATEGIES, guided=chooser))  # type: ignore[arg-type]
            if chooser.variant.pooled:
                inner.enter_context(mock.patch("kvboost.hf.correction.shrunken_mean", pooled_mean))
            if chooser.variant.slots != "both":
                filtered = slot_filter(chooser.variant.slots)
                inner.enter_context(mock.patch.object(CorrectingLayer, "_correct", filtered))

        yield switch


def measure(
    kv: KVBoost, reader: cells.Reader, case: cells.Case, variants: Mapping[str, Any], contexts: list[str]
) -> Iterator[Result]:
    """As `repair.measure`, for variants of one strategy."""
    chooser = Chooser()
    settings = {name: repair.SYSTEMS.get(name, {"recompute_strategy": "guided"}) for name in variants}
    with patched(chooser) as switch:
        yield from repair.measure(kv, reader, case, settings, contexts, before=switch, begin=chooser.forget)


def main() -> None:
    """Screens and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=list(cells.KINDS), choices=cells.KINDS)
    parser.add_argument("--contexts", nargs="+", default=list(cells.CONTEXTS), choices=cells.CONTEXTS)
    parser.add_argument("--variants", nargs="+", default=[*BASELINES, *VARIANTS])
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kv = KVBoost.from_pretrained(ensure(GEMMA3 if arguments.gemma else SMOLLM2), dtype=torch.float32)
    number, of = map(int, arguments.shard.split("/"))
    chosen = cells.load(arguments.kinds, ["tune"], arguments.limit)[number::of]
    variants = dict.fromkeys(arguments.variants)
    report(repair.run(kv, chosen, variants, arguments.contexts, arguments.out, measure), ours="attention")


if __name__ == "__main__":
    main()
