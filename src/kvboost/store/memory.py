"""A byte-bounded store in process memory that evicts the least recently used chunk."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import islice

from kvboost.store.heap import return_free_pages
from kvboost.store.tier import MAX_LISTED, Lease, TierStats, is_truer
from kvboost.types import ChunkHeader, ChunkKV

TRIM_BYTES = 8 << 20  # evicted bytes after which free pages go back; a trim costs some milliseconds


class MemoryTier:
    """Keeps records as given (tensors are not copied). Thread-safe; see `Tier` for the contract."""

    name = "memory"

    def __init__(self, bytes_limit: int, *, max_variants: int = 4) -> None:
        self.bytes_limit = bytes_limit
        self.max_variants = max_variants
        self._lock = threading.RLock()
        self._records: OrderedDict[bytes, ChunkKV] = OrderedDict()  # least recently used first
        self._named: dict[bytes, OrderedDict[bytes, None]] = {}  # name -> record ids, least recently used first
        self._pins: Counter[bytes] = Counter()
        self._doomed: set[bytes] = set()  # deleted while leased
        self._successors: dict[bytes, ChunkKV] = {}  # compacted while leased
        self._bytes_used = 0
        self._freed_bytes = 0  # by evictions since free pages were last returned
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
            for record_id in reversed(records):  # the head of a history is used last, so that it is evicted last
                self._touch(record_id)
            self._pins.update(records.keys())
        return Lease(records, lambda: self._unpin(list(records)))

    def put_many(self, records: Sequence[ChunkKV]) -> int:
        """See `Tier.put_many`."""
        with self._lock:
            written = sum(r.num_rows for r in reversed(records) if self._put(r))
            trim = self._freed_bytes >= TRIM_BYTES
            if trim:
                self._freed_bytes = 0
        if trim:
            return_free_pages()
        return written

    def delete(self, record_ids: Sequence[bytes] | None = None) -> int:
        """See `Tier.delete`."""
        with self._lock:
            doomed = [i for i in (list(self._records) if record_ids is None else record_ids) if i in self._records]
            for record_id in doomed:
                self._drop(record_id, "invalidated")
            return len(doomed)

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
            if self._pins[record_id]:
                self._successors[record_id] = record
            else:
                self._records[record_id] = record
                self._bytes_used -= known.num_bytes - record.num_bytes
                self._freed_bytes += known.num_bytes - record.num_bytes
            return True

    def stats(self) -> TierStats:
        """See `Tier.stats`."""
        with self._lock:
            pinned = len(self._pins)
            return TierStats(
                self.name, self._bytes_used, self.bytes_limit, len(self._records), pinned, dict(self._evictions)
            )

    def check_integrity(self) -> None:
        """Raises `RuntimeError` when the books do not agree with the records; for tests and debugging."""
        with self._lock:
            counted = sum(r.num_bytes for r in self._records.values())
            listed = {i for ids in self._named.values() for i in ids}
            if counted != self._bytes_used or self._bytes_used > self.bytes_limit or listed != set(self._records):
                raise RuntimeError(
                    f"memory tier is inconsistent: {counted} bytes held, {self._bytes_used} booked, limit "
                    f"{self.bytes_limit}, {len(listed)} listed, {len(self._records)} records"
                )

    def _listed(self, name: bytes) -> list[ChunkHeader]:
        alive = (i for i in reversed(self._named[name]) if i not in self._doomed)
        return [self._records[i].header for i in islice(alive, MAX_LISTED)]

    def _put(self, record: ChunkKV) -> bool:
        record_id, size = record.header.record_id, record.num_bytes
        known = self._records.get(record_id)
        if known is not None and not is_truer(record.header, known.header):
            self._touch(record_id)
            return False
        if known is not None and self._pins[record_id]:
            return False  # somebody reads the old rows right now; the next computation replaces them
        if known is not None:
            self._remove(record_id)
        self._evict_variants(record.header)
        if not self._make_room(size):
            return False
        self._records[record_id] = record
        self._bytes_used += size
        for name in record.header.names():
            self._named.setdefault(name, OrderedDict())[record_id] = None
        return True

    def _evict_variants(self, header: ChunkHeader) -> None:
        if header.source is not None:
            return
        variants = [i for i in self._named.get(header.key.content_hash, ()) if not self._pins[i]]
        for record_id in variants[: max(0, len(variants) - self.max_variants + 1)]:
            self._drop(record_id, "quota")

    def _make_room(self, size: int) -> bool:
        """Evicts until `size` bytes fit; False if leased records or the limit itself leave too little."""
        if size > self.bytes_limit:
            return False
        excess = self._bytes_used + size - self.bytes_limit
        victims: list[bytes] = []
        for record_id, record in self._records.items():
            if excess <= 0:
                break
            if not self._pins[record_id]:
                victims.append(record_id)
                excess -= record.num_bytes
        if excess > 0:
            return False
        for record_id in victims:
            self._drop(record_id, "importance_low")
        return True

    def _drop(self, record_id: bytes, reason: str) -> None:
        if self._pins[record_id]:
            self._doomed.add(record_id)
            return
        self._remove(record_id)
        self._evictions[reason] += 1

    def _remove(self, record_id: bytes) -> None:
        record = self._records.pop(record_id)
        self._bytes_used -= record.num_bytes
        self._freed_bytes += record.num_bytes
        for name in record.header.names():
            ids = self._named[name]
            del ids[record_id]
            if not ids:
                del self._named[name]

    def _touch(self, record_id: bytes) -> None:
        self._records.move_to_end(record_id)
        for name in self._records[record_id].header.names():
            self._named[name].move_to_end(record_id)

    def _unpin(self, record_ids: Sequence[bytes]) -> None:
        with self._lock:
            for record_id in record_ids:
                self._pins[record_id] -= 1
                if not self._pins[record_id]:
                    del self._pins[record_id]
                    successor = self._successors.pop(record_id, None)
                    if record_id in self._doomed:
                        self._doomed.discard(record_id)
                        self._drop(record_id, "invalidated")
                    elif successor is not None:
                        self.compact(successor)
