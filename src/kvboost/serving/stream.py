"""Between the model's thread and the event loop: only messages pass, in one direction each.

event loop    Stream --cancel--> Ticket <--looks-- worker thread
              Stream <--pieces-- Ticket <--sends-- worker thread
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from kvboost.serving.job import Job, Piece


class Ticket:
    """An accepted job. The worker sends; whoever holds the stream may cancel."""

    def __init__(self, job: Job, on_cancel: Callable[[], None]) -> None:
        self.job = job
        self.submitted_at = time.perf_counter()
        self.cancelled = False
        self.messages: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._on_cancel = on_cancel

    @property
    def overdue(self) -> bool:
        """True when the job's deadline has passed."""
        deadline_s = self.job.deadline_s
        return deadline_s is not None and time.perf_counter() - self.submitted_at >= deadline_s

    def send(self, message: Piece | Exception) -> None:
        """Hands a piece, or the error that ends the job, to the stream. From any thread."""
        try:
            self._loop.call_soon_threadsafe(self.messages.put_nowait, message)
        except RuntimeError:  # the loop is closed: nobody listens any more
            self.cancelled = True

    def cancel(self) -> None:
        """Nobody wants the answer any more. From any thread."""
        if not self.cancelled:
            self.cancelled = True
            self._on_cancel()


class Stream(AsyncIterator[Piece]):
    """The pieces of one answer. Closing it, or dropping it, cancels the job."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._ended = False

    async def __anext__(self) -> Piece:
        if self._ended:
            raise StopAsyncIteration
        message = await self._ticket.messages.get()
        if isinstance(message, Exception):
            self._ended = True
            raise message
        self._ended = message.finish_reason is not None
        return message

    async def aclose(self) -> None:
        """Cancels the job unless it has ended. May be called twice."""
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if not self._ended:
            self._ended = True
            self._ticket.cancel()
