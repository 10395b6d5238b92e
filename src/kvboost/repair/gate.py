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
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kvboost.config import Settings
from kvboost.types import ReusePlan

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
FAMILIAR = 0.5
"""From this share of common context on, moved text stands behind what it was computed behind: only a line at the head
changed, say. Whatever the fidelity, little is tried first then. Reordered documents come to 0.4 at most."""


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
    first = ladder[0] if settings.recompute_ratio is None else settings.recompute_ratio
    return (first, *(b for b in ladder if b > first))


def estimate(signs: Signs) -> float:
    """Upper estimate of the mean KL per token of the answer, nat."""
    found = signs.as_dict()
    return math.exp(INTERCEPT + sum(w * math.log(max(FLOOR, found[name])) for name, w in WEIGHTS.items()))
