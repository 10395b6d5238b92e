"""Shift the keys and recompute nothing."""

from kvboost.config import Settings
from kvboost.hf.assembly import Assembly
from kvboost.repair.selection import Selection


def select_nothing(assembly: Assembly, settings: Settings) -> Selection:
    """No rows."""
    return Selection()
