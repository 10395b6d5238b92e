"""From an assembled cache to one that answers: choose rows, run the one forward, and tell what that took."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvboost.config import Settings
from kvboost.hf.assembly import Assembly
from kvboost.hf.correction import CorrectingLayer, Sample, layer_rotations
from kvboost.hf.splice import SpliceLayer
from kvboost.repair.selection import Selection, Strategy
from kvboost.types import Int32Array, ReusePlan, Span

PIECE_TOKENS = 256
"""What a chunk lacks is common to rows that stand near one another."""


@dataclass(frozen=True, slots=True, eq=False)
class Mended:
    """The plan with its repaired rows, after every row of `payload` was filled."""

    plan: ReusePlan
    selection: Selection
    logits: torch.Tensor  # float32 [V]: of the last row
    probed_rows: float  # rows x layers that were computed besides the plan's own, over the layers
    select_s: float
    prefill_s: float


def mend(assembly: Assembly, strategy: Strategy, settings: Settings) -> Mended:
    """Fills the assembly: rows that `strategy` chooses and rows that are fresh are computed at their true positions."""
    began = time.perf_counter()
    selection = strategy(assembly, settings)
    plan = replace(assembly.plan, repaired=selection.rows)
    selected = time.perf_counter()
    logits = compute(assembly, plan.computed_rows(plan.num_tokens), selection.sampled)
    ended = time.perf_counter()
    return Mended(plan, selection, logits, selection.probed_rows + 1, selected - began, ended - selected)


def compute(assembly: Assembly, rows: Int32Array, sampled: Int32Array) -> torch.Tensor:
    """One forward over `rows`; corrects the moved rows that are not among them by what `sampled` ones learnt."""
    at = assembly.positions(rows)
    logits = assembly.forward(at, cache_layers(assembly, at, rows, sampled), logits=True)
    if logits is None:
        raise RuntimeError("the forward ended early")
    return logits


def cache_layers(assembly: Assembly, at: torch.Tensor, rows: Int32Array, sampled: Int32Array) -> list[SpliceLayer]:
    """Splice layers, correcting ones where a sample is given."""
    layers = assembly.splice_layers(at)
    sample = Sample.of(rows, sampled, pieces(assembly.plan.runs), at.device) if len(sampled) else None
    if sample is None:
        return layers
    regime = assembly.support.regime(assembly.plan.num_tokens)
    turns = layer_rotations(assembly.layout, regime, assembly.plan.num_tokens)
    return [CorrectingLayer(la.keys, la.values, at, sample, turn) for la, turn in zip(layers, turns, strict=True)]


def pieces(runs: Sequence[Span]) -> list[Span]:
    """Runs cut into parts of about equal size, none larger than `PIECE_TOKENS`: one correction is learnt for each."""
    cut: list[Span] = []
    for run in runs:
        count = -(-len(run) // PIECE_TOKENS)
        edges = [run.start + len(run) * i // count for i in range(count + 1)]
        cut += [Span(a, b) for a, b in itertools.pairwise(edges)]
    return cut
