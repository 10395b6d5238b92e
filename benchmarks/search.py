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
from kvboost.hf.correction import CorrectingLayer, shrunken_mean, shrunken_means
from kvboost.hf.embedded import GEMMA3, SMOLLM2, ensure
from kvboost.hf.signals import value_change
from kvboost.repair import STRATEGIES
from kvboost.repair.guided import sample
from kvboost.repair.selection import Selection, heads, moved_positions, no_rows, top
from kvboost.types import Int32Array, ReusePlan, Span

BUDGET = repair.BUDGET


@dataclass(frozen=True)
class Variant:
    """One way to choose rows."""

    mass: str = "all"  # later | all | valued (times |V|) | peak (largest over heads) | rooted (square root)
    step: int = 25  # of the sampled grid; 0: none
    correct: bool = True  # let the sample correct the other rows
    power: float = 0.0  # of the value change at layer 1, on the candidates
    candidates: float = 0.4  # share of the moved rows whose value change is measured
    heads: int = 4  # rows at the head of every run besides
    spread: int = 0  # smooth the score over so many neighbours to each side
    prior: float = 0.0  # extra weight of rows near the head of their chunk
    blind: bool = False  # no question probe at all
    pooled: bool = True  # shrink towards the mean of all chunks, not towards nothing
    fine: bool = False  # half chunks
    damp: float = 1.0  # how much of the shrunken mean is added
    strict: bool = False  # a mean must be twice as sure to be taken
    slope: bool = False  # besides the mean, how far the sampled rows went back to their chunk's mean
    asked: int = 8  # rows of the question
    slots: str = "both"  # what the sample corrects: both | values | keys


VARIANTS: Mapping[str, Variant] = {
    "heads 4": Variant(),
    "heads 8": Variant(heads=8),
    "heads 12": Variant(heads=12),
    "heads 8, strict": Variant(heads=8, strict=True),
    "heads 8, grid 40": Variant(heads=8, step=40),
}
BASELINES = ("epic",)


class Chooser:
    """A strategy made of a variant; what the question attends to is measured once per assembled prompt."""

    def __init__(self) -> None:
        self.variant = Variant()
        self._seen: dict[int, dict[str, torch.Tensor]] = {}

    def forget(self) -> None:
        self._seen = {}

    def __call__(self, assembly: Assembly, settings: Settings) -> Selection:
        v, plan = self.variant, assembly.plan
        moved = moved_positions(plan)
        last = plan.segments[-1].span
        asked = np.arange(max(last.start, last.stop - v.asked), last.stop, dtype=np.int32)
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
        sampled = sample(plan, v.step, len(moved))
        first = heads(plan.runs, [v.heads] * len(plan.runs))
        score[np.searchsorted(moved, np.union1d(sampled, first))] = float("inf")
        rows = top(moved, score, BUDGET * len(moved) - probed)
        if v.blind:
            rows = np.union1d(sampled, first).astype(np.int32)
        return Selection(rows, sampled if v.correct else no_rows(), probed_rows=probed)

    def mass(self, assembly: Assembly, asked: Int32Array) -> torch.Tensor:
        """The question's attention per position, float32 [T]."""
        if len(asked) not in self._seen:
            self._seen[len(asked)] = look_all(assembly, asked)
        return self._seen[len(asked)][self.variant.mass]

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


def damped(factor: float) -> Callable[..., torch.Tensor]:
    """`shrunken_means`, scaled."""
    return lambda *arguments: factor * shrunken_means(*arguments)


def strict_mean(change: torch.Tensor, chunk: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """`shrunken_mean` that takes off twice the variance."""
    once = shrunken_mean(change, chunk, counts)
    mean = change.new_zeros(once.shape).index_add_(1, chunk, change) / counts[None, :, None].clamp_min(1)
    factor = (once * mean).sum(-1, keepdim=True) / mean.pow(2).sum(-1, keepdim=True).clamp_min(1e-12)
    return mean * (2 * factor - 1).clamp_min(0)


def halves(spans: Callable[..., list[Span]]) -> Callable[..., list[Span]]:
    """As `ReusePlan.spans`, every span cut in two."""

    def cut(plan: Any, kind: Any) -> list[Span]:
        found = spans(plan, kind)
        return [
            h for s in found for h in (Span(s.start, (s.start + s.stop) // 2), Span((s.start + s.stop) // 2, s.stop))
        ]

    return cut


def slot_filter(slots: str) -> Callable[..., None]:
    """`CorrectingLayer._correct`, for one slot only."""
    original = CorrectingLayer._correct

    def correct(self: CorrectingLayer, slot: str, *tensors: torch.Tensor) -> None:
        if slot == slots:
            original(self, slot, *tensors)

    return correct


def correct_with_slope(
    self: CorrectingLayer, slot: str, stored: torch.Tensor, fresh: torch.Tensor, added: torch.Tensor
) -> None:
    """As `CorrectingLayer._correct`, with one slope per head: change = mean + slope * (row - chunk's mean row)."""
    s, rotated = self.sample, slot == self.turn.spec.slot
    old, rest = stored[:, s.positions].float(), stored[:, s.rest].float()
    change = fresh[:, s.at].float() - old
    if rotated:
        old, change = (self.turn.apply(x, s.positions, inverse=True) for x in (old, change))
        rest = self.turn.apply(rest, s.rest, inverse=True)
    means = shrunken_means(change, s.chunk, s.counts)
    centre = old.new_zeros(old.shape[0], len(s.counts), old.shape[2]).index_add_(1, s.chunk, old)
    centre = centre / s.counts[None, :, None].clamp_min(1)
    x, y = old - centre[:, s.chunk], change - means[:, s.chunk]
    energy = x.pow(2).sum((1, 2)).clamp_min(1e-12)
    slope = (x * y).sum((1, 2)) / energy
    variance = ((x * (y - slope[:, None, None] * x)).sum(2) ** 2).sum(1) / energy**2
    slope = slope * (1 - variance / slope.pow(2).clamp_min(1e-12)).clamp(0, 1)
    delta = means[:, s.rest_chunk] + slope[:, None, None] * (rest - centre[:, s.rest_chunk])
    if rotated:
        delta = self.turn.apply(delta, s.rest)
    stored.index_add_(1, s.rest, delta.to(stored.dtype))


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
            if not chooser.variant.pooled:
                inner.enter_context(mock.patch("kvboost.hf.correction.shrunken_means", shrunken_mean))
            if chooser.variant.damp != 1:
                inner.enter_context(mock.patch("kvboost.hf.correction.shrunken_means", damped(chooser.variant.damp)))
            if chooser.variant.strict:
                inner.enter_context(mock.patch("kvboost.hf.correction.shrunken_mean", strict_mean))
            if chooser.variant.slope:
                inner.enter_context(mock.patch.object(CorrectingLayer, "_correct", correct_with_slope))
            if chooser.variant.fine:
                inner.enter_context(mock.patch.object(ReusePlan, "spans", halves(ReusePlan.spans)))
            if chooser.variant.slots != "both":
                filtered = slot_filter(chooser.variant.slots)
                inner.enter_context(mock.patch.object(CorrectingLayer, "_correct", filtered))

        yield switch


def later_full_layers(assembly: Assembly) -> list[int]:
    """The later two thirds of the layers that see the whole prompt."""
    layers = [i for i, w in enumerate(assembly.layout.windows) if w is None]
    return layers[len(layers) // 3 :]


def measure(
    kv: KVBoost, reader: cells.Reader, case: cells.Case, variants: Mapping[str, Any], contexts: list[str]
) -> Iterator[Result]:
    """As `repair.measure`, for variants of one strategy."""
    chooser = Chooser()
    settings = {name: repair.SYSTEMS.get(name, {"recompute_strategy": "guided", "gate": False}) for name in variants}
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
    parser.add_argument("--skip", type=int, default=0, help="so many cases were looked at before")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kv = KVBoost.from_pretrained(ensure(GEMMA3 if arguments.gemma else SMOLLM2), dtype=torch.float32)
    number, of = map(int, arguments.shard.split("/"))
    chosen = cells.load(arguments.kinds, ["tune"], arguments.limit)[arguments.skip :][number::of]
    variants = dict.fromkeys(arguments.variants)
    report(repair.run(kv, chosen, variants, arguments.contexts, arguments.out, measure), ours="attention")


if __name__ == "__main__":
    main()
