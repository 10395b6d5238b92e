"""The values that flow through one request. Frozen, slotted, and free of torch at run time.

Shapes use one alphabet: B batch, L layers, H key/value heads, D head dimension, T prompt length, n rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Int32Array = npt.NDArray[np.int32]
DECLARED = b""  # `ChunkHeader.session` of text that was warmed: it may be served moved to anybody of the namespace
NO_SESSION = bytes(8)  # of a request that named none: a session of its own, which ended with it


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range `[start, stop)` of token indices."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.stop


class Lineage(IntEnum):
    """How true a stored row is; a larger value is truer."""

    APPROXIMATE = 0  # computed behind moved rows
    LOSSY = 1  # quantized, or computed behind quantized rows
    BIT_EXACT = 2  # computed behind bit-exact history only


class Kind(str, Enum):
    """Where the key/value row of a prompt token comes from."""

    EXACT = "exact"  # equal history, bit-exact: the very bytes that were computed
    CONTINUED = "continued"  # equal history, inexact lineage: served as stored, the error is inherited
    MOVED = "moved"  # equal text, other history: keys are shifted, some rows are repaired
    FRESH = "fresh"  # computed


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """The two names of one payload: `content_hash` fixes its text, `prefix_hash` its whole history."""

    content_hash: bytes
    prefix_hash: bytes


@dataclass(frozen=True, slots=True)
class Link:
    """Says that a record's rows are another record's rows, moved: `record_id`, and the first row taken there."""

    record_id: bytes
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class ChunkHeader:
    """All that is known of a stored chunk without its keys and values."""

    key: ChunkKey
    parent: bytes  # prefix_hash of the history before the first token
    position: int  # of the first token, as computed
    tokens: Int32Array  # [n]
    lineage: Lineage
    context: frozenset[bytes] = frozenset()  # content hashes of the chunks that stood before
    anchors: Mapping[bytes, int] = field(default_factory=dict)  # name of a token window -> its offset in `tokens`
    source: Link | None = None  # set: rows come from there, shifted, except the `rows` that this record holds
    rows: Int32Array | None = None  # with `source`: offsets of the rows in the payload, sorted
    corrected: bool = False  # with `source`: the payload's last row is added to all rows that it does not hold
    codec: str = "none"  # how the payload is kept: none, int8, k8v4
    cost_s: float = 0.0  # what computing the rows took
    namespace: bytes = b""  # whose it is, for quotas: a keyed hash, see `KeySpace.owner`; empty: nobody's in particular
    session: bytes = b""  # behind whose text it was computed, see `KeySpace.session`; empty: declared, anybody's

    @property
    def record_id(self) -> bytes:
        """Identity in a store: the histories before and after the chunk. 64 bytes."""
        return self.parent + self.key.prefix_hash

    @property
    def span(self) -> Span:
        """Where the chunk stood when it was computed."""
        return Span(self.position, self.position + len(self.tokens))

    def names(self) -> tuple[bytes, ...]:
        """Every name under which a store lists the chunk; a linked record is not found by content."""
        history = (self.key.prefix_hash + b"end", self.parent + b"begin")
        return history if self.source is not None else (self.key.content_hash, *self.anchors, *history)


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """Keys and values of one group of layers that share a shape: `keys` [L, H, n, D], `values` [L, H, n, D']."""

    keys: torch.Tensor
    values: torch.Tensor

    def named(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name."""
        return {"keys": self.keys, "values": self.values}


@dataclass(frozen=True, slots=True, eq=False)
class PackedKV:
    """Keys and values of one group of layers as `kvboost.codec` packed them: its tensors by name."""

    tensors: Mapping[str, torch.Tensor]

    def named(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name."""
        return self.tensors


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """A stored chunk: its header and, per layer group of the model, a `LayerKV`, or a `PackedKV` if it has a codec."""

    header: ChunkHeader
    payload: tuple[LayerKV | PackedKV, ...]

    @property
    def num_rows(self) -> int:
        """Rows that the payload holds; fewer than tokens in a linked record."""
        return len(self.header.tokens) if self.header.rows is None else len(self.header.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes that the chunk occupies: payload, tokens, names, and a flat allowance for Python objects."""
        tensors = sum(t.numel() * t.element_size() for group in self.payload for t in group.named().values())
        names = 32 * (len(self.header.anchors) + len(self.header.context) + 6)
        return tensors + self.header.tokens.nbytes + names + 1024


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of a plan. For all kinds but FRESH, rows `offset ...` of record `record_id` serve `span`."""

    span: Span
    kind: Kind
    record_id: bytes | None = None
    offset: int = 0
    source_position: int = 0  # position of the first row as computed
    joined: bool = False  # MOVED: stood directly behind the previous segment when captured, so no seam between them
    familiar: float = 0.0  # MOVED: of all tokens before it when captured or now, the share that is common to both

    @property
    def shift(self) -> int:
        """Positions by which the keys must be rotated forward."""
        return self.span.start - self.source_position


@dataclass(frozen=True, slots=True, eq=False)
class ReusePlan:
    """A partition of `[0, num_tokens)` into segments, and the rows of MOVED segments that are recomputed."""

    num_tokens: int
    segments: tuple[Segment, ...]
    found_tokens: int = 0  # rows that the cache offered before planning dropped short spans
    repaired: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))  # sorted positions

    @classmethod
    def nothing(cls, num_tokens: int, found_tokens: int = 0) -> ReusePlan:
        """A plan that reuses nothing."""
        return cls(num_tokens, (Segment(Span(0, num_tokens), Kind.FRESH),), found_tokens)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def count(self, kind: Kind) -> int:
        """Tokens of one kind."""
        return sum(len(s.span) for s in self.segments if s.kind is kind)

    def spans(self, kind: Kind) -> list[Span]:
        """Spans of one kind, in prompt order."""
        return [s.span for s in self.segments if s.kind is kind]

    @property
    def prefix_tokens(self) -> int:
        """Leading rows that are reused without moving."""
        at = 0
        for s in self.segments:
            if s.kind not in (Kind.EXACT, Kind.CONTINUED):
                break
            at = s.span.stop
        return at

    @property
    def is_prefix_only(self) -> bool:
        """True if everything reused stands in front and is not moved, so the stock forward can continue it."""
        return all(s.kind is Kind.FRESH for s in self.segments if s.span.start >= self.prefix_tokens)

    def prefix_only(self) -> ReusePlan:
        """This plan without what is moved, and without what stands behind it."""
        reused = tuple(s for s in self.segments if s.span.stop <= self.prefix_tokens)
        rest = Segment(Span(self.prefix_tokens, self.num_tokens), Kind.FRESH)
        return ReusePlan(self.num_tokens, (*reused, rest), self.found_tokens)

    def computed_rows(self, stop: int) -> Int32Array:
        """Positions below `stop` that a forward must compute: FRESH and repaired rows, sorted."""
        needed = np.zeros(self.num_tokens, bool)
        for span in self.spans(Kind.FRESH):
            needed[span.start : span.stop] = True
        needed[self.repaired] = True
        return np.flatnonzero(needed[:stop]).astype(np.int32)

    @property
    def familiarity(self) -> float:
        """How much of the context of moved rows is what they were captured behind, in the mean over the rows."""
        moved = [s for s in self.segments if s.kind is Kind.MOVED]
        return sum(s.familiar * len(s.span) for s in moved) / max(1, sum(len(s.span) for s in moved))

    @property
    def runs(self) -> list[Span]:
        """Maximal spans of MOVED rows that were neighbours when captured; only the head of a run is a seam."""
        runs: list[Span] = []
        for s in self.segments:
            if s.kind is Kind.MOVED:
                if s.joined and runs:
                    runs[-1] = Span(runs[-1].start, s.span.stop)
                else:
                    runs.append(s.span)
        return runs


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What one request reused and what that cost. `exact + continued + moved + fresh == prompt`, always."""

    prompt_tokens: int
    exact_tokens: int = 0
    continued_tokens: int = 0
    moved_tokens: int = 0
    repaired_tokens: int = 0  # the part of `moved_tokens` that was recomputed
    fresh_tokens: int = 0
    written_tokens: int = 0  # rows that the request added to the store
    charged_budget: float = 0.0  # rows computed although they were found, over the rows found
    risk: float | None = None  # estimated KL of the answer, nat per token; None where nothing was moved or judged
    signs: Mapping[str, float] = field(default_factory=dict)  # what the estimate was made of
    escalations: int = 0  # times that the budget was raised because the risk was above the bound
    strategy: str | None = None  # what chose the repaired rows; None where nothing was moved
    bytes_by_tier: Mapping[str, int] = field(default_factory=dict)  # loaded
    lookup_s: float = 0.0
    load_s: float = 0.0
    shift_s: float = 0.0
    select_s: float = 0.0
    prefill_s: float = 0.0  # all forwards over the prompt, up to the first token
    capture_s: float = 0.0  # storing the new rows, after the answer
    ttft_s: float = 0.0  # from the call to the first token
    decode_s: float = 0.0  # from the first token to the last
    fallback: str | None = None  # why (a part of) the cache was not used

    @classmethod
    def of(cls, plan: ReusePlan, probed_rows: float = 0.0) -> ReuseReport:
        """The counts of a plan; `probed_rows` were computed besides: to choose rows, or twice."""
        fresh = plan.count(Kind.FRESH)
        recomputed = probed_rows + len(plan.repaired) + max(0, plan.found_tokens - (plan.num_tokens - fresh))
        return cls(
            plan.num_tokens,
            exact_tokens=plan.count(Kind.EXACT),
            continued_tokens=plan.count(Kind.CONTINUED),
            moved_tokens=plan.count(Kind.MOVED),
            repaired_tokens=len(plan.repaired),
            fresh_tokens=fresh,
            charged_budget=recomputed / plan.found_tokens if plan.found_tokens else 0.0,
        )

    @property
    def reused_tokens(self) -> int:
        """Tokens whose rows were not computed for this request."""
        return self.exact_tokens + self.continued_tokens + self.moved_tokens - self.repaired_tokens
