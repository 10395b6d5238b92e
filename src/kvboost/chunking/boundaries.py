"""Chooses cuts among candidates by falling priority, at a least distance from each other.

    text        ....|.........|..|............|......      | candidates, with a priority from nearby text only
    first       ..............|......................      the best one is taken,
    then        ....|.........|...............|......      then the best of each side that keeps its distance

Taking the best candidate first is what keeps cuts local. A scan from left to right would make each cut depend on the
one before it, so one inserted token could move all that follow; here a cut depends on better candidates within `gap`
tokens, those on still better ones, and such a chain of rising random numbers is short (its chance falls faster than
exponentially with its length). Candidates in every position leave pieces in `[gap, 2 gap)` with a mean of 1.34 gap:
cars parking at random along a kerb (Renyi, 1958). Cutting at the extreme of a local neighbourhood is the idea of
winnowing (Schleimer et al., 2003) and of AE chunking (Zhang et al., 2015).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost.types import Span

MEAN_OF_GAP = 1.3376  # mean piece over gap when every position is a candidate (Renyi's parking constant, inverted)

Positions = npt.NDArray[np.int64]
Priorities = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """Candidates of one kind. A cut before token `positions[i]`; of close ones the largest priority wins."""

    positions: Positions  # sorted
    priorities: Priorities  # one per position; of equal ones the leftmost wins, which keeps periodic text in phase
    gap: int  # least distance between two cuts of this rank, >= 1
    edge: int  # least distance to a cut of a higher rank and to both ends, >= 1


def partition(num_tokens: int, ranks: Sequence[Rank]) -> list[Span]:
    """Cut `[0, num_tokens)` rank by rank, highest first. Each rank cuts within the pieces that the ones before left."""
    if num_tokens <= 0:
        return []
    cuts = [0, num_tokens]
    for rank in ranks:
        cuts += [cut for a, b in pairwise(cuts) for cut in _best_first(rank, a + rank.edge, b - rank.edge)]
        cuts.sort()
    return [Span(a, b) for a, b in pairwise(cuts)]


def _best_first(rank: Rank, low: int, high: int) -> Iterator[int]:
    """Cuts of a rank within `[low, high]`, in no order."""
    pending = [(low, high)]  # a stack: recursion would be as deep as the text has chunks
    while pending:
        low, high = pending.pop()
        if low > high:
            continue
        first, last = rank.positions.searchsorted((low, high + 1))
        if first < last:
            cut = int(rank.positions[first + rank.priorities[first:last].argmax()])
            yield cut
            pending += [(low, cut - rank.gap), (cut + rank.gap, high)]


def window_hashes(input_ids: npt.NDArray[Any], half: int) -> Priorities:
    """uint64[n]: entry i is a hash of the tokens `[i - half, i + half)`, the text on both sides of a cut at i.

    A polynomial rolling hash (Karp and Rabin, 1987; LBFS, 2001, cuts files by it), computed for all windows at once
    by doubling the window, so `half` must be a power of two. Beyond the ends of the text stand zeros.
    """
    tokens = _scrambled(input_ids.astype(np.int64).view(np.uint64) + np.uint64(1))
    hashes = np.pad(tokens, half)
    width, power = 1, 0x9E3779B97F4A7C15
    while width < 2 * half:
        hashes = hashes[:-width] * np.uint64(power) + hashes[width:]
        width, power = 2 * width, power * power & 0xFFFFFFFFFFFFFFFF
    return _scrambled(hashes[: len(tokens)])


def _scrambled(values: npt.NDArray[np.uint64]) -> Priorities:
    """An invertible hash of each number: multiply, fold, twice (after Stafford's variants of the MurmurHash3 mixer)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    folded: Priorities = values ^ (values >> np.uint64(31))
    return folded
