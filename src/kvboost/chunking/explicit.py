"""Chunks whose boundaries the caller knows, such as the retrieved documents of a prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from kvboost.errors import InputError
from kvboost.types import Int32Array, Span

if TYPE_CHECKING:
    from kvboost.chunking import Chunker


class ExplicitChunker:
    """Cuts at the given token offsets; a piece larger than `max_tokens` is cut further by `inner`.

    Offsets may come in any order and repeatedly; those at or beyond the ends of the prompt have no effect.
    Raises `InputError` for a negative offset.
    """

    def __init__(self, offsets: Iterable[int], inner: Chunker, max_tokens: int = 256):
        self._offsets = sorted(set(offsets))
        self._inner = inner
        self._max = max_tokens
        if self._offsets and self._offsets[0] < 0:
            raise InputError(f"chunk boundaries are token offsets >= 0, got {self._offsets[0]}")

    def split(self, input_ids: Int32Array) -> list[Span]:
        """Partition `[0, n)`: every offset inside it is a boundary."""
        n = len(input_ids)
        if n == 0:
            return []
        cuts = [0, *(offset for offset in self._offsets if 0 < offset < n), n]
        return [span for a, b in pairwise(cuts) for span in self._pieces(input_ids, a, b)]

    def _pieces(self, input_ids: Int32Array, start: int, stop: int) -> list[Span]:
        if stop - start <= self._max:
            return [Span(start, stop)]
        return [Span(start + s.start, start + s.stop) for s in self._inner.split(input_ids[start:stop])]


def token_offsets(char_offsets: Iterable[int], offset_mapping: Sequence[tuple[int, int]]) -> list[int]:
    """Token offsets of character offsets, by a fast tokenizer's `offset_mapping`.

    A boundary inside a token moves to that token's end: the token belongs to the text that it began in.
    """
    starts = [start for start, _ in offset_mapping]
    return [bisect_left(starts, offset) for offset in char_offsets]
