"""What a cache keeps: ours, and those that it is compared with. Every policy stays within its capacity at all times.

* LRU, LFU (uses since the piece was taken in; between equals LRU).
* GDSF: greedy dual, size, frequency (Cherkasova 1998). Computing a token costs the same everywhere here, so value per
  token is the number of uses, above a level that rises with every eviction.
* S3-FIFO: a small queue for newcomers, a main queue, and names of what left the small one (Yang et al. 2023).
* importance: what `kvboost.store.MemoryTier` runs.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from kvboost.store.policy import Ranking
from kvboost.store.tuning import Shadow, Tuner


class Policy(Protocol):
    """A store of names. Sizes are in tokens."""

    def __contains__(self, name: bytes) -> bool:
        """True if the piece is stored."""
        ...

    def use(self, name: bytes) -> None:
        """A stored piece was asked for."""
        ...

    def put(self, name: bytes, tokens: int) -> None:
        """A piece that is not stored was computed; keeps it, or not."""
        ...


class LRU:
    """Evicts what was not used for longest."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._used = 0
        self._kept: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept

    def use(self, name: bytes) -> None:
        """See `Policy.use`."""
        self._kept.move_to_end(name)

    def put(self, name: bytes, tokens: int) -> None:
        """See `Policy.put`."""
        if tokens > self._capacity:
            return
        while self._used + tokens > self._capacity:
            self._used -= self._kept.popitem(last=False)[1]
        self._kept[name] = tokens
        self._used += tokens


class _Counted:
    """Evicts the least value; a value is computed when a piece is used, from the number of uses."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._used = 0
        self._kept: dict[bytes, tuple[int, int, int]] = {}  # tokens, uses, serial of the current heap item
        self._heap: list[tuple[float, int, bytes]] = []
        self._serial = 0
        self._level = 0.0

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept

    def use(self, name: bytes) -> None:
        """See `Policy.use`."""
        tokens, uses, _ = self._kept[name]
        self._rank(name, tokens, uses + 1)

    def put(self, name: bytes, tokens: int) -> None:
        """See `Policy.put`."""
        if tokens > self._capacity:
            return
        while self._used + tokens > self._capacity:
            value, serial, victim = heapq.heappop(self._heap)
            kept = self._kept.get(victim)
            if kept is not None and kept[2] == serial:
                self._used -= kept[0]
                del self._kept[victim]
                self._level = value
        self._used += tokens
        self._rank(name, tokens, 1)

    def _rank(self, name: bytes, tokens: int, uses: int) -> None:
        self._serial += 1
        self._kept[name] = (tokens, uses, self._serial)
        heapq.heappush(self._heap, (self._value(uses), self._serial, name))

    def _value(self, uses: int) -> float:
        raise NotImplementedError


class LFU(_Counted):
    """Evicts what was used least often."""

    def _value(self, uses: int) -> float:
        return float(uses)


class GDSF(_Counted):
    """Evicts the least of uses plus the level of the last eviction."""

    def _value(self, uses: int) -> float:
        return self._level + uses


class S3FIFO:
    """Newcomers wait in a small queue; what is used there, or comes back, enters the main one."""

    SMALL_SHARE = 0.1

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._gone: OrderedDict[bytes, int] = OrderedDict()
        self._small_used = self._main_used = self._gone_used = 0
        self._uses: dict[bytes, int] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._uses

    def use(self, name: bytes) -> None:
        """See `Policy.use`."""
        self._uses[name] = min(3, self._uses[name] + 1)

    def put(self, name: bytes, tokens: int) -> None:
        """See `Policy.put`."""
        if tokens > self._capacity:
            return
        while self._small_used + self._main_used + tokens > self._capacity:
            if self._small and (self._small_used >= self.SMALL_SHARE * self._capacity or not self._main):
                self._leave_small()
            else:
                self._leave_main()
        self._uses[name] = 0
        if name in self._gone:
            self._gone_used -= self._gone.pop(name)
            self._main[name] = tokens
            self._main_used += tokens
        else:
            self._small[name] = tokens
            self._small_used += tokens

    def _leave_small(self) -> None:
        name, tokens = self._small.popitem(last=False)
        self._small_used -= tokens
        if self._uses[name] > 1:
            self._uses[name] = 0
            self._main[name] = tokens
            self._main_used += tokens
            return
        del self._uses[name]
        self._gone[name] = tokens
        self._gone_used += tokens
        while self._gone_used > (1 - self.SMALL_SHARE) * self._capacity:
            self._gone_used -= self._gone.popitem(last=False)[1]

    def _leave_main(self) -> None:
        name, tokens = self._main.popitem(last=False)
        if self._uses[name] > 0:
            self._uses[name] -= 1
            self._main[name] = tokens
        else:
            self._main_used -= tokens
            del self._uses[name]


class Importance:
    """The policy of `kvboost.store.MemoryTier`, over names."""

    def __init__(self, capacity_tokens: int) -> None:
        self._ranking = Ranking(capacity_tokens)
        self._tuner = Tuner(self._ranking)
        self._store = Shadow(self._ranking)

    def __contains__(self, name: bytes) -> bool:
        return name in self._ranking

    @property
    def weight(self) -> float:
        """The weight of frequency against recency that the traffic has led to."""
        return self._ranking.weight

    def use(self, name: bytes) -> None:
        """See `Policy.use`."""
        self._tuner.ask(name, self._ranking[name].size_bytes)
        self._store.ask(name, self._ranking[name].size_bytes)

    def put(self, name: bytes, tokens: int) -> None:
        """See `Policy.put`."""
        self._tuner.ask(name, tokens)
        if self._store.excess_bytes(tokens) > 0:
            self._tuner.start()
        self._store.ask(name, tokens)


POLICIES: dict[str, Callable[[int], Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "s3-fifo": S3FIFO,
    "gdsf": GDSF,
    "importance": Importance,
}
