"""What no policy can exceed: Belady's MIN over whole requests, with pieces that may be kept in part.

MIN keeps what is asked for again soonest. That is optimal for pieces of one size. With sizes, choosing whole pieces is
a knapsack, so here every *token* is a piece of its own, of size one: the last piece that does not fit stays in part,
and hits in part. Any policy that keeps whole pieces, or takes in what is not asked for again, hits no more. All pieces
of a request are asked for at once, and what is kept is chosen after it. For "prefix" the bound counts hits as for
"anywhere": where names fix the history, what stands before a piece is asked for no later than the piece itself, so
nothing is lost by that.

With `whole`, pieces are kept whole or not at all, and what is asked for again latest goes first: the usual Belady, of a
cache that knows the future. With pieces of several sizes it is neither a bound nor the best choice.

`unordered` knows how often each piece will still be asked for, but not when: what is asked for least often goes first.
Where requests come in random order, no policy that does not know the order can expect more (A0: Aho, Denning and
Ullman 1971). Elsewhere it is no bound, since order that can be learned is worth something.
"""

from __future__ import annotations

import heapq
from collections import Counter

from kvboost.simulation.trace import Piece, Trace

NEVER = 1 << 60


def belady(trace: Trace, capacity_tokens: int, *, whole: bool = False) -> int:
    """Hit tokens of the bound, or with `whole` of Belady over whole pieces. Neither takes in what never returns."""
    return _hits(trace, capacity_tokens, _next_uses(trace), whole=whole)


def unordered(trace: Trace, capacity_tokens: int) -> int:
    """Hit tokens of a cache that knows how often every piece will still be asked for. Pieces may be kept in part."""
    return _hits(trace, capacity_tokens, _fewest_uses(trace), whole=False)


def distinct(trace: Trace) -> list[list[Piece]]:
    """The requests without repetitions inside one: a piece is looked up once, before anything is computed."""
    return [list(dict.fromkeys(request)) for request in trace.requests]


def _hits(trace: Trace, capacity_tokens: int, ranks: list[list[int]], *, whole: bool) -> int:
    """Hit tokens if the largest rank always goes first, and `NEVER` is not taken in."""
    kept: dict[bytes, tuple[int, int]] = {}  # tokens, rank
    heap: list[tuple[int, int, bytes]] = []  # largest rank first, then the tail of a request before its head
    used = hits = 0
    for pieces, ranked in zip(distinct(trace), ranks, strict=True):
        for piece in pieces:
            tokens, _ = kept.pop(piece.name, (0, 0))
            hits += tokens
            used -= tokens
        for at, (piece, rank) in enumerate(zip(pieces, ranked, strict=True)):
            if rank != NEVER:
                kept[piece.name] = (piece.tokens, rank)
                used += piece.tokens
                heapq.heappush(heap, (-rank, -at, piece.name))
        while used > capacity_tokens:
            negative, _, name = heap[0]
            tokens, rank = kept.get(name, (0, NEVER))
            if rank != -negative:
                heapq.heappop(heap)
            elif tokens > used - capacity_tokens and not whole:
                kept[name] = (tokens - (used - capacity_tokens), rank)
                used = capacity_tokens
            else:
                heapq.heappop(heap)
                del kept[name]
                used -= tokens
    return hits


def _next_uses(trace: Trace) -> list[list[int]]:
    """Per request and piece the number of the request that asks for it next."""
    found: list[list[int]] = []
    later: dict[bytes, int] = {}
    for number, pieces in reversed(list(enumerate(distinct(trace)))):
        found.append([later.get(piece.name, NEVER) for piece in pieces])
        later |= dict.fromkeys((piece.name for piece in pieces), number)
    return found[::-1]


def _fewest_uses(trace: Trace) -> list[list[int]]:
    """Per request and piece how often it will still be asked for, negative: what is asked for least ranks largest."""
    found: list[list[int]] = []
    uses: Counter[bytes] = Counter()
    for pieces in reversed(distinct(trace)):
        found.append([-uses[piece.name] or NEVER for piece in pieces])
        uses.update(piece.name for piece in pieces)
    return found[::-1]
