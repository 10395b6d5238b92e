"""Runs calls aside, so that their caller waits no longer than it wants.

A socket's own timeout bounds the wait for the next byte. A peer that sends one byte now and then, or a name server that
does not answer, is bounded only from outside.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_Call = Callable[[], Any]
_Outcome = tuple[Any, BaseException | None]


class Lane:
    """A pool of daemon threads that grows with the number of simultaneous callers. Thread-safe, also after a fork."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_Worker] = []
        self._pid = os.getpid()

    def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """What `call` returns or raises. Raises `TimeoutError` after `timeout_s`; the call then ends unheard."""
        if self._pid != os.getpid():  # a forked child has none of its parent's threads
            self._idle, self._pid = [], os.getpid()
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(self._name)
        worker.calls.put(call)
        try:
            result, error = worker.outcomes.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError(f"{self._name}: no answer within {timeout_s:g} s") from None  # the worker is let go
        self._idle.append(worker)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]  # of `call`


class _Worker:
    """A thread that ends when nobody holds its worker any more and its last call has returned."""

    def __init__(self, name: str) -> None:
        self.calls: SimpleQueue[_Call | None] = SimpleQueue()
        self.outcomes: SimpleQueue[_Outcome] = SimpleQueue()
        threading.Thread(target=_work, args=(self.calls, self.outcomes), name=name, daemon=True).start()

    def __del__(self) -> None:
        self.calls.put(None)


def _work(calls: SimpleQueue[_Call | None], outcomes: SimpleQueue[_Outcome]) -> None:
    while _answer(calls.get(), outcomes):
        pass


def _answer(call: _Call | None, outcomes: SimpleQueue[_Outcome]) -> bool:
    """A function of its own, so that an idle thread holds no call, and with it no records."""
    if call is None:
        return False
    try:
        outcomes.put((call(), None))
    except BaseException as error:  # raised again in the caller's thread
        outcomes.put((None, error))
    return True
