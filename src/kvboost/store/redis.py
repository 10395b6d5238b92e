"""A store that several machines share: Redis or Valkey.

Nothing that comes back is trusted. Heads and payloads carry a seal (`records.py`), and a record counts only under the
id and the names that its own head tells, so nobody who can write to the server can make one history pass for another.
Head and payload are fields of one key: the server evicts both or none. Names that list evicted records are cleaned up
by whoever meets them.

    redis_client.py   how the server is reached; `Line`: timeout, circuit breaker, counters
    redis_wire.py     keys and commands
    redis_books.py    what is used, and what goes first
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvboost.errors import DamagedRecord, KVBoostError, SettingsError
from kvboost.store.breaker import Breaker
from kvboost.store.forks import renew_lock_in_forks
from kvboost.store.recent import Recent
from kvboost.store.records import Seal, pack, unpack, unpack_header
from kvboost.store.redis_books import Books
from kvboost.store.redis_client import Line, connect
from kvboost.store.redis_wire import Wire
from kvboost.store.tier import Lease, StoredRecord, TierStats, is_truer
from kvboost.types import ChunkHeader, ChunkKV

TTL_S = 7 * 86400.0
TIMEOUT_S = 0.25
MAX_S = 1e9  # 30 years: what the server, and waiting in Python, can count
BATCH_BYTES = 4 << 20  # fetched in one round trip, within one timeout
LEAST_BYTES_PER_S = 32 << 20  # a record larger than a batch is waited for at this rate
HEADERS_KEPT, HEADERS_KEPT_S = 1024, 60.0  # headers that need not be fetched again, about 5 MB
TOUCH_S = 60.0  # a record's use is told to the server at most this often
NAME_BYTES = 200  # what an entry of a name takes on the server, about
MAX_RECORD_BYTES = 500 << 20  # a value of Redis holds 512 MiB
PAGE = 256  # records deleted in one step
MAX_OWED = 4096  # deletions by id that are remembered while the server is away
PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,100}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Found:
    """What one look-up brought: ids by name; by id, headers seen before, and heads (`None`: the record is gone)."""

    ids: Mapping[bytes, Sequence[bytes]]
    headers: Mapping[bytes, ChunkHeader]
    heads: Mapping[bytes, bytes | None]


class RedisTier:
    """See `Tier`. A lease holds copies, so nothing is pinned on the server. Thread-safe.

    Memory on the server is bounded by its own `maxmemory`, by `ttl_s` (counted from the last use), and by `bytes_limit`
    if given: then the records that were not used for longest go first. Tiers with other prefixes share nothing.
    A forked child opens connections of its own.

    Raises `SettingsError` for a bad URL or prefix, or without the package `redis`; never because of the server.
    """

    name = "redis"

    def __init__(
        self,
        url: str,
        seal: Seal,
        *,
        ttl_s: float = TTL_S,
        timeout_s: float = TIMEOUT_S,
        bytes_limit: int | None = None,
        prefix: str = "kvboost",
        username: str | None = None,
        password: str | None = None,
        ca_file: str | None = None,
        touch_s: float = TOUCH_S,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not PREFIX.fullmatch(prefix):
            raise SettingsError(f"the prefix of a Redis tier is 1 to 100 of A-Z a-z 0-9 _ . : -, not {prefix!r}")
        if not (0 < ttl_s <= MAX_S and 0 < timeout_s <= MAX_S):
            raise SettingsError(
                f"ttl_s and timeout_s of a Redis tier are above 0, at most {MAX_S:g}, not {ttl_s:g} and {timeout_s:g}"
            )
        self.bytes_limit = bytes_limit
        client = connect(url, timeout_s=timeout_s, username=username, password=password, ca_file=ca_file)
        self._line = Line(client, timeout_s, breaker or Breaker())
        self._books = Books(client, prefix.encode(), bytes_limit, ttl_s, clock)
        self._wire = Wire(client, prefix.encode(), ttl_s, self._books, clock, self._line.note)
        self._seal = seal
        self._headers: Recent[ChunkHeader] = Recent(HEADERS_KEPT, HEADERS_KEPT_S)
        self._touched: Recent[None] = Recent(1 << 16, touch_s)
        self._largest_bytes = 0  # of the records read
        self._owed: list[tuple[bytes | None]] = []  # deletions not carried out, each its own; None: of everything
        self._lock = threading.Lock()
        renew_lock_in_forks(self)

    def find(self, names: Sequence[bytes]) -> dict[bytes, list[ChunkHeader]]:
        """See `Tier.find`. One round trip, and one more if there are heads that were not seen within a minute."""
        found = self._call(partial(self._look_up, list(dict.fromkeys(names))), _Found({}, {}, {}))
        headers = {**found.headers, **self._opened_heads(found.heads)}
        stale = [(name, i) for name, ids in found.ids.items() for i in ids if found.heads.get(i, b"") is None]
        if stale:
            self._call(lambda: self._wire.unlist(stale), None)
        listed = {
            name: [headers[i] for i in ids if i in headers and name in headers[i].names()]
            for name, ids in found.ids.items()
        }
        return {name: of_name for name, of_name in listed.items() if of_name}

    def get_many(self, record_ids: Sequence[bytes]) -> Lease:
        """See `Tier.get_many`. One round trip per batch."""
        records: dict[bytes, ChunkKV] = {}
        for batch in self._batches(list(dict.fromkeys(record_ids))):
            fields = self._call(partial(self._wire.load, batch), None, _more_s(self._largest_bytes))
            if fields is None:
                break  # what is missing is a miss
            for record_id, (head, body) in zip(batch, fields, strict=True):
                record = self._opened(record_id, head, body)
                if record is not None:
                    records[record_id] = record
        self._touch([r.header for r in records.values()])
        return Lease(records)

    def put_many(self, records: Sequence[ChunkKV]) -> int:
        """See `Tier.put_many`. Some round trips per record: not for the path of a request."""
        if not records:
            return 0
        known = self._call(partial(self._known, [r.header.record_id for r in records]), None)
        if known is None:
            return 0
        self._call(self._books.prune, None)
        written = 0
        for record in records:
            record_id = record.header.record_id
            if record_id in known and not is_truer(record.header, known[record_id]):
                self._touch([known[record_id]])
            elif self._put(record):
                known[record_id] = record.header
                written += record.num_rows
        return written

    def delete(self, record_ids: Sequence[bytes] | None = None) -> int:
        """See `Tier.delete`. What an unreachable server still holds is deleted before it is used again.

        Of more than `MAX_OWED` such records the oldest are given up, and counted as `undeleted`: they may be served
        again. That everything is to go is never forgotten.
        """
        self._headers.forget(record_ids)
        self._touched.forget(record_ids)
        with self._lock:
            self._owed += [(i,) for i in ((None,) if record_ids is None else record_ids)]
        deleted = self._pay()
        if deleted is None:
            self._bound_owed()
        return deleted or 0

    def stats(self) -> TierStats:
        """See `Tier.stats`; `bytes_limit` is 0 if only the server sets one. An unreachable server shows no entries."""
        num_bytes, entries = self._call(self._books.totals, (0, 0))
        evictions, errors = self._books.evictions, self._line.errors
        return TierStats(self.name, num_bytes, self.bytes_limit or 0, entries, 0, evictions, errors)

    def records(self) -> Iterator[StoredRecord]:
        """See `LastingTier.records`. Ends early if the server fails; its hits are not counted."""
        cursor = 0
        while (page := self._call(partial(self._books.page, cursor), None)) is not None:
            cursor, entries = page
            heads = self._call(partial(self._wire.heads, [i for i, _, _ in entries]), dict[bytes, bytes | None]())
            headers = self._sound(heads)
            for record_id, num_bytes, used_at_s in entries:
                if heads.get(record_id) is not None:  # else it has expired
                    yield StoredRecord(record_id, headers.get(record_id), num_bytes, used_at_s=used_at_s)
            if not cursor:
                return

    def sealed(self, record_id: bytes) -> bytes | None:
        """See `LastingTier.sealed`."""
        fields = self._call(partial(self._wire.load, [record_id]), None, _more_s(MAX_RECORD_BYTES))
        head, body = fields[0] if fields is not None else (None, None)
        return None if head is None or body is None else head + body

    def close(self) -> None:
        """Closes the connections. Afterwards every call is a miss."""
        self._line.close()

    # --- reading ----------------------------------------------------------------------------------------------------

    def _look_up(self, names: Sequence[bytes]) -> _Found:
        ids = self._wire.listed(names)
        listed = dict.fromkeys(i for of_name in ids.values() for i in of_name)
        headers = self._headers.known(listed)
        return _Found(ids, headers, self._wire.heads([i for i in listed if i not in headers]))

    def _opened_heads(self, heads: Mapping[bytes, bytes | None]) -> dict[bytes, ChunkHeader]:
        """Sound headers by id, remembered."""
        headers = self._sound(heads)
        self._headers.update(headers)
        return headers

    def _sound(self, heads: Mapping[bytes, bytes | None]) -> dict[bytes, ChunkHeader]:
        opened = {i: self._opened_head(i, head) for i, head in heads.items() if head is not None}
        return {i: header for i, header in opened.items() if header is not None}

    def _opened_head(self, record_id: bytes, head: bytes) -> ChunkHeader | None:
        """The header, if it is under our seal and of this record; else it is counted."""
        try:
            header = unpack_header(head, self._seal)
            if header.record_id != record_id:
                raise DamagedRecord("a record lies under the id of another")
        except DamagedRecord as error:
            self._line.note("damaged", error)
            return None
        return header

    def _batches(self, record_ids: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
        """As many records as fit into a batch, if they are as large as the largest one read; at first one."""
        at = 0
        while at < len(record_ids):
            stop = at + (max(1, BATCH_BYTES // self._largest_bytes) if self._largest_bytes else 1)
            yield record_ids[at:stop]
            at = stop

    def _opened(self, record_id: bytes, head: bytes | None, body: bytes | None) -> ChunkKV | None:
        """The record, if it is what was packed under this id; one of our own seal that is damaged is removed."""
        if head is None or body is None:
            self._headers.forget([record_id])
            return None
        self._largest_bytes = max(self._largest_bytes, len(head) + len(body))
        header = self._opened_head(record_id, head)
        try:
            if header is not None:
                return unpack(bytearray().join((head, body)), self._seal)
        except DamagedRecord as error:
            self._line.note("damaged", error)
            self.delete([record_id])
        self._headers.forget([record_id])
        return None

    def _touch(self, headers: Sequence[ChunkHeader]) -> None:
        """Records live on and rank first, on the server too."""
        told = self._touched.known(h.record_id for h in headers)
        new = [h for h in headers if h.record_id not in told]
        told_now = bool(new) and self._call(partial(self._wire.tell_use, new), otherwise=False)
        if told_now:
            self._touched.update(dict.fromkeys(h.record_id for h in new))

    # --- writing ----------------------------------------------------------------------------------------------------

    def _known(self, record_ids: Sequence[bytes]) -> dict[bytes, ChunkHeader]:
        """Headers of the records that are there and sound, as the server has them now."""
        return self._sound(self._wire.heads(list(dict.fromkeys(record_ids))))

    def _put(self, record: ChunkKV) -> bool:
        header = record.header
        try:
            data = memoryview(pack(record, self._seal))
        except KVBoostError as error:
            self._line.note("unfit", error)
            return False
        size = len(data) + NAME_BYTES * len(header.names())
        if size > min(MAX_RECORD_BYTES, self.bytes_limit or MAX_RECORD_BYTES):
            self._line.note("unfit", f"a record of {size} bytes is larger than what may be kept")
            return False
        growth = self._call(lambda: self._books.make_room(header.record_id, size), None)
        if growth is None:
            return False
        written = self._call(
            lambda: self._wire.write(header, data, size, growth), otherwise=False, more_s=_more_s(size)
        )
        if written:
            self._headers.update({header.record_id: header})
        return written

    # --- deleting ---------------------------------------------------------------------------------------------------

    def _call(self, action: Callable[[], T], otherwise: T, more_s: float = 0.0) -> T:
        """See `Line.call`. While deletions are owed, nothing is served that they might concern."""
        if self._owed and self._pay() is None:
            return otherwise
        return self._line.call(action, otherwise, more_s)

    def _pay(self) -> int | None:
        """Carries out the deletions that are owed; how many records went, or `None` if they are still owed."""
        with self._lock:
            owed = list(self._owed)
        named = list(dict.fromkeys(i for (i,) in owed if i is not None))
        deleted = self._delete_all() if (None,) in owed else self._delete_named(named)
        if deleted is not None:
            paid = set(map(id, owed))  # not what was deleted once more meanwhile
            with self._lock:
                self._owed = [o for o in self._owed if id(o) not in paid]
        return deleted

    def _bound_owed(self) -> None:
        """Forgets the oldest deletions by id; all of them without loss where everything is to go anyway."""
        with self._lock:
            named = [o for o in self._owed if o[0] is not None]
            everything = [o for o in self._owed if o[0] is None][-1:]
            kept = [] if everything else named[-MAX_OWED:]
            self._owed = everything + kept
        for _ in range(0 if everything else len(named) - len(kept)):
            self._line.note("undeleted", f"more than {MAX_OWED} records are to be deleted from a server that is away")

    def _delete_named(self, record_ids: Sequence[bytes]) -> int | None:
        deleted = 0
        for at in range(0, len(record_ids), PAGE):
            of_page = self._line.call(partial(self._unlink, record_ids[at : at + PAGE]), None)
            if of_page is None:
                return None
            deleted += of_page
        return deleted

    def _unlink(self, record_ids: Sequence[bytes]) -> int:
        return self._wire.unlink(record_ids, self._known(record_ids))

    def _delete_all(self) -> int | None:
        """Deletes every key under the prefix, page by page."""
        deleted, cursor = 0, 0
        while True:
            page = self._line.call(partial(self._wire.unlink_page, cursor), None)
            if page is None:
                return None
            cursor, of_page = page
            deleted += of_page
            if not cursor:
                return deleted


def _more_s(num_bytes: int) -> float:
    """Seconds beyond the timeout for which a record larger than a batch is waited for."""
    return max(0, num_bytes - BATCH_BYTES) / LEAST_BYTES_PER_S
