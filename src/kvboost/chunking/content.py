"""Content-defined chunks: every cut is decided by the text around it, so an edit moves only the cuts next to it."""

from __future__ import annotations

import numpy as np

from kvboost.chunking.boundaries import MEAN_OF_GAP, Positions, Priorities, Rank, partition, window_hashes
from kvboost.chunking.separators import Marks, Separators
from kvboost.types import Int32Array, Span

CONTEXT_TOKENS = 16  # on each side of a cut: enough that log lines of one template differ, few enough to stay local


class ContentChunker:
    """The default chunker. Cuts, from the strongest kind of boundary to the weakest:

    1. turn starts and document markers, at least `min_tokens / 2` apart, and behind the number of a marker;
    2. ends of blank lines, at least `min_tokens` apart;
    3. in pieces that are still long, line and sentence starts, then any token, by rolling hash.

    Beside a stronger boundary a chunk may be a quarter of that: a changed two-line head must not take the document
    behind it along. A marker with its number (`Document [7`) is a chunk of its own, the document behind it another.
    Hash cuts keep a distance of `gap` from each other and from separators, so no hash window reaches across a
    separator, and a piece under `2 gap` stays whole. The mean of hash-cut chunks is `avg_tokens`, no chunk is
    larger than `max_tokens`. Where `2 * min_tokens > max_tokens`, the maximum wins.
    """

    def __init__(self, separators: Separators, min_tokens: int = 32, avg_tokens: int = 128, max_tokens: int = 256):
        self._separators = separators
        self._min = min_tokens
        self._gap = hash_gap(min_tokens, avg_tokens, max_tokens)

    def split(self, input_ids: Int32Array) -> list[Span]:
        """Partition `[0, n)` into chunks; deterministic, a few milliseconds for 8k tokens."""
        if len(input_ids) == 0:
            return []
        marks = self._separators.find(input_ids)
        hashes = window_hashes(input_ids, hash_context(self._gap))
        ranks = separator_ranks(marks, hashes, self._min) + hash_ranks(marks, hashes, self._gap)
        return partition(len(input_ids), ranks)


def hash_gap(min_tokens: int, avg_tokens: int, max_tokens: int) -> int:
    """Least distance of hash cuts that gives the wanted mean and, as pieces stay under twice the gap, the maximum."""
    return max(1, min(max(min_tokens, round(avg_tokens / MEAN_OF_GAP)), (max_tokens + 1) // 2))


def hash_context(gap: int) -> int:
    """Tokens hashed on each side of a cut: a power of two within the distance that a cut keeps from separators."""
    return 1 << (min(CONTEXT_TOKENS, gap).bit_length() - 1)


def separator_ranks(marks: Marks, hashes: Priorities, min_tokens: int) -> list[Rank]:
    """Hard boundaries; which of several close ones is taken is decided by hash, so by nearby text only."""
    near = max(1, min_tokens // 2)
    kinds = (
        (marks.turns, near, max(1, near // 4)),
        (marks.markers, near, max(1, near // 4)),
        (marks.numbers, near, 1),  # the numbered head is a few tokens, mostly computed anew: its document is not
        (marks.blanks, min_tokens, max(1, min_tokens // 4)),
    )
    return [Rank(at, hashes[at], gap, edge) for at, gap, edge in kinds]


def hash_ranks(marks: Marks, hashes: Priorities, gap: int) -> list[Rank]:
    """Boundaries inside long pieces: line and sentence starts where there are any, else anywhere."""
    everywhere: Positions = np.arange(len(hashes), dtype=np.int64)
    return [Rank(at, hashes[at], gap, gap) for at in (marks.soft, everywhere)]
