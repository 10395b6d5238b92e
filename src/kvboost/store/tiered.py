"""Several tiers as one store: memory in front, then disk, then a machine that others share.

find       asks every tier; of one record the fastest tier's header counts, unless a slower one has a truer
get_many   fastest tier first; what a slower one had is put into the first (promoted)
put_many   into the first at once; encoded and written to the others behind the answer (`writing.py`)
delete     everywhere, and out of the queue
a failure  of any kind is a miss, counted and logged
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from kvboost.store.forks import renew_lock_in_forks
from kvboost.store.memory import MemoryTier
from kvboost.store.tier import MAX_LISTED, Lease, StoredRecord, Tier, TierStats, is_truer
from kvboost.store.writing import Encode, Write, WriteBehind
from kvboost.types import ChunkHeader, ChunkKV

logger = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20
CLOSE_S = 5.0
LEAST_SHARE = 1 / 16  # of the first tier's limit, below which `shrink` does not lower it
FORGET_S = 10.0  # what is queued is written first, so that it can be found
NOTED = 4096  # records remembered to be truer in a slower tier

T = TypeVar("T")
Headers = dict[bytes, list[ChunkHeader]]


class TieredStore:
    """A `Tier` made of tiers, fastest first, each with a name of its own. Thread-safe.

    Memory is bounded by the first tier's budget and `queue_bytes`. Raises `ValueError` for no tiers or equal names.
    """

    name = "tiered"

    def __init__(self, tiers: Sequence[Tier], *, queue_bytes: int = QUEUE_BYTES) -> None:
        names = [tier.name for tier in tiers]
        if not tiers or len(set(names)) < len(names):
            raise ValueError(f"a tiered store needs tiers with names of their own, fastest first; got {names}")
        self.tiers = tuple(tiers)
        self._first, self._lower = self.tiers[0], self.tiers[1:]
        self._memory = self._first if isinstance(self._first, MemoryTier) else None
        self._least_bytes = 0 if self._memory is None else int(LEAST_SHARE * self._memory.bytes_limit)
        self._queue = WriteBehind(self._write_behind, queue_bytes)
        self._lock = threading.Lock()
        renew_lock_in_forks(self)
        self._deletions = 0  # a record that was fetched before the last one is not promoted after it
        self._truer_in: OrderedDict[bytes, Tier] = OrderedDict()  # record id -> the slower tier with a truer record
        self._errors: Counter[str] = Counter()

    def find(self, names: Sequence[bytes]) -> Headers:
        """See `Tier.find`."""
        found: Headers = {}
        for tier in self.tiers:
            for name, headers in self._ask(tier, lambda t: t.find(names), Headers()).items():
                known = {h.record_id: h for h in found.get(name, ())}
                self._note(tier, [h for h in headers if h.record_id in known and is_truer(h, known[h.record_id])])
                found[name] = _merged(known, headers)
        return found

    def get_many(self, record_ids: Sequence[bytes]) -> Lease:
        """See `Tier.get_many`. The lease tells which tier served a record."""
        wanted = list(dict.fromkeys(record_ids))
        with self._lock:
            deletions = self._deletions
            noted = [(self._truer_in[i], i) for i in wanted if i in self._truer_in]
        records: dict[bytes, ChunkKV] = {}
        served: dict[bytes, str] = {}
        with ExitStack() as leases:
            order = [(tier, [i for t, i in noted if t is tier]) for tier in self._lower if noted]
            for tier, ids in [*order, *((tier, wanted) for tier in self.tiers)]:
                lease = leases.enter_context(self._lease(tier, [i for i in ids if i not in records]))
                records.update(lease.records)
                served.update(dict.fromkeys(lease.records, tier.name))
            self._promote([records[i] for i in wanted if i in records and served[i] != self._first.name], deletions)
            release = leases.pop_all().close
        return Lease({i: records[i] for i in wanted if i in records}, release, served)

    def put_many(self, records: Sequence[ChunkKV], encode: Encode | None = None) -> int:
        """See `Tier.put_many`: the rows that the first tier took.

        With `encode`, the first tier's copy is replaced by the encoded one, and the others get that, off this thread.
        """
        written = self._ask(self._first, lambda t: t.put_many(records), 0)
        if self._lower or encode is not None:
            for record in records:
                self._queue.offer(Write(record, encode))
        return written

    def delete(self, record_ids: Sequence[bytes] | None = None) -> int:
        """See `Tier.delete`; returns the largest number that one tier had. What was queued before is never written."""
        self._queue.drop(record_ids)
        counts = [self._ask(tier, lambda t: t.delete(record_ids), 0) for tier in self._lower]
        with self._lock:  # a promotion has happened before and is deleted here, or sees the new count
            self._deletions += 1
            for record_id in list(self._truer_in) if record_ids is None else record_ids:
                self._truer_in.pop(record_id, None)
        counts.append(self._ask(self._first, lambda t: t.delete(record_ids), 0))
        return max(counts)

    def forget(self, owner: bytes | None = None, unused_since_s: float | None = None) -> int:
        """Deletes what is of one `ChunkHeader.namespace` and was not used since that Unix time, in any tier.

        None does not restrict. Returns how many records went. A tier that cannot list its records keeps them, which is
        logged.
        """
        self._queue.flush(FORGET_S)
        used_at_s: dict[bytes, float] = {}
        nothing: list[StoredRecord] = []
        for tier in self.tiers:
            for record in self._ask(tier, _all_records, nothing):
                if owner is None or (record.header is not None and record.header.namespace == owner):
                    used_at_s[record.record_id] = max(record.used_at_s, used_at_s.get(record.record_id, 0.0))
        doomed = [i for i, used in used_at_s.items() if unused_since_s is None or used < unused_since_s]
        self.delete(doomed)
        return len(doomed)

    def reject(self, misfits: Mapping[bytes, str]) -> None:
        """Deletes records that can never be served although they are sound, by id with the reason; counts `misfit`."""
        logger.warning(
            "%d records are removed, they are not of this model: %s", len(misfits), next(iter(misfits.values()))
        )
        with self._lock:
            self._errors["misfit"] += len(misfits)
        self.delete(list(misfits))

    def pin(self, record_ids: Iterable[bytes]) -> int:
        """Keeps records in memory until they are deleted; returns how many it found there."""
        return self._memory.pin(record_ids) if self._memory is not None else 0

    def note_quality(self, record_id: bytes, quality: float) -> None:
        """Tells which share of a record's rows (0 to 1) needed no repair when it was last served moved."""
        if self._memory is not None:
            self._memory.note_quality(record_id, quality)

    def shrink(self, share: float) -> int:
        """Gives memory back: the first tier keeps `share` of what it uses now. Returns its new limit, bytes.

        The limit stays at `LEAST_SHARE` of the first one: an empty cache that is asked to shrink would keep nothing
        ever after, and memory does not run out for so little.
        """
        if self._memory is None:
            return self._first.stats().bytes_limit
        self._memory.shrink(int(share * self._memory.stats().bytes_used), least_limit=self._least_bytes)
        return self._memory.stats().bytes_limit

    def stats(self) -> TierStats:
        """The first tier's, with what the queue holds besides, and the queue's and other failures among the errors."""
        first = self._first.stats()
        pending = (write.record for write in self._queue.pending())
        pending_bytes = sum(r.num_bytes for r in pending if self._memory is None or not self._memory.holds(r))
        errors = Counter(first.errors) + self._errors + Counter(self._queue.counts)
        return replace(first, errors=dict(errors), pending_bytes=pending_bytes)

    def stats_by_tier(self) -> dict[str, TierStats]:
        """Every tier's own snapshot, by its name."""
        return {
            tier.name: self._ask(tier, lambda t: t.stats(), TierStats(tier.name, 0, 0, 0, 0)) for tier in self.tiers
        }

    @property
    def pending_bytes(self) -> int:
        """Bytes of all records that are queued or being written, also of those that the first tier holds."""
        return self._queue.pending_bytes

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was put is in the lower tiers; False if that takes longer."""
        return self._queue.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Writes what is queued and closes the tiers; False if records were lost for lack of time."""
        done = self._queue.close(timeout_s)
        for tier in self.tiers:
            self._ask(tier, lambda t: getattr(t, "close", lambda: None)(), None)
        return done

    def _lease(self, tier: Tier, record_ids: Sequence[bytes]) -> Lease:
        return self._ask(tier, lambda t: t.get_many(record_ids), Lease({})) if record_ids else Lease({})

    def _ask(self, tier: Tier, call: Callable[[Tier], T], otherwise: T) -> T:
        """What a tier answers; a tier that raises although it must not answers `otherwise`."""
        try:
            return call(tier)
        except Exception:
            logger.exception("the tier %r failed; what it holds is taken as missing", tier.name)
            with self._lock:
                self._errors["raised"] += 1
            return otherwise

    def _note(self, tier: Tier, truer: Iterable[ChunkHeader]) -> None:
        with self._lock:
            for header in truer:
                self._truer_in[header.record_id] = tier
                self._truer_in.move_to_end(header.record_id)
            while len(self._truer_in) > NOTED:
                self._truer_in.popitem(last=False)

    def _promote(self, records: Sequence[ChunkKV], deletions: int) -> None:
        """Puts what a slower tier served into the first, unless something was deleted meanwhile."""
        if not records:
            return
        with self._lock:
            for record in records:
                self._truer_in.pop(record.header.record_id, None)
            if deletions != self._deletions:
                return
            try:
                self._first.put_many(records)
            except Exception:
                logger.exception("promoting %d records failed", len(records))
                self._errors["raised"] += 1

    def _write_behind(self, batch: Sequence[Write]) -> None:
        records = [encoded for write in batch if (encoded := self._encoded(write)) is not None]
        for tier in self._lower:
            self._ask(tier, lambda t: t.put_many(records), 0)

    def _encoded(self, write: Write) -> ChunkKV | None:
        """The record as the lower tiers get it; None if its encoder fails: then it stays in the first tier only."""
        if write.encode is None:
            return write.record
        try:
            encoded = write.encode(write.record)
        except Exception:
            logger.exception("encoding a record failed; it stays in memory as it is")
            with self._lock:
                self._errors["encode_failed"] += 1
            return None
        if self._memory is not None and encoded is not write.record:
            self._memory.compact(encoded, write.record)
        return encoded


def _all_records(tier: Tier) -> list[StoredRecord]:
    """What a tier lists. Raises `AttributeError` for one that does not."""
    listed: Iterator[StoredRecord] = tier.records()  # type: ignore[attr-defined]
    return list(listed)


def _merged(known: Mapping[bytes, ChunkHeader], headers: Sequence[ChunkHeader]) -> list[ChunkHeader]:
    """A faster tier's headers by record id, in order, and behind them the slower tier's; of one record the truer."""
    merged = dict(known)
    for header in headers:
        record_id = header.record_id
        if record_id not in merged or is_truer(header, merged[record_id]):
            merged[record_id] = header
    return list(merged.values())[:MAX_LISTED]
