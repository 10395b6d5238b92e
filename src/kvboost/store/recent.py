"""A bounded memory of what was seen lately."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from kvboost.store.forks import renew_lock_in_forks

V = TypeVar("V")


class Recent(Generic[V]):
    """Values by key, each for `keep_s` after it was set, the latest `size` of them. Thread-safe."""

    def __init__(self, size: int, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        renew_lock_in_forks(self)
        self._values: OrderedDict[bytes, tuple[float, V]] = OrderedDict()  # key -> end, value; oldest first

    def known(self, keys: Iterable[bytes]) -> dict[bytes, V]:
        """Those of `keys` that were set within the last `keep_s` seconds."""
        now = self._clock()
        with self._lock:
            found = {key: self._values[key] for key in keys if key in self._values}
        return {key: value for key, (end, value) in found.items() if now < end}

    def update(self, values: Mapping[bytes, V]) -> None:
        """Sets values; the oldest go beyond `size`."""
        end = self._clock() + self._keep_s
        with self._lock:
            for key, value in values.items():
                self._values[key] = (end, value)
                self._values.move_to_end(key)
            while len(self._values) > self._size:
                self._values.popitem(last=False)

    def forget(self, keys: Iterable[bytes] | None = None) -> None:
        """Drops keys, or all with `None`."""
        with self._lock:
            for key in list(self._values if keys is None else keys):
                self._values.pop(key, None)
