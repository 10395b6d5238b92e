"""Where chunks are kept: the `Tier` protocol and its implementations."""

from kvboost.store.memory import MemoryTier
from kvboost.store.tier import Lease, Tier, TierStats

__all__ = ["Lease", "MemoryTier", "Tier", "TierStats"]
