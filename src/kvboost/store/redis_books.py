"""What a Redis tier occupies on its server: the sizes of its records, when each was used, and which go first.

Several processes keep these books together, without locks. A process that ends between two steps leaves the sum off by
a record; every now and then it is taken anew.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from kvboost.store.forks import renew_lock_in_forks

if TYPE_CHECKING:
    import redis

PAGE = 256  # records looked at in one step
MAX_PAGES = 4  # evicted for one new record; a limit that was lowered is reached over several
AUDIT_EVERY = 256  # records written by a process between two audits


class Books:
    """The books under one prefix. Every method but `evictions` and those with a pipeline talks to the server."""

    def __init__(
        self,
        client: redis.Redis,
        prefix: bytes,
        bytes_limit: int | None,
        ttl_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._client: Any = client  # its type hints mix those of the asynchronous client
        self._records = prefix + b"/r/"
        self._used, self._sizes, self._bytes = prefix + b"/used", prefix + b"/sizes", prefix + b"/bytes"
        self._limit = bytes_limit
        self._ttl_s = ttl_s
        self._clock = clock
        self._written = count()
        self._lock = threading.Lock()
        renew_lock_in_forks(self)
        self._evictions: Counter[str] = Counter()

    @property
    def evictions(self) -> Mapping[str, int]:
        """Records that this process evicted, by reason."""
        with self._lock:
            return dict(self._evictions)

    def totals(self) -> tuple[int, int]:
        """Bytes used, and the number of records."""
        pipe = self._client.pipeline(transaction=False)
        pipe.get(self._bytes)
        pipe.zcard(self._used)
        num_bytes, entries = pipe.execute()
        return max(0, int(num_bytes or 0)), int(entries)

    def page(self, cursor: int) -> tuple[int, list[tuple[bytes, int, float]]]:
        """Some records as (id, bytes, Unix time of the last use), and where to go on; 0: nowhere. Two round trips."""
        cursor, used = self._client.zscan(self._used, cursor, count=PAGE)
        sizes = self._client.hmget(self._sizes, [i for i, _ in used]) if used else []
        return int(cursor), [(i, int(size or 0), at) for (i, at), size in zip(used, sizes, strict=True)]

    def make_room(self, record_id: bytes, size: int) -> int | None:
        """Evicts until a record of `size` bytes fits; by how much it makes the sum grow. `None`: there is no room."""
        if self._limit is not None and size > self._limit:
            return None
        if next(self._written) % AUDIT_EVERY == 0:
            self.audit()
        for _ in range(MAX_PAGES):
            pipe = self._client.pipeline(transaction=False)
            pipe.hget(self._sizes, record_id)
            pipe.get(self._bytes)
            old, used = (int(n or 0) for n in pipe.execute())
            excess = 0 if self._limit is None else used + size - old - self._limit
            if excess <= 0:
                return size - old
            self._evict(excess)
        return None

    def book(self, pipe: Any, record_id: bytes, size: int, growth: int) -> None:
        """Adds to a transaction: the record has `size` bytes and was used now."""
        pipe.zadd(self._used, {record_id: self._clock()})
        pipe.hset(self._sizes, record_id, size)
        pipe.incrby(self._bytes, growth)

    def touch(self, pipe: Any, record_id: bytes) -> None:
        """Adds to a pipeline: the record was used now."""
        pipe.zadd(self._used, {record_id: self._clock()}, xx=True)

    def strike(self, record_ids: Iterable[bytes], *, unlink: bool = False) -> int:
        """Takes records out of the books, and with `unlink` off the server; how many this process took out."""
        record_ids = list(record_ids)
        pipe = self._client.pipeline(transaction=False)
        for record_id in record_ids:
            pipe.zrem(self._used, record_id)
        mine = [i for i, removed in zip(record_ids, pipe.execute(), strict=True) if removed]
        if mine:
            sizes = self._client.hmget(self._sizes, mine)
            pipe = self._client.pipeline(transaction=True)
            if unlink:
                pipe.unlink(*(self._records + i for i in mine))
            pipe.hdel(self._sizes, *mine)
            pipe.decrby(self._bytes, sum(int(s or 0) for s in sizes))
            pipe.execute()
        return len(mine)

    def prune(self) -> None:
        """Takes records out of the books that were not used for as long as they live."""
        expired = self._client.zrangebyscore(self._used, "-inf", self._clock() - self._ttl_s, 0, PAGE)
        if expired:
            self._note("ttl", self.strike(expired))

    def audit(self) -> None:
        """Takes the sum anew."""
        self._client.set(self._bytes, sum(int(size) for size in self._client.hvals(self._sizes)))

    def _evict(self, excess: int) -> None:
        """Evicts what was not used for longest, `excess` bytes or a page."""
        oldest: Sequence[bytes] = self._client.zrange(self._used, 0, PAGE - 1)
        victims = []
        for record_id, size in zip(oldest, self._client.hmget(self._sizes, oldest) if oldest else [], strict=True):
            if excess <= 0:
                break
            victims.append(record_id)
            excess -= int(size or 0)
        self._note("importance_low", self.strike(victims, unlink=True))

    def _note(self, reason: str, times: int) -> None:
        with self._lock:
            self._evictions[reason] += times
