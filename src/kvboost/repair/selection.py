"""What a strategy decides, and the budget that it decides within."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvboost.config import Settings
from kvboost.hf.assembly import Assembly
from kvboost.hf.signals import Glance
from kvboost.types import Int32Array, Kind, ReusePlan, Span


def no_rows() -> Int32Array:
    """An empty set of positions."""
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Rows of MOVED spans to recompute, and what is known from choosing them."""

    rows: Int32Array = field(default_factory=no_rows)  # sorted positions
    sampled: Int32Array = field(default_factory=no_rows)  # of `rows`: a regular sample, see `kvboost.hf.correction`
    corrects: bool = False  # whether the sample corrects the other rows, or is measured only
    probed_rows: float = 0.0  # cost of choosing, in rows through all layers
    seen: Glance | None = None  # what the question saw before the repair, if it was asked


Strategy = Callable[[Assembly, Settings], Selection]
"""Chooses the rows to recompute. May run forwards over the assembly, which it charges in `probed_rows`."""


def positions_of(plan: ReusePlan, kind: Kind) -> Int32Array:
    """All positions of one kind, sorted."""
    spans = [np.arange(s.start, s.stop, dtype=np.int32) for s in plan.spans(kind)]
    return np.concatenate([no_rows(), *spans])


def moved_positions(plan: ReusePlan) -> Int32Array:
    """All positions that hold a moved row, sorted."""
    return positions_of(plan, Kind.MOVED)


def heads(spans: Sequence[Span], sizes: Sequence[int]) -> Int32Array:
    """The first `sizes[i]` positions of each span."""
    parts = [np.arange(s.start, min(s.stop, s.start + n), dtype=np.int32) for s, n in zip(spans, sizes, strict=True)]
    return np.concatenate([no_rows(), *parts])


def top(positions: Int32Array, scores: torch.Tensor, count: float) -> Int32Array:
    """The `count` positions of the largest scores, sorted."""
    keep = max(0, min(len(positions), int(count)))
    best = scores.topk(keep).indices.cpu().numpy()
    return np.sort(positions[best])
