"""Shift the keys and recompute nothing."""

import numpy as np

from kvboost.config import Settings
from kvboost.types import Int32Array, ReusePlan


def select_nothing(plan: ReusePlan, settings: Settings) -> Int32Array:
    """No rows."""
    return np.empty(0, np.int32)
