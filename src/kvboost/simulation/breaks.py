"""Which text ends common prefixes: where two prompts that share much part, and what stands there.

A request's *predecessor* is, of the earlier ones that share most of its chunks, the one with the longest common
prefix. Where their texts part, a prefix cache stops. If what follows was seen before, those tokens are lost to the
break, and it is classed by what differs.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvboost.simulation.trace import Trace

CANDIDATES = 8  # earlier requests that may be a request's predecessor
MIN_LOST_TOKENS = 32  # a break that costs less is none
NEAR_CHARACTERS = 48  # on each side of a break that are searched for a pattern
SHOWN_CHARACTERS = 28  # on each side of a break in an example
MIN_MOVED_CHARACTERS = 24  # a line this long that stands elsewhere in the predecessor was moved ...
FAR_CHARACTERS = 200  # ... if it is that far away: nearer, a word was put in or taken out

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("id", re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")),
    (
        "timestamp",
        re.compile(r"\d{4}-\d\d?-\d\d?(?:[T ,]+\d\d?:\d\d(?::\d\d(?:\.\d+)?)?)?|\d\d?:\d\d(?::\d\d(?:\.\d+)?)?"),
    ),
    (
        "timestamp",
        re.compile(rf"(?:{_DAY},? )?(?:\d\d? {_MONTH}|{_MONTH} \d\d?),? ?\d*|{_DAY}|\d\d?[./]\d\d?[./]\d\d+"),
    ),
    ("timestamp", re.compile(r"\b1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?\b")),  # seconds or milliseconds since 1970
    ("id", re.compile(r"(?=[\w-]*\d)[\w-]*[A-Za-z][\w-]{7,}|(?=\w*[A-Za-z])(?=\w*\d)\w{8,}|\d{6,}")),
    ("counter", re.compile(r"\d+")),
)
REMEDIES = {
    "timestamp": "put the time at the end of the prompt, or round it",
    "id": "leave it out of the prompt, or put it at the end",
    "counter": "number what is behind the shared text, or not at all",
    "reordered tools": "send tools in one fixed order",
    "reordered documents": "a fixed order helps only if the same documents come together; otherwise reuse chunks",
    "other text": "put what is shared by all requests first",
}


@dataclass(frozen=True, slots=True)
class Break:
    """One request's prefix ended here although known text followed."""

    request: int
    kind: str
    lost_tokens: int
    before: str  # the predecessor around the break, shortened; the break stands between ⟦ and ⟧
    after: str


@dataclass(frozen=True, slots=True)
class BreakSummary:
    """All breaks of one kind."""

    kind: str
    requests: int
    lost_tokens: int
    remedy: str
    example: Break


def find_breaks(texts: Sequence[str], prefix: Trace, chunks: Trace) -> Iterator[Break]:
    """The break of every request that has one. The traces are those of the texts."""
    lost = _lost_tokens(prefix, chunks)
    for number, predecessor in enumerate(_predecessors(texts, chunks)):
        if predecessor is None or lost[number] < MIN_LOST_TOKENS:
            continue
        old, new = texts[predecessor], texts[number]
        at = common_prefix(old, new)
        if at < len(new):
            yield Break(number, classify(old, new, at), lost[number], _shown(old, at), _shown(new, at))


def summarize(breaks: Sequence[Break]) -> list[BreakSummary]:
    """By kind, the most costly first, with the most costly as the example."""
    kinds: dict[str, list[Break]] = defaultdict(list)
    for b in breaks:
        kinds[b.kind].append(b)
    rows = [
        BreakSummary(
            k, len(bs), sum(b.lost_tokens for b in bs), REMEDIES[k], max(bs, key=lambda b: (b.lost_tokens, -b.request))
        )
        for k, bs in kinds.items()
    ]
    return sorted(rows, key=lambda row: -row.lost_tokens)


def classify(old: str, new: str, at: int) -> str:
    """What differs where two texts part at character `at`."""
    for kind, pattern in PATTERNS[:-2]:
        if _covers(pattern, old, at) and _covers(pattern, new, at):
            return kind
    if _moved(old, new, at):
        return "reordered tools" if _in_tools(new, at) else "reordered documents"
    for kind, pattern in PATTERNS[-2:]:
        if _covers(pattern, old, at) and _covers(pattern, new, at):
            return kind
    return "other text"


def common_prefix(a: str, b: str) -> int:
    """Number of equal leading characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # by halves: comparing slices is fast, comparing characters is not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _covers(pattern: re.Pattern[str], text: str, at: int) -> bool:
    start = max(0, at - NEAR_CHARACTERS)
    near = text[start : at + NEAR_CHARACTERS]
    return any(m.start() <= at - start < m.end() for m in pattern.finditer(near))


def _moved(old: str, new: str, at: int) -> bool:
    """True if the new text goes on with a line that stands at quite another place of the old text."""
    lines = (line.strip() for line in new[at : at + 4000].split("\n"))
    line = next((line[:200] for line in lines if len(line) >= MIN_MOVED_CHARACTERS), None)
    place = -1 if line is None else old.find(line)
    return place >= 0 and abs(place - at) > FAR_CHARACTERS


def _in_tools(text: str, at: int) -> bool:
    start = text.rfind("\n\n", 0, at)
    paragraph = text[max(0, start) : at + 300]
    return '"function"' in paragraph or '"parameters"' in paragraph or '"input_schema"' in paragraph


def _shown(text: str, at: int) -> str:
    head, tail = text[max(0, at - SHOWN_CHARACTERS) : at], text[at : at + SHOWN_CHARACTERS]
    return " ".join(f"{'…' if at > SHOWN_CHARACTERS else ''}{head}⟦{tail}⟧".split())


def _lost_tokens(prefix: Trace, chunks: Trace) -> list[int]:
    """Per request, tokens that were seen before but stand behind the end of the known prefix."""
    seen_blocks: set[bytes] = set()
    seen_chunks: set[bytes] = set()
    lost = []
    for blocks, pieces in zip(prefix.requests, chunks.requests, strict=True):
        reached = 0
        for block in blocks:
            if block.name not in seen_blocks:
                break
            reached += block.tokens
        lost.append(max(0, sum(p.tokens for p in pieces if p.name in seen_chunks) - reached))
        seen_blocks.update(b.name for b in blocks)
        seen_chunks.update(p.name for p in pieces)
    return lost


def _predecessors(texts: Sequence[str], chunks: Trace) -> Iterator[int | None]:
    """Per request the earlier one to compare it with. A chunk is looked up in the latest request that had it."""
    latest: dict[bytes, int] = {}
    for number, pieces in enumerate(chunks.requests):
        shared: Counter[int] = Counter()
        for piece in pieces:
            if piece.name in latest:
                shared[latest[piece.name]] += piece.tokens
        near = [n for n, tokens in shared.most_common(CANDIDATES) if 2 * tokens >= shared.most_common(1)[0][1]]
        yield max(near, key=lambda n: (common_prefix(texts[n], texts[number]), n), default=None)
        latest |= {piece.name: number for piece in pieces}
