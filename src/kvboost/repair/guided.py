"""Rows that the question will read, the heads of runs, and a sample that tells what all others lack. Ours.

1. The last rows of the prompt are run over the assembled cache: the rows that they attend to, in the mean over all
   layers, will matter most for the answer.
2. The first rows of every run changed most: they looked back at what stood before them.
3. A sparse regular sample of each run is recomputed as well; its mean change corrects the rows that are not recomputed
   (`kvboost.hf.correction`).

The search that led here is `benchmarks/search.py`; what it tried and found stands in `docs/log.md`.
"""

from __future__ import annotations

import math

import numpy as np

from kvboost.config import Settings
from kvboost.hf.assembly import Assembly
from kvboost.hf.signals import glance
from kvboost.repair.gate import budgets
from kvboost.repair.selection import Selection, heads, moved_positions, no_rows, top
from kvboost.types import Int32Array, ReusePlan

QUESTION_ROWS = 8  # at the end of the prompt, that are asked what they attend to; more cost more than they tell
HEAD_ROWS = 8  # of every run
SAMPLE_SHARE = 0.4  # of the budget at most; a smaller budget takes a sparser sample
FIXED_SHARE = 0.7  # of the budget at most for sample and heads; the rest goes where the question looks


def select_guided(assembly: Assembly, settings: Settings) -> Selection:
    """Sample, heads, and the rows of largest attention, within the budget."""
    plan = assembly.plan
    moved = moved_positions(plan)
    ratio = budgets(settings, plan)[0]
    if not len(moved) or ratio in (0, 1):
        return Selection(moved if ratio else no_rows())
    seen = glance(assembly, assembly.positions(question(plan)))
    budget = ratio * len(moved) - seen.charged_rows
    sampled = sample(plan, settings.sample_step, SAMPLE_SHARE * budget)
    room = int((FIXED_SHARE * budget - len(sampled)) / max(1, len(plan.runs)))
    first = heads(plan.runs, [max(0, min(HEAD_ROWS, room))] * len(plan.runs))
    score = seen.mass[assembly.positions(moved)]
    score[np.searchsorted(moved, np.union1d(sampled, first))] = float("inf")
    return Selection(top(moved, score, budget), sampled, corrects=True, probed_rows=seen.charged_rows, seen=seen)


def question(plan: ReusePlan) -> Int32Array:
    """The last rows of the prompt: fresh, and at most `QUESTION_ROWS`."""
    last = plan.segments[-1].span
    return np.arange(max(last.start, last.stop - QUESTION_ROWS), last.stop, dtype=np.int32)


def sample(plan: ReusePlan, step: int, limit: float) -> Int32Array:
    """Every `step`-th position of each moved run, from the middle of the first step on; sparser if above `limit`."""
    if not step or limit < 1:
        return no_rows()
    step = max(step, math.ceil(sum(map(len, plan.runs)) / limit))
    grids = [np.arange(r.start + step // 2, r.stop, step, dtype=np.int32) for r in plan.runs]
    return np.concatenate([no_rows(), *grids])
