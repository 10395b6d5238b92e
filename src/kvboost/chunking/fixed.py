"""Chunks of one size, counted from the start: the baseline that loses everything behind an insertion."""

from __future__ import annotations

from kvboost.types import Int32Array, Span


class FixedChunker:
    """Cuts after every `size` tokens; the last chunk may be shorter."""

    def __init__(self, size: int = 128):
        self._size = size

    def split(self, input_ids: Int32Array) -> list[Span]:
        """Partition `[0, n)` into `ceil(n / size)` chunks."""
        n = len(input_ids)
        return [Span(start, min(start + self._size, n)) for start in range(0, n, self._size)]
