"""A circuit breaker: after a failure nobody tries again for a while, then one call tries for all.

closed --failed--> open --backoff is over--> half-open: one probe --succeeded--> closed
                    ^                                     |
                    '------------- failed, backoff x 2 ---'

While it is open a call costs nothing, so a dead peer costs one timeout per backoff and not one per request.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Literal

from kvboost.store.forks import renew_lock_in_forks

State = Literal["closed", "open", "half-open"]


class Breaker:
    """Says whether a call may be tried. Every call that was allowed reports `succeeded` or `failed`. Thread-safe.

    The n-th backoff in a row is `backoff_s * 2 ** (n - 1)`, at most `max_backoff_s`, times a random factor in
    [0.5, 1), so that many processes do not come back at the same moment. `jitter` draws from [0, 1).
    """

    def __init__(
        self,
        *,
        backoff_s: float = 1.0,
        max_backoff_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._backoff_s = backoff_s
        self._max_backoff_s = max_backoff_s
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        renew_lock_in_forks(self)
        self._failures = 0  # in a row
        self._open_until: float | None = None  # None: closed
        self._probing = False

    @property
    def state(self) -> State:
        """What `allows` would find right now."""
        with self._lock:
            if self._open_until is None:
                return "closed"
            return "half-open" if self._probing or self._clock() >= self._open_until else "open"

    def allows(self) -> bool:
        """True if the caller may try. When a backoff is over this is said to one caller: its call is the probe."""
        with self._lock:
            if self._open_until is None:
                return True
            if self._clock() < self._open_until:
                return False
            self._probing = True
            self._open_until = self._clock() + self._wait_s()  # a probe that never reports is followed by another
            return True

    def succeeded(self) -> None:
        """Closes the breaker. The late success of a call from before it opened is ignored."""
        with self._lock:
            if self._open_until is None or self._probing:
                self._failures, self._open_until, self._probing = 0, None, False

    def failed(self) -> None:
        """Opens the breaker. The late failure of a call from before it opened does not make the backoff longer."""
        with self._lock:
            if self._open_until is None or self._probing:
                self._failures += 1
                self._open_until, self._probing = self._clock() + self._wait_s(), False

    def _wait_s(self) -> float:
        doublings = min(max(self._failures - 1, 0), 32)  # far beyond any maximum, and no overflow after a week
        return min(self._max_backoff_s, self._backoff_s * 2.0**doublings) * (0.5 + 0.5 * self._jitter())
