"""Which rows of moved chunks are recomputed. One strategy per file; a strategy is one function."""

from collections.abc import Callable, Mapping

from kvboost.config import Settings
from kvboost.repair.epic import select_run_heads
from kvboost.repair.none import select_nothing
from kvboost.types import Int32Array, ReusePlan

Strategy = Callable[[ReusePlan, Settings], Int32Array]
"""Positions to recompute, sorted, all inside MOVED spans of the plan."""

STRATEGIES: Mapping[str, Strategy] = {"none": select_nothing, "epic": select_run_heads}

__all__ = ["STRATEGIES", "Strategy"]
