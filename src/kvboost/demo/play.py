"""Plays a story: every request twice, once through the cache and once as a full prefill, and compares the two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvboost.demo.story import Request

if TYPE_CHECKING:
    from kvboost.engine import Generation, KVBoost


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request's answer through the cache and by a full prefill of the same prompt."""

    request: Request
    ours: Generation
    full: Generation

    @property
    def speedup(self) -> float:
        """Time to the first token of the full prefill over ours."""
        return self.full.report.ttft_s / max(self.ours.report.ttft_s, 1e-9)

    @property
    def first_difference(self) -> int | None:
        """Index of the first answer token that differs, None if the answers agree."""
        return first_difference(self.ours.token_ids, self.full.token_ids)


def play(kv: KVBoost, requests: Iterable[Request], **generation: Any) -> Iterator[Outcome]:
    """Serves the requests in order. `generation` goes to `generate`; sampling must be off.

    Who goes first alternates, so that neither side always finds the processor's caches warm.
    """
    for i, request in enumerate(requests):
        answers: dict[bool, Generation] = {}
        for disable in (False, True) if i % 2 else (True, False):
            answers[disable] = kv.generate(request.prompt, disable=disable, **generation)
        yield Outcome(request, answers[False], answers[True])


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index at which two answers part, None if they are equal."""
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if len(a) == len(b) == common else common
