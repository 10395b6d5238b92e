"""Which rows of moved chunks are recomputed. One strategy per file; a strategy is one function."""

from collections.abc import Mapping

from kvboost.repair.cacheblend import select_deviating
from kvboost.repair.epic import select_run_heads
from kvboost.repair.guided import select_guided
from kvboost.repair.none import select_nothing
from kvboost.repair.selection import Selection, Strategy
from kvboost.repair.selective import select_wide_boundaries

STRATEGIES: Mapping[str, Strategy] = {
    "none": select_nothing,
    "selective": select_wide_boundaries,
    "cacheblend": select_deviating,
    "epic": select_run_heads,
    "guided": select_guided,
}

__all__ = ["STRATEGIES", "Selection", "Strategy"]
