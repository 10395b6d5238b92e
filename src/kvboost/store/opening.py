"""The store that the settings describe: memory in front, and behind it a directory, a Redis server, or both."""

from __future__ import annotations

from kvboost.config import Settings
from kvboost.store.memory import MemoryTier
from kvboost.store.tier import Tier
from kvboost.store.tiered import TieredStore

LEAST_QUEUE_BYTES = 16 << 20  # where there are lasting tiers


def open_store(settings: Settings, memory_bytes: int) -> TieredStore:
    """Makes every tier that is set. Raises `SettingsError` for what cannot be honoured, never for a tier that is down.

    `memory_bytes` holds for the memory tier and the write queue together. Where there are lasting tiers, a small budget
    is exceeded by a queue of `LEAST_QUEUE_BYTES`: without one nothing would reach them.
    """
    lasting = lasting_tiers(settings)
    share_bytes = memory_bytes // (8 if lasting else 32)
    queue_bytes = min(settings.write_queue_bytes, max(share_bytes, LEAST_QUEUE_BYTES if lasting else 0))
    memory = MemoryTier(
        memory_bytes - min(queue_bytes, share_bytes),
        max_variants=settings.max_variants,
        namespace_bytes=settings.namespace_bytes,
    )
    return TieredStore([memory, *lasting], queue_bytes=queue_bytes)


def lasting_tiers(settings: Settings) -> list[Tier]:
    """The disk and Redis tiers that are set."""
    url = settings.redis_url.get_secret_value()
    if not (settings.disk_directory or url):
        return []
    from kvboost.store.records import Seal

    seal = Seal(settings.hash_secret.get_secret_value(), encrypt=settings.encrypt)
    tiers: list[Tier] = []
    if settings.disk_directory:
        from kvboost.store.disk import DiskTier

        tiers.append(DiskTier(settings.disk_directory, settings.disk_bytes, seal, max_variants=settings.max_variants))
    if url:
        from kvboost.store.redis import RedisTier

        tiers.append(
            RedisTier(
                url,
                seal,
                ttl_s=settings.redis_ttl_s,
                timeout_s=settings.redis_timeout_s,
                ca_file=settings.redis_ca_file or None,
            )
        )
    return tiers
