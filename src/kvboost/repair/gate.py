"""How far off a mended prompt may be, and what each `fidelity` tolerates.

The estimate comes from what the repair itself saw; nothing is computed for it but one row of logits:

* movement: KL of the next-token distributions after repair and before. What a part of the rows moved, the others might.
* attended: share of the question's attention that rests on rows that are inexact still.
* unexplained: share of the sampled change of the values that the correction leaves.

`log(KL) = w . log(signs)` was fitted on the `calibrate` cases of `benchmarks/cells.json`, and raised to the quantile
that `BOUNDS` promises (`kvboost bench gate`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvboost.config import Settings

FLOOR = 1e-6  # of every sign: a smaller one says no more


@dataclass(frozen=True, slots=True)
class Signs:
    """What one repair saw of its own error."""

    movement: float  # nat
    attended: float  # share of the question's attention
    unexplained: float  # share of energy
    unrepaired: float  # share of the prompt

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def movement(after: torch.Tensor, before: torch.Tensor) -> float:
    """KL(after || before) of next-token distributions, from logits [V], in nat."""
    p, q = after.log_softmax(-1), before.log_softmax(-1)
    return max(0.0, float((p.exp() * (p - q)).sum()))


WEIGHTS: Mapping[str, float] = {"movement": 0.3, "attended": 0.3, "unexplained": 0.3, "unrepaired": 0.0}
INTERCEPT = -1.0
BOUNDS: Mapping[str, float] = {"balanced": 0.1, "fast": 0.5}
LADDER = (0.4,)
"""Budgets that are tried, one after the other, when the estimate is above the bound; then the prompt is prefilled."""


def bound(settings: Settings) -> float:
    """The risk that the settings tolerate, nat."""
    return BOUNDS[settings.fidelity] if settings.risk_bound is None else settings.risk_bound


def estimate(signs: Signs) -> float:
    """Upper estimate of the mean KL per token of the answer, nat."""
    found: dict[str, Any] = signs.as_dict()
    return math.exp(INTERCEPT + sum(w * math.log(max(FLOOR, found[name])) for name, w in WEIGHTS.items()))
