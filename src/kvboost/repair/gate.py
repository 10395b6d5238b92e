"""How far off a mended prompt may be, and what each `fidelity` tolerates.

The estimate comes from what the repair itself saw:

* attended: share of the question's attention that rests on rows that were moved and not recomputed.
* unexplained: share of the sampled rows' values that changed and that the correction does not explain. So much the rows
  that were not recomputed may still be off.

`log(KL) = intercept + w . log(signs)` was fitted on the `calibrate` cases of `benchmarks/cells.json`, and its intercept
raised until 95 % of them lay below (`kvboost bench gate`). What repair does to the next token's distribution was tried
too: it says nothing about the rest of the answer (docs/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from kvboost.config import Settings
from kvboost.types import Kind, ReusePlan

FLOOR = 1e-4  # of every sign: a smaller one says no more
INTERCEPT = 2.83
WEIGHTS: Mapping[str, float] = {"attended": 1.22, "unexplained": 0.99}
BOUNDS: Mapping[str, float] = {"balanced": 0.08, "fast": 0.3}
BUDGETS: Mapping[str, tuple[float, ...]] = {
    "familiar": (0.03, 0.15, 0.4),
    "balanced": (0.15, 0.4),
    "fast": (0.05, 0.15, 0.4),
}
"""Shares of the moved rows that are tried one after the other while the estimate is above the bound."""
RUN_TOKENS = 128
"""The first shares are meant for runs of so many tokens or more. Shorter ones have more seams, and more of what they
saw stands elsewhere now: `guided` begins with proportionally more, at most with the next share."""
FAMILIAR = 0.5
"""From this share of common context on, moved text stands behind what it was computed behind: only a line at the head
changed, say. Whatever the fidelity, little is tried first then. Reordered documents come to 0.4 at most."""
WORTH = 0.75
"""Of the rows of a prefill: a larger budget that computes more of them is not tried. The prompt was just judged too far
off, and for a third more rows at most it is exact."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What one repair saw of its own error."""

    attended: float  # share of the question's attention
    unexplained: float  # share of energy

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def bound(settings: Settings) -> float:
    """The risk that the settings tolerate, nat."""
    return BOUNDS[settings.fidelity] if settings.risk_bound is None else settings.risk_bound


def budgets(settings: Settings, plan: ReusePlan) -> tuple[float, ...]:
    """The first budget of the settings, and what is tried above the bound."""
    name = "familiar" if plan.familiarity >= FAMILIAR else settings.fidelity
    ladder = BUDGETS.get(name, BUDGETS["balanced"])
    first = settings.recompute_ratio
    if first is None:
        first = _first(ladder, plan) if settings.recompute_strategy == "guided" else ladder[0]
    return (first, *(b for b in ladder if b > first))


def _first(ladder: Sequence[float], plan: ReusePlan) -> float:
    """The first share for runs as long as the plan's; the second one if that is hardly more."""
    shortness = RUN_TOKENS * len(plan.runs) / max(1, plan.count(Kind.MOVED))
    first = ladder[0] * max(1.0, shortness)
    return first if first < 0.8 * ladder[1] else ladder[1]


def promising(plan: ReusePlan, ratio: float) -> bool:
    """Whether one more forward, with a share `ratio` of the moved rows, is worth trying before a prefill of the prompt.

    It computes fresh rows once more, so behind much new text it costs nearly what the prefill does, and is not exact.
    """
    rows = plan.count(Kind.FRESH) + ratio * plan.count(Kind.MOVED) - len(plan.repaired)
    return rows <= WORTH * (plan.num_tokens - plan.prefix_tokens)


def estimate(signs: Signs) -> float:
    """Upper estimate of the mean KL per token of the answer, nat."""
    found = signs.as_dict()
    return math.exp(INTERCEPT + sum(w * math.log(max(FLOOR, found[name])) for name, w in WEIGHTS.items()))
