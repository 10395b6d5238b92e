"""From a tokenized prompt and what a store offers to a plan: which rows are served from where.

    prompt   |0 ........ e|........ c|.............................|n-1|
    segments |   EXACT    |CONTINUED |  MOVED / FRESH, alternating |FRESH (the last token is always computed)

First the stored histories are walked from the root, token by token. What they do not cover is then searched for runs
of known text: chunks and sampled windows give *seeds*, a seed is extended to both sides against the stored neighbours
(tokens compared, so a hash collision is a miss), and the longest runs win.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvboost.config import SINK_TOKENS
from kvboost.keys import History, KeySpace
from kvboost.types import DECLARED, NO_SESSION, ChunkHeader, Int32Array, Kind, Lineage, ReusePlan, Segment, Span

SHORT_PROMPT_TOKENS = 512
"""Up to here every exact prefix is used. Behind a cache, fused attention cannot skip the upper triangle, so in a long
prompt five known tokens in front made the prefill 15 % slower."""

MAX_CONTEXT = 64  # chunks before a chunk that are remembered as its context

Find = Callable[[Sequence[bytes]], Mapping[bytes, Sequence[ChunkHeader]]]


class Prompt:
    """A tokenized prompt with every name that a lookup needs."""

    def __init__(self, tokens: Int32Array, chunks: Sequence[Span], keys: KeySpace, *, anchors: bool = True) -> None:
        self.tokens = tokens
        self.chunks = list(chunks)
        self.history: History = keys.history(tokens)
        self.owner = keys.owner
        self.session = keys.session
        self._keys = keys
        self.content_hashes = [self.content_hash(c) for c in chunks]
        self.anchors = keys.anchors(tokens) if anchors else []

    def content_hash(self, span: Span) -> bytes:
        """Name of the text at `span`."""
        return self._keys.content_hash(self.tokens[span.start : span.stop])

    def names(self, header: ChunkHeader) -> bool:
        """True if the header's text has its name here: same model, secret, namespace and rotary regime."""
        return self._keys.content_hash(header.tokens) == header.key.content_hash

    def next_cut(self, position: int) -> int:
        """Where the chunk that holds `position` ends."""
        return self.chunks[bisect.bisect_right(self.chunks, position, key=lambda c: c.stop)].stop

    def chunks_before(self, position: int) -> list[tuple[Span, bytes]]:
        """The chunks that end at or before `position`, in order, with their content hashes."""
        return [(c, h) for c, h in zip(self.chunks, self.content_hashes, strict=True) if c.stop <= position]

    def content_before(self, position: int) -> list[bytes]:
        """Content hashes of the chunks that end at or before `position`, in order."""
        return [h for _, h in self.chunks_before(position)]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may use."""

    exact_only: bool = False
    by_session: bool = False  # what was computed behind another session's own text is not moved, nor what came of it
    allow_moved: bool = True
    min_run_tokens: int = 16  # shorter moved runs are computed: loading costs more
    min_moved_share: float = 0.05  # a smaller share of the prompt is not worth making what follows approximate
    min_prefix_share: float = 0.1  # continuing a cache is slower per row than starting, see SHORT_PROMPT_TOKENS
    max_variants: int = 4
    fresh_tokens: int = 1  # at the end of the prompt that are always computed
    live_suffix_tokens: int = 16  # at the end of the prompt that are never moved: they carry the question


@dataclass(frozen=True, slots=True)
class _Part:
    """`header.tokens[offset:offset + len(span)]` equals the prompt's tokens at `span`."""

    span: Span
    header: ChunkHeader
    offset: int

    def clip(self, start: int, stop: int) -> _Part:
        start = min(max(start, self.span.start), self.span.stop)
        stop = max(start, min(stop, self.span.stop))
        return _Part(Span(start, stop), self.header, self.offset + start - self.span.start)

    def segment(self, kind: Kind, joined: bool = False, familiar: float = 0.0) -> Segment:
        position = self.header.position + self.offset
        return Segment(self.span, kind, self.header.record_id, self.offset, position, joined, familiar)

    def familiar(self, prompt: Prompt) -> float:
        """Of all tokens that stood before the text when it was captured, or stand there now: the share that did and do.

        A header remembers the latest `MAX_CONTEXT` chunks, so no more than as many are looked at.
        """
        before = prompt.chunks_before(self.span.start)[-MAX_CONTEXT:]
        both = sum(len(span) for span, name in before if name in self.header.context)
        now, captured = self.span.start, self.header.position + self.offset
        if len(before) == MAX_CONTEXT:
            now = captured = sum(len(span) for span, _ in before)
        return both / max(1, now + captured - both)


class _Index:
    """A store's `find`, remembered for the time of one plan. With a `session`, what that may be served."""

    def __init__(self, find: Find, session: bytes | None = None) -> None:
        self._find = find
        self._session = session
        self._known: dict[bytes, Sequence[ChunkHeader]] = {}

    def fetch(self, names: Iterable[bytes]) -> None:
        missing = [n for n in dict.fromkeys(names) if n not in self._known]
        if missing:
            found = self._find(missing)
            self._known.update({n: found.get(n, ()) for n in missing})

    def get(self, name: bytes) -> Sequence[ChunkHeader]:
        self.fetch([name])
        return self._known[name]

    def beginning_at(self, prefix_hash: bytes) -> Sequence[ChunkHeader]:
        return self.get(prefix_hash + b"begin")

    def ending_at(self, prefix_hash: bytes) -> Sequence[ChunkHeader]:
        return self.get(prefix_hash + b"end")

    def is_open(self, header: ChunkHeader) -> bool:
        """True if the session knows what stood before the record: its own text, or declared. All are, where sessions
        share.
        """
        if self._session is None or header.session == DECLARED:
            return True
        return header.session == self._session != NO_SESSION

    def begins_open(self, header: ChunkHeader) -> bool:
        """True if the session knows what stood before the record, whoever computed it."""
        return header.position == 0 or any(self.is_open(h) for h in self.ending_at(header.parent))

    def servable(self, header: ChunkHeader) -> bool:
        """False for a linked record whose source is gone, and for rows that came of another session's moved rows."""
        if header.lineage is Lineage.APPROXIMATE and not self.is_open(header):
            return False
        if header.source is None:
            return True
        source_id = header.source.record_id
        found = self.ending_at(source_id[len(source_id) // 2 :])
        return any(h.record_id == source_id and h.source is None for h in found)


def make_plan(prompt: Prompt, find: Find, limits: Limits) -> ReusePlan:
    """Plan `prompt` over what `find` offers. Pure but for the calls of `find`; MOVED rows are not yet repaired."""
    num_tokens = len(prompt.tokens)
    last = num_tokens - limits.fresh_tokens
    index = _Index(find, prompt.session if limits.by_session else None)
    parts, kinds = _walk_histories(prompt, index, last, exact_only=limits.exact_only)
    segments = [part.segment(kind) for part, kind in zip(parts, kinds, strict=True)]
    covered = parts[-1].span.stop if parts else 0
    found = covered
    if limits.allow_moved and not limits.exact_only:
        end_of_moved = num_tokens - max(limits.fresh_tokens, limits.live_suffix_tokens)
        runs = _find_runs(prompt, index, Span(max(covered, SINK_TOKENS), end_of_moved), limits)
        pieces, found_moved = _select(runs, limits.min_run_tokens)
        found += found_moved
        moved = [
            part.segment(Kind.MOVED, joined=i > 0, familiar=part.familiar(prompt))
            for piece in pieces
            for i, part in enumerate(piece)
        ]
        if sum(len(s.span) for s in moved) >= limits.min_moved_share * num_tokens:
            segments += moved
    plan = ReusePlan(num_tokens, _fill_with_fresh(segments, num_tokens), found)
    too_short = plan.is_prefix_only and covered < limits.min_prefix_share * num_tokens
    return ReusePlan.nothing(num_tokens, found) if too_short and num_tokens > SHORT_PROMPT_TOKENS else plan


def known_until(sequence: Prompt, find: Find, start: int, stop: int, least: Lineage) -> int:
    """How far rows with the sequence's own history and at least this lineage are stored, from `start` on.

    For declared text only declared records count: what was somebody's own is stored once more.
    """
    at, declared = start, sequence.session == DECLARED
    for part in _walk(sequence, _Index(find), stop, least):
        if part.span.stop > start and declared and part.header.session != DECLARED:
            break
        at = max(at, part.span.stop)
    return at


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Number of equal leading tokens."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def common_suffix(a: Int32Array, b: Int32Array) -> int:
    """Number of equal trailing tokens."""
    return common_prefix(a[::-1], b[::-1])


def _walk_histories(prompt: Prompt, index: _Index, stop: int, *, exact_only: bool) -> tuple[list[_Part], list[Kind]]:
    """Rows with the prompt's own history: the bit-exact chain as far as it goes, then any lineage."""
    exact = _walk(prompt, index, stop, Lineage.BIT_EXACT)
    if exact_only:
        return exact, [Kind.EXACT] * len(exact)
    reach = exact[-1].span.stop if exact else 0
    anything = _walk(prompt, index, stop, Lineage.APPROXIMATE)
    parts = exact + [p.clip(reach, stop) for p in anything if p.span.stop > reach]
    kinds = [Kind.EXACT if p.header.lineage is Lineage.BIT_EXACT else Kind.CONTINUED for p in parts]
    return parts, kinds


def _walk(prompt: Prompt, index: _Index, stop: int, least: Lineage) -> list[_Part]:
    parts: list[_Part] = []
    at = 0
    _fetch_histories(prompt, index, stop)
    while at < stop:
        rest = prompt.tokens[at:stop]
        candidates = [
            (common_prefix(h.tokens, rest), h.lineage, h)
            for h in _next_headers(prompt, index, at)
            if h.lineage >= least and h.position == at and index.servable(h)
        ]
        length, _, header = max(candidates, key=lambda c: c[:2], default=(0, least, None))
        if not length or header is None:
            break
        parts.append(_Part(Span(at, at + length), header, 0))
        at += length
    return parts


def _fetch_histories(prompt: Prompt, index: _Index, stop: int) -> None:
    """Asks for all that a walk along the prompt's own chunks will need, at once: a store may be a round trip away."""
    name = prompt.history.prefix_hash
    chunks = [c for c in prompt.chunks if c.start < stop]
    index.fetch(n for c in chunks for n in (name(c.start) + b"begin", name(c.stop) + b"end"))


def _next_headers(prompt: Prompt, index: _Index, at: int) -> list[ChunkHeader]:
    """Records whose history is `tokens[:at]`. A store lists only the latest of many, so the prompt's own chunk is asked
    for by its end as well: a thousand conversations behind one system prompt still find each its own.
    """
    history = prompt.history.prefix_hash(at)
    headers = list(index.beginning_at(history))
    own = index.ending_at(prompt.history.prefix_hash(prompt.next_cut(at)))
    return headers + [h for h in own if h.parent == history]


Run = list[_Part]


def _find_runs(prompt: Prompt, index: _Index, within: Span, limits: Limits) -> list[Run]:
    """Maximal runs of known text inside `within`, best first: longer runs, then more of their context present again."""
    if within.stop - within.start < limits.min_run_tokens:
        return []
    names = [(c.start, h) for c, h in zip(prompt.chunks, prompt.content_hashes, strict=True)] + prompt.anchors
    names = [(at, name) for at, name in names if within.start <= at < within.stop]
    index.fetch(name for _, name in names)
    runs: list[Run] = []
    diagonals: set[tuple[bytes, int]] = set()
    for at, name in names:
        for header in sorted(index.get(name), key=lambda h: not index.is_open(h))[: limits.max_variants]:
            offset = header.anchors.get(name, 0)
            if (header.record_id, at - offset) in diagonals:
                continue
            found = _extend(prompt.tokens, index, within, at, header, offset)
            diagonals.update((p.header.record_id, p.span.start - p.offset) for run in found for p in run)
            diagonals.add((header.record_id, at - offset))
            runs += found
    return sorted(runs, key=lambda run: _score(run, prompt), reverse=True)


def _score(run: Run, prompt: Prompt) -> tuple[float, Lineage, int]:
    """Length, up to doubled by the share of the captured context that stands before the run again."""
    start, header = run[0].span.start, run[0].header
    length = run[-1].span.stop - start
    present = len(header.context.intersection(prompt.content_before(start))) / max(1, len(header.context))
    return length * (1 + present), header.lineage, -start


def _extend(tokens: Int32Array, index: _Index, within: Span, at: int, header: ChunkHeader, offset: int) -> list[Run]:
    """The maximal run around one seed, across stored neighbours. Rows captured inside the sink are left out, and those
    computed behind text that is not the session's to see: the run may fall into several.
    """
    run = _extend_right(tokens, index, within.stop, at, header, offset)
    if not run:
        return []
    runs = _open_runs(index, _extend_left(tokens, index, within.start, run))
    return [clipped for run in runs if (clipped := [p for p in map(_without_sink, run) if len(p.span) > 0])]


def _open_runs(index: _Index, run: Run) -> list[Run]:
    """The stretches of a run whose rows saw nothing but what is open to the session, and the run itself."""
    runs: list[Run] = [[]]
    for part in run:
        opened = index.is_open(part.header)
        if not opened and part.offset == 0 and part.header.lineage is not Lineage.APPROXIMATE:
            opened = bool(runs[-1]) or index.begins_open(part.header)
        if opened:
            runs[-1].append(part)
        elif runs[-1]:
            runs.append([])
    return [r for r in runs if r]


def _extend_right(tokens: Int32Array, index: _Index, stop: int, at: int, header: ChunkHeader, offset: int) -> Run:
    run: Run = []
    candidates: Sequence[tuple[ChunkHeader, int]] = [(header, offset)]
    while at < stop:
        rest = tokens[at:stop]
        own = [(h, o) for h, o in candidates if h.source is None]
        matches = [(index.is_open(h), common_prefix(h.tokens[o:], rest), h.lineage, h, o) for h, o in own]
        if not matches:
            break
        _, length, _, best, start = max(matches, key=lambda m: m[:3])
        if not length:
            break
        run.append(_Part(Span(at, at + length), best, start))
        at += length
        if start + length < len(best.tokens):
            break
        candidates = [(h, 0) for h in index.beginning_at(best.key.prefix_hash)]
    return run


def _extend_left(tokens: Int32Array, index: _Index, start: int, run: Run) -> Run:
    first = run[0]
    before = common_suffix(first.header.tokens[: first.offset], tokens[start : first.span.start])
    run = [_Part(Span(first.span.start - before, first.span.stop), first.header, first.offset - before), *run[1:]]
    while run[0].offset == 0 and run[0].span.start > start:
        at = run[0].span.start
        matches = [
            (index.is_open(h), common_suffix(h.tokens, tokens[start:at]), h.lineage, h)
            for h in index.ending_at(run[0].header.parent)
            if h.source is None
        ]
        _, length, _, best = max(matches, key=lambda m: m[:3], default=(False, 0, Lineage.APPROXIMATE, run[0].header))
        if not length:
            break
        run.insert(0, _Part(Span(at - length, at), best, len(best.tokens) - length))
    return run


def _without_sink(part: _Part) -> _Part:
    inside = max(0, SINK_TOKENS - (part.header.position + part.offset))
    return part.clip(min(part.span.start + inside, part.span.stop), part.span.stop)


def _select(runs: Sequence[Run], min_run_tokens: int) -> tuple[list[Run], int]:
    """Disjoint pieces of the runs, best run first; pieces too short to pay for their load are dropped.

    Also returns how many tokens the cache offered, dropped pieces included.
    """
    if not runs:
        return [], 0
    size = max(run[-1].span.stop for run in runs)
    found, taken = np.zeros(size, bool), np.zeros(size, bool)
    pieces: list[Run] = []
    for run in runs:
        start, stop = run[0].span.start, run[-1].span.stop
        found[start:stop] = True
        for free in _gaps(taken, start, stop):
            if len(free) >= min_run_tokens:
                taken[free.start : free.stop] = True
                clipped = [p.clip(free.start, free.stop) for p in run]
                pieces.append([p for p in clipped if len(p.span) > 0])
    return pieces, int(found.sum())


def _gaps(taken: np.ndarray[tuple[int], np.dtype[np.bool_]], start: int, stop: int) -> list[Span]:
    """Maximal spans of `[start, stop)` that are not taken."""
    edges = np.flatnonzero(np.diff(np.concatenate([[True], taken[start:stop], [True]]).astype(np.int8)))
    return [Span(start + int(a), start + int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _fill_with_fresh(segments: list[Segment], num_tokens: int) -> tuple[Segment, ...]:
    filled: list[Segment] = []
    at = 0
    for segment in sorted(segments, key=lambda s: s.span.start):
        if segment.span.start > at:
            filled.append(Segment(Span(at, segment.span.start), Kind.FRESH))
        filled.append(segment)
        at = segment.span.stop
    if at < num_tokens:
        filled.append(Segment(Span(at, num_tokens), Kind.FRESH))
    return tuple(filled)


def still_served(segment: Segment, records: Mapping[bytes, ChunkHeader]) -> bool:
    """True if `records` still hold what `segment` was planned on.

    Between planning and loading a record may be evicted, or replaced by another of the same identity: an exact one by
    an approximate one, own rows by a link.
    """
    header = records.get(segment.record_id or b"")
    if header is None or segment.offset + len(segment.span) > len(header.tokens):
        return False
    if header.source is not None:
        source = records.get(header.source.record_id)
        return segment.kind is Kind.CONTINUED and source is not None and source.source is None
    return segment.kind is not Kind.EXACT or header.lineage is Lineage.BIT_EXACT


def unfit_reason(plan: ReusePlan, prompt: Prompt, records: Mapping[bytes, ChunkHeader], limits: Limits) -> str | None:
    """Why a plan that was made earlier cannot serve `prompt` from `records` within `limits`; None if it can."""
    starts, stops = [s.span.start for s in plan], [s.span.stop for s in plan]
    computed = len(plan.segments[-1].span) if plan.segments and plan.segments[-1].kind is Kind.FRESH else 0
    if [*starts, len(prompt.tokens)] != [0, *stops] or computed < limits.fresh_tokens:
        return "it is not one of this prompt"
    kinds = {s.kind for s in plan}
    if limits.exact_only and not kinds <= {Kind.EXACT, Kind.FRESH}:
        return "the settings allow exact rows only"
    if not limits.allow_moved and Kind.MOVED in kinds:
        return "this model does not move text in a prompt of this length"
    if not all(s.kind is Kind.FRESH or _still_fits(s, prompt, records) for s in plan):
        return "a record that it uses is gone, was replaced, or is not one of this prompt"
    return None


def _still_fits(segment: Segment, prompt: Prompt, records: Mapping[bytes, ChunkHeader]) -> bool:
    """True if `records` hold the prompt's text for the segment, in a form of the kind that was planned."""
    if not still_served(segment, records):
        return False
    header, start, stop = records[segment.record_id or b""], segment.span.start, segment.span.stop
    stored = header.tokens[segment.offset : segment.offset + len(segment.span)]
    if not np.array_equal(stored, prompt.tokens[start:stop]):
        return False
    if segment.kind is Kind.MOVED:
        return prompt.names(header)
    if (header.lineage is Lineage.BIT_EXACT) != (segment.kind is Kind.EXACT):
        return False
    return header.position + segment.offset == start and header.parent == prompt.history.prefix_hash(header.position)


def without_records(plan: ReusePlan, lost: set[bytes], *, allow_gaps: bool) -> ReusePlan:
    """The plan with every segment of a lost record computed instead.

    What stands behind a lost segment is kept with `allow_gaps`: its rows are still right, but only a selective forward
    can fill the hole. Without, everything from the first loss on is computed.
    """
    mended: list[Segment] = []
    for segment in plan.segments:
        if segment.record_id is None:
            continue
        if segment.record_id not in lost:
            behind = bool(mended) and mended[-1].span.stop == segment.span.start
            mended.append(replace(segment, joined=segment.joined and behind))
        elif not allow_gaps:
            break
    return ReusePlan(plan.num_tokens, _fill_with_fresh(mended, plan.num_tokens), plan.found_tokens)
