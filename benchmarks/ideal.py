"""The most that any cache could reuse: every prompt token inside a run that stands, somewhere, in a stored text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost.types import Int32Array

Mask = npt.NDArray[np.bool_]


class RunIndex:
    """All windows of `min_run` tokens of the texts added so far.

    Every common run of at least `min_run` tokens is a union of such windows, so looking up windows finds exactly the
    tokens that a search for longest common runs would. Windows are kept by a 64-bit hash; at a million windows the
    chance of any false match is below one in ten million.
    """

    def __init__(self, min_run: int = 16):
        self._min_run = min_run
        self._windows: set[int] = set()

    def add(self, text: Int32Array) -> None:
        """Store a text."""
        self._windows.update(self._hashes(text))

    def mask(self, prompt: Int32Array) -> Mask:
        """bool[n]: the tokens of `prompt` that lie in a stored run. Other runs may be stored in other texts."""
        covered = np.zeros(len(prompt), np.bool_)
        for start, window in enumerate(self._hashes(prompt)):
            if window in self._windows:
                covered[start : start + self._min_run] = True
        return covered

    def _hashes(self, text: Int32Array) -> list[int]:
        if len(text) < self._min_run:
            return []
        factors = np.random.default_rng(16).integers(1, 2**63, self._min_run, np.uint64) * np.uint64(2) + np.uint64(1)
        mixed = np.asarray(text).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        windows: npt.NDArray[Any] = np.lib.stride_tricks.sliding_window_view(mixed, self._min_run)
        hashes: list[int] = (windows * factors).sum(axis=1, dtype=np.uint64).tolist()
        return hashes


def ideal_mask(prompt: Int32Array, stored: Iterable[Int32Array], min_run: int = 16) -> Mask:
    """bool[n]: the tokens of `prompt` inside a run of at least `min_run` tokens of some stored text."""
    index = RunIndex(min_run)
    for text in stored:
        index.add(text)
    return index.mask(prompt)


def ideal_reuse(prompt: Int32Array, stored: list[Int32Array], min_run: int = 16) -> int:
    """How many tokens of `prompt` any-position reuse could find at best."""
    return int(ideal_mask(prompt, stored, min_run).sum())


def ideal_prefix_reuse(prompt: Int32Array, stored: Iterable[Int32Array]) -> int:
    """How many tokens a prefix cache without block granularity would find: the longest common prefix."""
    return max((common_prefix(prompt, text) for text in stored), default=0)


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n
