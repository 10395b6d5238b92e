"""From a finished forward to records: what is worth keeping, under which names, and how true it is.

    segment     EXACT, CONTINUED      MOVED                                  FRESH
    kept as     already stored        a link: the source, the repaired       own rows, cut at chunk boundaries
                                      rows, and what corrects the others;
                                      a moved copy is never stored

The lineage of fresh rows is the worst of what they were computed behind, so an inexact row never makes an exact one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from kvboost.hf.compat import Cache
from kvboost.hf.correction import Correction
from kvboost.hf.layout import KVLayout
from kvboost.planning import MAX_CONTEXT, Find, Prompt, known_until
from kvboost.types import (
    DECLARED,
    ChunkHeader,
    ChunkKey,
    ChunkKV,
    Kind,
    LayerKV,
    Lineage,
    Link,
    ReusePlan,
    Segment,
    Span,
)


def make_records(
    sequence: Prompt,
    plan: ReusePlan,
    cache: Cache,
    layout: KVLayout,
    sources: Mapping[bytes, ChunkHeader],
    find: Find,
    num_rows: int,
    correction: Correction | None = None,
    row_s: float = 0.0,
) -> list[ChunkKV]:
    """Records for the rows of `cache` that `plan` did not find, and links for those that it moved.

    `sequence` holds the prompt and what was generated after it, of which `num_rows` rows are in the cache. `sources`
    are the headers of the records that the plan served, `correction` is what was added to moved rows, and `row_s` what
    computing one row took.
    """
    records: list[ChunkKV] = []
    lineage = Lineage.BIT_EXACT
    for segment in _through(plan, num_rows):
        if segment.kind is Kind.FRESH or _is_declared_now(segment, sequence, sources):
            start = segment.span.start
            if segment.span.stop == num_rows:  # the tail: an earlier request may have generated the same
                start = max(start, known_until(sequence, find, start, num_rows, lineage))
            pieces = cut(sequence.chunks, start, segment.span.stop)
            headers = [own_header(sequence, piece, lineage, row_s * len(piece)) for piece in pieces]
            records += [ChunkKV(h, layout.gather(cache, h.span.start, h.span.stop)) for h in headers]
        elif segment.kind is Kind.MOVED:
            lineage = Lineage.APPROXIMATE
            source = sources[segment.record_id or b""]
            records.append(_link(sequence, segment, plan, source, cache, layout, correction))
        elif segment.kind is Kind.CONTINUED:
            lineage = min(lineage, sources[segment.record_id or b""].lineage)
    return records


def _is_declared_now(segment: Segment, sequence: Prompt, sources: Mapping[bytes, ChunkHeader]) -> bool:
    """Text that is declared, and was known as somebody's own: it is stored once more, as nobody's."""
    known = segment.kind is Kind.EXACT and sequence.session == DECLARED
    return known and sources[segment.record_id or b""].session != DECLARED


def _through(plan: ReusePlan, num_rows: int) -> Iterator[Segment]:
    """The plan's segments up to `num_rows`; the last one, which is fresh, takes in what was generated."""
    for i, segment in enumerate(plan.segments):
        last = i == len(plan.segments) - 1
        stop = num_rows if last else min(segment.span.stop, num_rows)
        if stop > segment.span.start:
            span = Span(segment.span.start, stop)
            yield Segment(span, segment.kind, segment.record_id, segment.offset, segment.source_position)


def cut(chunks: list[Span] | tuple[Span, ...], start: int, stop: int) -> list[Span]:
    """`[start, stop)` cut at the boundaries of `chunks`."""
    inner = sorted({c.start for c in chunks if start < c.start < stop})
    return [Span(a, b) for a, b in zip([start, *inner], [*inner, stop], strict=True) if b > a]


def own_header(sequence: Prompt, span: Span, lineage: Lineage, cost_s: float = 0.0) -> ChunkHeader:
    """The header of a chunk that holds its own rows: every name under which it will be found."""
    return ChunkHeader(
        _key(sequence, span),
        sequence.history.prefix_hash(span.start),
        span.start,
        sequence.tokens[span.start : span.stop].copy(),
        lineage,
        context=frozenset(sequence.content_before(span.start)[-MAX_CONTEXT:]),
        anchors={name: at - span.start for at, name in sequence.anchors if at in span},
        cost_s=cost_s,
        namespace=sequence.owner,
        session=sequence.session,
    )


def _link(
    sequence: Prompt,
    segment: Segment,
    plan: ReusePlan,
    source: ChunkHeader,
    cache: Cache,
    layout: KVLayout,
    correction: Correction | None,
) -> ChunkKV:
    span = segment.span
    inside = plan.repaired[(plan.repaired >= span.start) & (plan.repaired < span.stop)]
    header = ChunkHeader(
        _key(sequence, span),
        sequence.history.prefix_hash(span.start),
        span.start,
        sequence.tokens[span.start : span.stop].copy(),
        Lineage.APPROXIMATE,
        source=Link(source.record_id, segment.offset),
        rows=(inside - span.start).astype(np.int32),
        corrected=correction is not None,
        namespace=sequence.owner,
        session=sequence.session,
    )
    own = _gather_rows(inside, cache, layout)
    return ChunkKV(header, own if correction is None else _with_correction(own, correction, span))


def _with_correction(own: tuple[LayerKV, ...], correction: Correction, chunk: Span) -> tuple[LayerKV, ...]:
    """A link's rows and one more: what was added to the chunk's other rows."""
    number = correction.chunks.index(chunk)
    return tuple(
        LayerKV(
            torch.cat([rows.keys, added.keys[:, :, number : number + 1]], 2),
            torch.cat([rows.values, added.values[:, :, number : number + 1]], 2),
        )
        for rows, added in zip(own, correction.added, strict=True)
    )


def _gather_rows(
    rows: np.ndarray[tuple[int], np.dtype[np.int32]], cache: Cache, layout: KVLayout
) -> tuple[LayerKV, ...]:
    """Copies scattered rows; contiguous ones (the usual heads of runs) as one block."""
    if len(rows) == 0:
        return layout.allocate(0)
    start, stop = int(rows[0]), int(rows[-1]) + 1
    block = layout.gather(cache, start, stop)
    if stop - start == len(rows):
        return block
    picked = (rows - start).tolist()
    return tuple(LayerKV(g.keys[:, :, picked].contiguous(), g.values[:, :, picked].contiguous()) for g in block)


def _key(sequence: Prompt, span: Span) -> ChunkKey:
    return ChunkKey(sequence.content_hash(span), sequence.history.prefix_hash(span.stop))
