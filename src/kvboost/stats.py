"""What an engine counts. Plain numbers; `kvboost.metrics` reads them, nothing here knows about it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvboost.types import Kind, ReusePlan

logger = logging.getLogger("kvboost")

MAX_REASONS = 64  # counted apart: a reason may quote what a caller sent
OTHER_REASONS = "other reasons"


class InFlight:
    """Counts the requests that run, so that background work can give way. A context manager per request."""

    def __init__(self) -> None:
        self._running = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._running += 1

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until no request runs, at most `timeout_s`; returns whether that was reached."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running == 0, timeout_s)


class Backoff:
    """Whether something that keeps failing is worth a try: after n failures in a row only every 2^n-th time.

    Each name is counted apart, so that nobody's failures show in what another one gets; the latest `MAX_NAMES` names
    are remembered. The first `FREE_FAILURES` cost nothing; a success forgets all. Thread-safe.
    """

    FREE_FAILURES = 2
    LONGEST = 32
    MAX_NAMES = 4096

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # failures in a row, tries left out since
        self._lock = threading.Lock()

    def allows(self, name: bytes = b"") -> bool:
        """True if it should be tried now."""
        with self._lock:
            failures, skipped = self._counts.get(name, (0, 0))
            doublings = min(32, max(0, failures - self.FREE_FAILURES))
            due = skipped + 1 >= min(self.LONGEST, 1 << doublings)
            if failures:
                self._counts[name] = failures, 0 if due else skipped + 1
            return due

    def note(self, name: bytes = b"", *, failed: bool) -> None:
        """Remembers how a try ended."""
        with self._lock:
            failures, skipped = self._counts.pop(name, (0, 0))
            if failed:
                self._counts[name] = failures + 1, skipped
            if len(self._counts) > self.MAX_NAMES:
                self._counts.popitem(last=False)


class Seldom:
    """Whether something that may happen all the time is told at length: once in `every_s` seconds. Thread-safe."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._quiet_until = 0.0
        self._lock = threading.Lock()

    def allows(self) -> bool:
        """True if it was not allowed within the last `every_s`."""
        now = time.monotonic()
        with self._lock:
            allowed = now >= self._quiet_until
            if allowed:
                self._quiet_until = now + self._every_s
            return allowed


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made. Thread-safe to write; a reader sees each counter whole."""

    requests: int = 0
    tokens: Counter[str] = field(default_factory=Counter)  # prompt tokens by kind, and `repaired` of the moved ones
    chunk_hits: Counter[str] = field(default_factory=Counter)  # served segments: exact, continued, or the strategy
    repaired: Counter[str] = field(default_factory=Counter)  # prompt tokens by the strategy that chose them
    fallbacks: Counter[str] = field(default_factory=Counter)  # requests by reason
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_served(self, plan: ReusePlan, fallback: str | None, strategy: str = "none") -> None:
        """Counts a request that the cache served as `plan` says, moved rows repaired as `strategy` chose."""
        with self._lock:
            self.requests += 1
            if fallback is not None:
                self.fallbacks[fallback] += 1
            for kind in Kind:
                self.tokens[kind.value] += plan.count(kind)
            self.tokens["repaired"] += len(plan.repaired)
            self.repaired[strategy] += len(plan.repaired)
            hits = (s.kind for s in plan if s.kind is not Kind.FRESH)
            self.chunk_hits.update(strategy if kind is Kind.MOVED else kind.value for kind in hits)

    def count_fallback(self, reason: str, num_tokens: int = 0) -> None:
        """Counts a prompt that transformers serves alone; the first of a reason is logged as a warning."""
        with self._lock:
            self.requests += 1
            counted = reason if reason in self.fallbacks or len(self.fallbacks) < MAX_REASONS else OTHER_REASONS
            self.fallbacks[counted] += 1
            self.tokens[Kind.FRESH.value] += num_tokens
            first = self.fallbacks[counted] == 1
        logger.log(logging.WARNING if first else logging.DEBUG, "request goes to transformers unchanged: %s", reason)

    def snapshot(self) -> EngineStats:
        """A copy in which all counters belong together."""
        with self._lock:
            return EngineStats(
                self.requests,
                Counter(self.tokens),
                Counter(self.chunk_hits),
                Counter(self.repaired),
                Counter(self.fallbacks),
            )
