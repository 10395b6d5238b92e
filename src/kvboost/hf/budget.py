"""How much memory the cache may take: bytes as set, or a share of what the device has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvboost.config import Settings
from kvboost.errors import SettingsError

RESERVE = 0.15  # share of the device that activations, the caches of running requests and the runtime need
CGROUP = Path("/sys/fs/cgroup")
LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # version 2, version 1


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of the device of a model, and of its weights."""

    total_bytes: int
    weights_bytes: int
    available_bytes: int  # that a share is taken of: all on CUDA, what is left after load on a CPU

    @classmethod
    def of(cls, model: PreTrainedModel) -> DeviceMemory:
        """Asks the device, the control group and the weights."""
        weights = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        if model.device.type == "cuda":
            total = torch.cuda.get_device_properties(model.device).total_memory
            return cls(total, weights, total)
        total = host_bytes()
        return cls(total, weights, max(0, total - weights))


def cache_budget(settings: Settings, memory: DeviceMemory) -> int:
    """Bytes for the cache: `cache_bytes` if it is set, else `kv_cache_size_ratio` of the available memory.

    Raises `SettingsError` if weights, cache and `RESERVE` do not fit the device.
    """
    if settings.cache_bytes is not None:
        return settings.cache_bytes
    budget = int(settings.kv_cache_size_ratio * memory.available_bytes)
    largest = (1 - RESERVE) * memory.total_bytes - memory.weights_bytes
    if budget > largest:
        fits = max(0.0, largest / max(1, memory.available_bytes))
        raise SettingsError(
            f"setting kv_cache_size_ratio={settings.kv_cache_size_ratio:g} does not fit: the weights take "
            f"{memory.weights_bytes / 2**30:.2f} of {memory.total_bytes / 2**30:.2f} GiB, the cache would take "
            f"{budget / 2**30:.2f}, and {RESERVE:.0%} stay free for running requests. The largest that fits is "
            f"{fits:.2f}; or set cache_bytes"
        )
    return budget


def host_bytes(root: Path = CGROUP) -> int:
    """Memory that this process may use: the smaller of the machine's and its control group's."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for name in LIMITS if (limit := _read_limit(root / name)) is not None)])


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def is_out_of_memory(error: Exception) -> bool:
    """True if the device had no memory left; torch has a class of its own for that on CUDA only."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def release_device_memory(device: torch.device) -> None:
    """Gives what torch keeps for later back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
