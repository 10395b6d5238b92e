"""Where chunks are kept: the `Tier` protocol and its implementations."""

from kvboost.store.disk import DiskTier
from kvboost.store.memory import MemoryTier
from kvboost.store.tier import Lease, Tier, TierStats
from kvboost.store.tiered import TieredStore

__all__ = ["DiskTier", "Lease", "MemoryTier", "Tier", "TierStats", "TieredStore"]
