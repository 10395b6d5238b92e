"""The search for `guided`: ingredients of a repair strategy, screened on the `tune` cases at one charged budget.

    python benchmarks/search.py [--gemma] --out FILE [--limit 10] [--shard 0/2] [--variants NAME ...]

Not a part of the product: what won stands in `kvboost.repair.guided`, what did not in `docs/log.md`. A variant replaces
the strategy `guided` for one call.
"""

from __future__ import annotations

import argparse
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


VARIANTS: Mapping[str, Variant] = {
    "attention": Variant(),
    "attention, all layers": Variant(mass="all"),
    "attention x |V|": Variant(mass="valued"),
    "attention, peak head": Variant(mass="peak"),
    "attention, root": Variant(mass="rooted"),
    "attention + grid 25": Variant(step=25),
    "attention + grid 50": Variant(step=50),
    "attention + grid 25, no correction": Variant(step=25, correct=False),
    "|V| + grid 25": Variant(mass="valued", step=25),
    "|V| + grid 50": Variant(mass="valued", step=50),
    "attention x change": Variant(power=1.0),
    "attention x root change": Variant(power=0.5),
    "|V| x change + grid 25": Variant(mass="valued", power=0.5, step=25),
    "attention + heads 4": Variant(heads=4),
    "attention + heads 8": Variant(heads=8),
    "attention, smoothed": Variant(spread=1),
    "attention + prior": Variant(prior=3.0),
    "grid 12": Variant(step=12, blind=True),
    "grid 7": Variant(step=7, blind=True),
}


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


def measure(
    kv: KVBoost, reader: cells.Reader, case: cells.Case, variants: Mapping[str, Variant], contexts: list[str]
) -> Iterator[Result]:
    """As `repair.measure`, for variants of one strategy."""
    chooser = Chooser()

    def prepare(name: str) -> None:
        chooser.variant = variants.get(name, Variant())

    with mock.patch.dict(STRATEGIES, guided=chooser):  # type: ignore[arg-type]
        yield from repair.measure(kv, reader, case, dict.fromkeys(variants, {}), contexts, before=prepare, begin=chooser.forget)


def main() -> None:
    """Screens and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma", action="store_true")
    parser.add_argument("--kinds", nargs="+", default=list(cells.KINDS), choices=cells.KINDS)
    parser.add_argument("--contexts", nargs="+", default=list(cells.CONTEXTS), choices=cells.CONTEXTS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kv = KVBoost.from_pretrained(ensure(GEMMA3 if arguments.gemma else SMOLLM2), dtype=torch.float32)
    number, of = map(int, arguments.shard.split("/"))
    chosen = cells.load(arguments.kinds, ["tune"], arguments.limit)[number::of]
    variants = {name: VARIANTS[name] for name in arguments.variants}
    work: Callable[..., Any] = measure
    report(repair.run(kv, chosen, variants, arguments.contexts, arguments.out, work), ours="attention")


if __name__ == "__main__":
    main()
