"""A service that says what it is told: what a model says cannot be ordered, how the server reads it can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvboost.serving import Busy, Job, Piece, ServiceStats, Token
from kvboost.types import ReuseReport


class ScriptedService:
    """Says `texts`, one piece each, whatever it is asked; then fails with `error`, if there is one."""

    def __init__(self, texts: Sequence[str] = (), error: Exception | None = None) -> None:
        self.texts, self.error = list(texts), error
        self.draining = False
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> AsyncIterator[Piece]:
        if self.draining:
            raise Busy("closing", 3.0)
        self.jobs.append(job)
        return self._answer(job)

    async def _answer(self, job: Job) -> AsyncIterator[Piece]:
        for text in self.texts:
            yield Piece(text, (Token(5, text, -0.5),))
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        report = ReuseReport(len(job.input_ids), fresh_tokens=len(job.input_ids))
        yield Piece("", (), "eos", report)

    def stats(self) -> ServiceStats:
        return ServiceStats(0, 0, 0, 1, self.draining)

    async def drain(self, timeout_s: float) -> bool:
        return True
