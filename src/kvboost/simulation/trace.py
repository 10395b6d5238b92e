"""Requests as sequences of named pieces, which is all that a replay needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple


class Piece(NamedTuple):
    """A part of a prompt. Equal names have equal text and so equal sizes."""

    name: bytes
    tokens: int


Reuse = Literal["prefix", "anywhere"]


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival.

    `reuse` says what a stored piece is good for: "prefix" only if all pieces before it are found as well, so that its
    name should fix its history; "anywhere" always.
    """

    name: str
    reuse: Reuse
    requests: list[list[Piece]]

    @cached_property
    def tokens(self) -> int:
        """Tokens of all requests."""
        return sum(piece.tokens for request in self.requests for piece in request)

    @cached_property
    def footprint_tokens(self) -> int:
        """Tokens of all distinct pieces: a cache of that size never evicts."""
        return sum({piece.name: piece.tokens for request in self.requests for piece in request}.values())

    def part(self, start: float, stop: float) -> Trace:
        """The requests from one share of the trace to another."""
        count = len(self.requests)
        return Trace(self.name, self.reuse, self.requests[int(start * count) : int(stop * count)])
