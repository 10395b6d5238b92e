"""A byte-bounded store in process memory that evicts the least valuable chunk."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from kvboost.store.forks import hold_lock_in_forks
from kvboost.store.heap import return_free_pages
from kvboost.store.policy import Entry, Ranking
from kvboost.store.tier import MAX_LISTED, Lease, StoredRecord, TierStats, is_truer
from kvboost.store.tuning import Tuner
from kvboost.types import ChunkHeader, ChunkKV

TRIM_BYTES = 8 << 20  # freed bytes after which free pages go back; a trim costs some milliseconds


@dataclass(slots=True)
class _Use:
    stored_at_s: float  # Unix time
    used_at_s: float
    hits: int = 0


class MemoryTier:
    """Keeps records as given (tensors are not copied). Thread-safe; see `Tier` for the contract.

    What goes first, and what is not taken in at all, `kvboost.store.policy` says. Evictions are counted by reason:
    `importance_low` (to make room), `quota` (too many variants of a text, or bytes of a namespace), `oom` (`shrink`),
    `invalidated` (`delete`). `refused` counts what was not taken in.
    """

    name = "memory"

    def __init__(self, bytes_limit: int, *, max_variants: int = 4, namespace_bytes: int | None = None) -> None:
        """`namespace_bytes` is the most that records of one namespace may occupy; pinned ones count."""
        self.bytes_limit = bytes_limit
        self.max_variants = max_variants
        self.namespace_bytes = namespace_bytes
        self.refused: Counter[str] = Counter()
        self._wanted_limit = bytes_limit  # below `bytes_limit` while leased or pinned records are in the way
        self._lock = threading.RLock()
        hold_lock_in_forks(self)
        self._records: dict[bytes, ChunkKV] = {}
        self._named: dict[bytes, OrderedDict[bytes, None]] = {}  # name -> record ids, least recently used first
        self._ranking = Ranking(bytes_limit, grouped=namespace_bytes is not None)
        self._tuner = Tuner(self._ranking)
        self._uses: dict[bytes, _Use] = {}
        self._leased: Counter[bytes] = Counter()
        self._pinned: set[bytes] = set()
        self._doomed: dict[bytes, str] = {}  # dropped while leased -> the reason
        self._successors: dict[bytes, ChunkKV] = {}  # compacted while leased
        self._bytes_used = 0
        self._namespace_used: Counter[bytes] = Counter()
        self._freed_bytes = 0  # by evictions and refusals since free pages were last returned
        self._evictions: Counter[str] = Counter()

    def find(self, names: Sequence[bytes]) -> dict[bytes, list[ChunkHeader]]:
        """See `Tier.find`."""
        with self._lock:
            return {name: self._listed(name) for name in names if name in self._named}

    def get_many(self, record_ids: Sequence[bytes]) -> Lease:
        """See `Tier.get_many`."""
        with self._lock:
            wanted = dict.fromkeys(record_ids)
            records = {i: self._records[i] for i in wanted if i in self._records and i not in self._doomed}
            self._touch_all([r.header for r in records.values()])
            for record_id in records:
                self._uses[record_id].hits += 1
            self._leased.update(records.keys())
        return Lease(records, lambda: self._release(list(records)))

    def put_many(self, records: Sequence[ChunkKV]) -> int:
        """See `Tier.put_many`. A record that is worth less than all that would have to go for it is not taken in."""
        with self._lock:
            written, floor, child = 0, -math.inf, None
            for record in reversed(records):  # the head of a history is worth no less than its tail
                floor = floor if child is not None and _continues(child, record.header) else -math.inf
                kept, floor = self._put(record, floor)
                written += record.num_rows if kept else 0
                self._freed_bytes += 0 if kept else record.num_bytes  # its tensors are free as soon as it is refused
                child = record.header
            trim = self._freed_bytes >= TRIM_BYTES
            if trim:
                self._freed_bytes = 0
        if trim:
            return_free_pages()
        return written

    def delete(self, record_ids: Sequence[bytes] | None = None) -> int:
        """See `Tier.delete`. Pinned records are forgotten too."""
        with self._lock:
            doomed = [i for i in (list(self._records) if record_ids is None else record_ids) if i in self._records]
            for record_id in doomed:
                self._pinned.discard(record_id)
                self._drop(record_id, "invalidated")
            return len(doomed)

    def stored(self, record_ids: Iterable[bytes] | None = None) -> dict[bytes, StoredRecord]:
        """What is known of these records, or of all with None; those that are not here are absent. No use counts."""
        with self._lock:
            wanted = list(self._records) if record_ids is None else [i for i in record_ids if i in self._records]
            return {i: self._described(i) for i in wanted if i not in self._doomed}

    def records(self) -> Iterator[StoredRecord]:
        """Every record, in no particular order."""
        return iter(self.stored().values())

    def holds(self, record: ChunkKV) -> bool:
        """True if this very object is kept, so that its bytes are counted here. Does not mark it as used."""
        with self._lock:
            return self._records.get(record.header.record_id) is record

    def compact(self, record: ChunkKV, original: ChunkKV | None = None) -> bool:
        """Replaces the record of the same identity by this smaller form of it, although it may be less true.

        Its rank among the others stays. A leased one is replaced when its lease is closed. False, and nothing changes,
        if the record is gone, or would grow, or is no longer the `original` that the smaller form was made of.
        """
        with self._lock:
            record_id = record.header.record_id
            known = self._records.get(record_id)
            if known is None or record_id in self._doomed or (original is not None and known is not original):
                return False
            if record.num_bytes > known.num_bytes or record.header.names() != known.header.names():
                return False
            if self._leased[record_id]:
                self._successors[record_id] = record
                return True
            saved = known.num_bytes - record.num_bytes
            self._records[record_id] = record
            self._ranking.resize(record_id, record.num_bytes)
            self._bytes_used -= saved
            self._freed_bytes += saved
            self._namespace_used[known.header.namespace] -= saved
            self._settle_limit()
            return True

    def stats(self) -> TierStats:
        """See `Tier.stats`."""
        with self._lock:
            pinned = len(self._pinned | set(self._leased))
            return TierStats(
                self.name, self._bytes_used, self.bytes_limit, len(self._records), pinned, dict(self._evictions)
            )

    def pin(self, record_ids: Iterable[bytes]) -> int:
        """Keeps records, such as a system prompt's, from eviction until `unpin` or `delete`; returns how many it found.

        Their bytes count, in the budget and in their namespace's.
        """
        with self._lock:
            found = [i for i in record_ids if i in self._records and i not in self._doomed]
            self._pinned.update(found)
            return len(found)

    def unpin(self, record_ids: Iterable[bytes]) -> None:
        """Records may be evicted again; those that are not pinned stay as they are."""
        with self._lock:
            self._pinned.difference_update(record_ids)
            self._settle_limit()

    def shrink(self, bytes_limit: int, *, least_limit: int = 0) -> int:
        """Lowers the budget and evicts down to it at once, least valuable first; returns the bytes that were freed.

        Leased records go when their lease is closed, pinned ones stay; `bytes_limit` is what could be reached. With
        `least_limit` as much is evicted, but the budget stays there.
        """
        with self._lock:
            before = self._bytes_used
            target = min(bytes_limit, self._wanted_limit)
            self._wanted_limit = self._ranking.capacity_bytes = min(max(target, least_limit), self._wanted_limit)
            excess = self._bytes_used - target
            movable = sum(self._ranking[i].size_bytes for i in self._records if i not in self._pinned)
            victims = self._ranking.victims(min(excess, movable), lambda i: i in self._pinned or i in self._doomed)
            for record_id in victims if victims is not None else self._movable():
                self._drop(record_id, "oom")
            self._settle_limit()
        return_free_pages()
        return before - self._bytes_used

    def note_quality(self, record_id: bytes, quality: float) -> None:
        """Tells which share of a record's rows (0 to 1) needed no repair when it was last served moved."""
        with self._lock:
            if record_id in self._records:
                self._ranking.note_quality(record_id, quality)

    def check_integrity(self) -> None:
        """Raises `RuntimeError` when the books do not agree with the records; for tests and debugging."""
        with self._lock:
            counted = sum(r.num_bytes for r in self._records.values())
            by_namespace: Counter[bytes] = Counter()
            for r in self._records.values():
                by_namespace[r.header.namespace] += r.num_bytes
            listed = {i for ids in self._named.values() for i in ids}
            ranked = sum(e.size_bytes for e in self._ranking.entries())
            held = set(self._records)
            if (
                not counted == self._bytes_used == ranked <= self.bytes_limit
                or +self._namespace_used != by_namespace
                or (self.namespace_bytes is not None and max(by_namespace.values(), default=0) > self.namespace_bytes)
                or listed != held
                or set(self._uses) != held
                or not (self._pinned | set(self._doomed) | set(self._leased)) <= held
            ):
                raise RuntimeError(
                    f"memory tier is inconsistent: {counted} bytes held, {self._bytes_used} booked, {ranked} ranked, "
                    f"limit {self.bytes_limit}, {len(listed)} listed, {len(self._records)} records, by namespace "
                    f"{dict(by_namespace)} held, {dict(self._namespace_used)} booked, limit {self.namespace_bytes}"
                )

    def _described(self, record_id: bytes) -> StoredRecord:
        record, use = self._records[record_id], self._uses[record_id]
        return StoredRecord(record_id, record.header, record.num_bytes, use.hits, use.used_at_s, use.stored_at_s)

    def _listed(self, name: bytes) -> list[ChunkHeader]:
        alive = (i for i in reversed(self._named[name]) if i not in self._doomed)
        return [self._records[i].header for i in islice(alive, MAX_LISTED)]

    def _put(self, record: ChunkKV, floor: float) -> tuple[bool, float]:
        """Whether the record was written, and its priority, or `floor` if it is not there."""
        header, record_id, size = record.header, record.header.record_id, record.num_bytes
        known = self._records.get(record_id)
        self._tuner.ask(_text(header), size)
        if known is not None and not is_truer(header, known.header):
            return False, self._touch(header, floor)
        if known is not None and self._leased[record_id]:
            return False, floor  # somebody reads the old rows right now; the next computation replaces them
        entry = self._ranking.estimate(size, _text(header), group=header.namespace, cost_s=header.cost_s, floor=floor)
        victims = self._victims(header, entry, 0 if known is None else known.num_bytes)
        if victims is None:
            return False, floor
        pinned = record_id in self._pinned
        if known is not None:
            entry.frequency, entry.proven = max(entry.frequency, self._ranking[record_id].frequency), True
            self._remove(record_id)
        for victim, reason in victims.items():
            self._drop(victim, reason)
        self._insert(record, entry)
        if pinned:
            self._pinned.add(record_id)
        return True, entry.priority

    def _insert(self, record: ChunkKV, entry: Entry) -> None:
        record_id = record.header.record_id
        now = time.time()
        self._records[record_id] = record
        self._uses[record_id] = _Use(now, now)
        self._bytes_used += entry.size_bytes
        self._namespace_used[record.header.namespace] += entry.size_bytes
        self._ranking.add(record_id, entry)
        for name in record.header.names():
            self._named.setdefault(name, OrderedDict())[record_id] = None

    def _victims(self, header: ChunkHeader, entry: Entry, replaced_bytes: int) -> dict[bytes, str] | None:
        """What goes so that a newcomer fits, with the reasons; None if it is not worth that, or does not fit at all."""
        needed = entry.size_bytes - replaced_bytes
        chosen = dict.fromkeys(self._spare_variants(header), "quota")
        limits: list[tuple[int, int, bytes | None, str]] = [
            (self._bytes_used, self.bytes_limit, None, "importance_low"),
        ]
        if self.namespace_bytes is not None:
            limits.insert(0, (self._namespace_used[header.namespace], self.namespace_bytes, header.namespace, "quota"))
        for used, limit, group, reason in limits:
            freed = sum(self._ranking[i].size_bytes for i in chosen if group is None or self._ranking[i].group == group)
            excess = used + needed - freed - limit
            more = None if entry.size_bytes > limit else self._weaker(excess, header, entry, chosen, group)
            if more is None:
                self.refused["too_large" if entry.size_bytes > limit else reason] += 1
                self._ranking.refuse(entry)
                return None
            chosen |= dict.fromkeys(more, reason)
        return chosen

    def _weaker(
        self, excess: int, header: ChunkHeader, entry: Entry, chosen: dict[bytes, str], group: bytes | None
    ) -> list[bytes] | None:
        if excess <= 0:
            return []
        self._tuner.start()
        own = header.record_id

        def spared(i: bytes) -> bool:
            return i in chosen or i in self._pinned or i in self._leased or i == own

        return self._ranking.victims(excess, spared, below=entry.priority, group=group)

    def _spare_variants(self, header: ChunkHeader) -> list[bytes]:
        """Records of the same text that are too many, the weakest first."""
        if header.source is not None:
            return []
        same = [i for i in self._named.get(header.key.content_hash, ()) if i != header.record_id]
        free = [i for i in same if i not in self._pinned and i not in self._leased]
        free.sort(key=lambda i: (self._ranking[i].priority, self._ranking[i].serial))
        return free[: max(0, len(free) - self.max_variants + 1)]

    def _movable(self) -> list[bytes]:
        return [i for i in self._records if i not in self._pinned and i not in self._doomed]

    def _drop(self, record_id: bytes, reason: str) -> None:
        if self._leased[record_id]:
            self._doomed[record_id] = reason
            return
        self._remove(record_id, remember=reason != "invalidated")
        self._evictions[reason] += 1

    def _remove(self, record_id: bytes, *, remember: bool = False) -> None:
        record = self._records.pop(record_id)
        del self._uses[record_id]
        size = self._ranking.remove(record_id, remember=remember).size_bytes
        self._bytes_used -= size
        self._freed_bytes += size
        self._namespace_used[record.header.namespace] -= size
        if not self._namespace_used[record.header.namespace]:
            del self._namespace_used[record.header.namespace]
        self._pinned.discard(record_id)
        for name in record.header.names():
            ids = self._named[name]
            del ids[record_id]
            if not ids:
                del self._named[name]

    def _touch_all(self, headers: Sequence[ChunkHeader]) -> None:
        """Marks records of one request as used, the head of a history last, and worth no less than its tail."""
        floor, child = -math.inf, None
        for header in reversed(headers):
            floor = floor if child is not None and _continues(child, header) else -math.inf
            self._tuner.ask(_text(header), self._ranking[header.record_id].size_bytes)
            floor = self._touch(header, floor)
            child = header

    def _touch(self, header: ChunkHeader, floor: float) -> float:
        record_id = header.record_id
        for name in self._records[record_id].header.names():
            self._named[name].move_to_end(record_id)
        self._uses[record_id].used_at_s = time.time()
        return self._ranking.use(record_id, floor)

    def _release(self, record_ids: Sequence[bytes]) -> None:
        with self._lock:
            for record_id in record_ids:
                self._leased[record_id] -= 1
                if not self._leased[record_id]:
                    del self._leased[record_id]
                    successor = self._successors.pop(record_id, None)
                    if record_id in self._doomed:
                        self._drop(record_id, self._doomed.pop(record_id))
                    elif successor is not None:
                        self.compact(successor)
            self._settle_limit()

    def _settle_limit(self) -> None:
        """The budget goes down to what was asked for as records that were in the way leave."""
        if self.bytes_limit > self._wanted_limit:
            self.bytes_limit = max(self._wanted_limit, self._bytes_used)


def _text(header: ChunkHeader) -> bytes:
    """The name under which use is remembered: a text comes back behind another history, as another record."""
    return header.key.content_hash if header.source is None else header.record_id


def _continues(child: ChunkHeader, header: ChunkHeader) -> bool:
    return child.parent == header.key.prefix_hash
