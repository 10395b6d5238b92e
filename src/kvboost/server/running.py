"""The jobs of one request while they run, and what came out of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from kvboost.engine import OBSERVING
from kvboost.server.errors import DO_NOT_RETRY, ApiError
from kvboost.serving import Job, Piece, Token
from kvboost.types import ReuseReport

Observer = Callable[[Job, Piece], None]  # hears of every job that has ended, with its last piece


@dataclass(slots=True)
class Answer:
    """What one job has said so far."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    report: ReuseReport | None = None

    def add(self, piece: Piece) -> None:
        """Appends a piece. Raises an `ApiError` for an answer that was ended before its time."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.report = piece.report or self.report
        if piece.finish_reason == "deadline":
            raise ApiError(504, "the request's deadline has passed", code="deadline", headers=DO_NOT_RETRY)
        if piece.finish_reason == "cancelled":
            raise ApiError(503, "the server ended the request before it was answered", code="cancelled")


class Run:
    """Iterates over (index of the job, piece) in the order in which they come; `answers` holds what has come.

    Closing the iterator, or `aclose` before it was begun, cancels every job.
    """

    def __init__(self, prompt_tokens: int, observe: Observer | None = None) -> None:
        self.prompt_tokens = prompt_tokens
        self.answers: list[Answer] = []
        self._observe = observe
        self._jobs: list[Job] = []
        self._iterators: list[AsyncIterator[Piece]] = []

    def add(self, job: Job, pieces: AsyncIterator[Piece]) -> None:
        """One more job, and what it says."""
        self._jobs.append(job)
        self._iterators.append(pieces)
        self.answers.append(Answer())

    async def aclose(self) -> None:
        """Cancels what is not finished."""
        for pieces in self._iterators:
            close = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    async def finish(self) -> list[Answer]:
        """All answers, when they are complete."""
        pieces = self.pieces()
        try:
            async for _ in pieces:
                pass
        finally:
            await pieces.aclose()
        return self.answers

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """The pieces of all jobs. Raises what the service raises, or an `ApiError`."""
        arrived: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()

        async def pump(index: int, pieces: AsyncIterator[Piece]) -> None:
            try:
                async for piece in pieces:
                    arrived.put_nowait((index, piece))
                arrived.put_nowait((index, None))
            except Exception as error:
                arrived.put_nowait((index, error))

        pumps = [asyncio.create_task(pump(i, pieces)) for i, pieces in enumerate(self._iterators)]
        try:
            running = len(pumps)
            while running:
                index, item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    self._note(index, item)
                    yield index, item
        except (GeneratorExit, asyncio.CancelledError):  # the client went
            self._note_unfinished()
            raise
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            await self.aclose()

    def _note(self, index: int, piece: Piece) -> None:
        if piece.finish_reason is not None and self._observe is not None:
            self._observe(self._jobs[index], piece)
        self.answers[index].add(piece)

    def _note_unfinished(self) -> None:
        for job, answer in zip(self._jobs, self.answers, strict=True):
            if answer.finish_reason is None and self._observe is not None:
                self._observe(job, Piece("", finish_reason="cancelled"))

    def usage(self) -> dict[str, Any]:
        """Tokens as OpenAI counts them, and as they were reused; of several answers the prompt counts once."""
        completion = sum(len(a.tokens) for a in self.answers)
        report = self.answers[0].report or ReuseReport(self.prompt_tokens, fresh_tokens=self.prompt_tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": 0 if report.fallback == OBSERVING else report.reused_tokens},
            "kvboost": {
                "exact": report.exact_tokens,
                "continued": report.continued_tokens,
                "moved": report.moved_tokens,
                "repaired": report.repaired_tokens,
                "fresh": report.fresh_tokens,
                "risk": report.risk,
                "strategy": report.strategy,
                "fallback": report.fallback,
            },
        }
