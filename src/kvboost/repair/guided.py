"""Rows that the question will read, and a sample that tells what the others lack. Ours.

1. The question alone is run over the assembled cache: the rows that it attends to in the later layers matter most.
2. A sparse regular sample of each chunk is recomputed as well; its mean change corrects the rows that are not
   recomputed (`kvboost.hf.correction`).
"""

from __future__ import annotations

import numpy as np

from kvboost.config import Settings
from kvboost.hf.assembly import Assembly
from kvboost.hf.signals import glance
from kvboost.repair.selection import Selection, moved_positions, no_rows, top
from kvboost.types import Int32Array, ReusePlan

DEFAULT_RATIO = 0.15
QUESTION_ROWS = 48  # at most so many rows at the end of the prompt are asked what they attend to
SAMPLE_STEP = 50


def select_guided(assembly: Assembly, settings: Settings) -> Selection:
    """The rows of largest attention and the sample, within `recompute_ratio` of the moved rows."""
    plan = assembly.plan
    moved = moved_positions(plan)
    ratio = DEFAULT_RATIO if settings.recompute_ratio is None else settings.recompute_ratio
    if not len(moved) or ratio in (0, 1):
        return Selection(moved if ratio else no_rows())
    seen = glance(assembly, assembly.positions(question(plan)), later_full_layers(assembly))
    score = seen.mass[assembly.positions(moved)]
    sampled = sample(plan, settings.sample_step)
    budget = ratio * len(moved) - seen.charged_rows
    if budget < len(sampled):
        sampled = no_rows()
    score[np.searchsorted(moved, sampled)] = float("inf")
    return Selection(top(moved, score, budget), sampled, seen.charged_rows, seen)


def question(plan: ReusePlan) -> Int32Array:
    """The last rows of the prompt: fresh, and at most `QUESTION_ROWS`."""
    last = plan.segments[-1].span
    return np.arange(max(last.start, last.stop - QUESTION_ROWS), last.stop, dtype=np.int32)


def sample(plan: ReusePlan, step: int) -> Int32Array:
    """Every `step`-th position of each moved run, from the middle of the first step on."""
    if not step:
        return no_rows()
    grids = [np.arange(r.start + step // 2, r.stop, step, dtype=np.int32) for r in plan.runs]
    return np.concatenate([no_rows(), *grids])


def later_full_layers(assembly: Assembly) -> list[int]:
    """The later two thirds of the layers that see the whole prompt; of all layers if every one is windowed."""
    layers = [i for i, w in enumerate(assembly.layout.windows) if w is None] or list(range(assembly.num_layers))
    return layers[len(layers) // 3 :]
