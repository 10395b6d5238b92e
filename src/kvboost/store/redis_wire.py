"""What a Redis tier says to its server: keys and commands. Bytes in, bytes out; nothing here is checked or trusted.

    <prefix>/r/<record id>   hash   h: sealed head   p: payload        expires ttl_s after its last use
    <prefix>/n/<name>        sorted set: record ids by time of use     expires ttl_s after the last use of one
    <prefix>/used, sizes, bytes                                        the books, see `redis_books.py`

Only commands that Redis 5 and Valkey have; no scripts, no modules. A cluster is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvboost.store.records import head_of
from kvboost.store.redis_books import Books
from kvboost.store.redis_client import PEER_FAILED, kind_of
from kvboost.store.tier import MAX_LISTED
from kvboost.types import ChunkHeader

if TYPE_CHECKING:
    import redis

NAME_SIZE = 4 * MAX_LISTED  # ids kept per name
PAGE = 256  # keys looked at in one step of deleting all
HEAD, PAYLOAD = b"h", b"p"


class Wire:
    """The commands under one prefix. Each method is one round trip, unless it says otherwise, and raises what fails.

    `note` is told, once per pipeline and kind, of commands that failed while others did not.
    """

    def __init__(
        self,
        client: redis.Redis,
        prefix: bytes,
        ttl_s: float,
        books: Books,
        clock: Callable[[], float],
        note: Callable[[str, object], None],
    ) -> None:
        self._client: Any = client  # its type hints mix those of the asynchronous client
        self._prefix = prefix
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._books = books
        self._clock = clock
        self._note = note

    def listed(self, names: Sequence[bytes]) -> dict[bytes, list[bytes]]:
        """Ids listed under each name, the last used first."""
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.zrevrange(self._name_key(name), 0, MAX_LISTED - 1)
        return {name: ids for name, ids in zip(names, self._replies(pipe, []), strict=True) if ids}

    def heads(self, record_ids: Sequence[bytes]) -> dict[bytes, bytes | None]:
        """Heads by id; `None` where the record is gone, and an empty one where something else stands."""
        if not record_ids:
            return {}
        pipe = self._client.pipeline(transaction=False)
        for record_id in record_ids:
            pipe.hget(self._record_key(record_id), HEAD)
        return dict(zip(record_ids, self._replies(pipe, b""), strict=True))

    def load(self, record_ids: Sequence[bytes]) -> list[tuple[bytes | None, bytes | None]]:
        """Head and payload of each record; `None` what is gone."""
        pipe = self._client.pipeline(transaction=False)
        for record_id in record_ids:
            pipe.hmget(self._record_key(record_id), HEAD, PAYLOAD)
        return [(head, body) for head, body in self._replies(pipe, (None, None))]

    def write(self, header: ChunkHeader, data: memoryview, size: int, growth: int) -> bool:
        """All of a record in one transaction: nobody sees half of it, and a full server refuses all of it."""
        record_id, now, head = header.record_id, self._clock(), head_of(data)
        pipe = self._client.pipeline(transaction=True)
        key = self._record_key(record_id)
        pipe.delete(key)  # whatever else lies there
        pipe.hset(key, mapping={HEAD: head, PAYLOAD: data[len(head) :]})
        pipe.pexpire(key, self._ttl_ms)
        for name in header.names():
            pipe.zadd(self._name_key(name), {record_id: now})
            pipe.zremrangebyrank(self._name_key(name), 0, -NAME_SIZE - 1)
            pipe.pexpire(self._name_key(name), self._ttl_ms)
        self._books.book(pipe, record_id, size, growth)
        pipe.execute()
        return True

    def tell_use(self, headers: Sequence[ChunkHeader]) -> bool:
        """Records live on from now, and rank first."""
        pipe = self._client.pipeline(transaction=False)
        for header in reversed(headers):  # the head of a history is used last, so that it is evicted last
            pipe.pexpire(self._record_key(header.record_id), self._ttl_ms)
            self._books.touch(pipe, header.record_id)
            for name in header.names():
                pipe.zadd(self._name_key(name), {header.record_id: self._clock()}, xx=True)
                pipe.pexpire(self._name_key(name), self._ttl_ms)
        self._replies(pipe, None)
        return True

    def unlist(self, listings: Iterable[tuple[bytes, bytes]]) -> None:
        """Takes (name, id) pairs apart."""
        pipe = self._client.pipeline(transaction=False)
        for name, record_id in listings:
            pipe.zrem(self._name_key(name), record_id)
        self._replies(pipe, None)

    def unlink(self, record_ids: Sequence[bytes], headers: Mapping[bytes, ChunkHeader]) -> int:
        """Deletes records, and their names where the header is given; how many were there. Some round trips."""
        pipe = self._client.pipeline(transaction=False)
        for record_id in record_ids:
            pipe.unlink(self._record_key(record_id))
        deleted = sum(int(n) for n in self._replies(pipe, 0))
        self.unlist((name, i) for i, header in headers.items() for name in header.names())
        self._books.strike(record_ids)
        return deleted

    def unlink_page(self, cursor: int) -> tuple[int, int]:
        """One step of deleting every key under the prefix: where to go on (0: nowhere), and the records that went."""
        cursor, keys = self._client.scan(cursor, match=self._prefix + b"/*", count=PAGE)
        if keys:
            self._client.unlink(*keys)
        return int(cursor), sum(key.startswith(self._record_key(b"")) for key in keys)

    def _replies(self, pipe: Any, otherwise: Any) -> list[Any]:
        """Runs a pipeline. A reply that is an error is noted and replaced; raises what concerns the server itself."""
        replies: list[Any] = pipe.execute(raise_on_error=False)
        failed = {at: reply for at, reply in enumerate(replies) if isinstance(reply, Exception)}
        kinds = {kind_of(error): error for error in failed.values()}
        for kind, error in kinds.items():
            if kind in PEER_FAILED:
                raise error
            self._note(kind, f"{sum(kind_of(e) == kind for e in failed.values())} commands failed: {error}")
        return [otherwise if at in failed else reply for at, reply in enumerate(replies)]

    def _record_key(self, record_id: bytes) -> bytes:
        return self._prefix + b"/r/" + record_id

    def _name_key(self, name: bytes) -> bytes:
        return self._prefix + b"/n/" + name
