"""Hit tokens of a trace: one policy at one budget, and the grid of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvboost.simulation.belady import belady, unordered
from kvboost.simulation.policies import POLICIES, Policy
from kvboost.simulation.trace import Piece, Trace

BOUND = "belady"
WHOLE = "belady-whole"
UNORDERED = "unordered"
ORACLES: Mapping[str, Callable[[Trace, int], int]] = {
    BOUND: belady,
    WHOLE: partial(belady, whole=True),
    UNORDERED: unordered,
}
"""What knows the future: hit tokens of a trace at a capacity."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy on one trace at one budget."""

    trace: str
    reuse: str
    policy: str
    capacity_tokens: int
    share: float  # capacity over the footprint that the budgets are shares of
    hit_tokens: int
    tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of all tokens that were there when asked for."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def replay(trace: Trace, policy: Policy, count: Callable[[int, int], None] | None = None) -> int:
    """Hit tokens of a policy. Every piece that was not served is computed and offered to it, tails before heads.

    `count`, if given, is told the number and the hit tokens of each request.
    """
    hits = 0
    for number, request in enumerate(trace.requests):
        pieces = list(dict.fromkeys(request))
        found = _found(pieces, policy, trace.reuse)
        rest = [piece for piece in pieces if piece not in found]
        request_hits = sum(piece.tokens for piece in found)
        for piece in reversed(list(found)):
            policy.use(piece.name)
        for piece in reversed(rest):
            if piece.name in policy:
                policy.use(piece.name)
            else:
                policy.put(piece.name, piece.tokens)
        hits += request_hits
        if count is not None:
            count(number, request_hits)
    return hits


def grid(
    trace: Trace, shares: Sequence[float], policies: Sequence[str], footprint_tokens: int | None = None
) -> Iterator[Cell]:
    """Every policy at every budget, a share of the given footprint or the trace's.

    Policies are those of `POLICIES` and `ORACLES`.
    """
    footprint = trace.footprint_tokens if footprint_tokens is None else footprint_tokens
    for share in shares:
        capacity = int(share * footprint)
        for name in policies:
            yield Cell(trace.name, trace.reuse, name, capacity, share, _hits(trace, name, capacity), trace.tokens)


def _hits(trace: Trace, policy: str, capacity_tokens: int) -> int:
    if policy in ORACLES:
        return ORACLES[policy](trace, capacity_tokens)
    return replay(trace, POLICIES[policy](capacity_tokens))


def _found(pieces: Sequence[Piece], policy: Policy, reuse: str) -> dict[Piece, None]:
    if reuse == "anywhere":
        return {piece: None for piece in pieces if piece.name in policy}
    found: dict[Piece, None] = {}
    for piece in pieces:
        if piece.name not in policy:
            break
        found[piece] = None
    return found
