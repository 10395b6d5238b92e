"""A byte-bounded store in a directory: survives restarts and `kill -9`, and many processes share it.

    directory/records-v1.1/             versions of format and index: releases that differ do not meet
        index.db, -wal, -shm            SQLite: heads, names, use, sizes (disk_index.py)
        index.lock                      held while an index is opened, made or rebuilt
        records/3f/3f09...-8c41d2e7.kv  one file per record (disk_files.py, records.py)

A record is committed when its row is. Its file has its name before that, and a row goes before its file is removed. So
a file without a row is what a killed process left: it is removed at start-up once it is older than any write takes.
A row without a file is a miss. Nothing is synced to the device: a killed process loses nothing that was committed; a
power loss may take the last seconds, and leave files that the seal refuses.
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvboost.errors import DamagedRecord, InputError, SettingsError
from kvboost.store.disk_files import DIRECTORY_MODE, RecordFiles, make_private, occupied_bytes
from kvboost.store.disk_index import INDEX_VERSION, DiskIndex, Row, Writing, exclusive, remove_index, row_of, truth_of
from kvboost.store.disk_recovery import adopt, claim, sweep
from kvboost.store.records import FORMAT_VERSION, Seal, head_of, pack, unpack, unpack_header
from kvboost.store.tier import MAX_LISTED, Lease, StoredRecord, TierStats
from kvboost.store.trouble import Trouble, kind_of
from kvboost.types import ChunkHeader, ChunkKV

FOLDER = f"records-v{FORMAT_VERSION}.{INDEX_VERSION}"
INDEX_BYTES = 2 << 20  # that the index is charged with at least; half of it for its log and the folders
RETRY_S = 10.0  # after the directory could not be opened, was full, or another process held its index for long
MAX_NOTES = 256  # uses and removals that wait for a transaction
HEADERS_KEPT = 1024  # decoded ones
CANDIDATES = 256  # the least recently used records, of which the least valuable are evicted
UNKNOWN_COST_S = 5e-8  # per byte, where a record does not tell: a small model on a CPU

FAILURES = (OSError, sqlite3.Error, UnicodeError)  # of a directory and its index; the last where SQLite quotes damage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Header:
    """A verified header, and the names that its record has a right to."""

    header: ChunkHeader
    names: frozenset[bytes]


class _NoRoom(Exception):
    """Rolls back a transaction whose record does not fit."""


class DiskTier:
    """Keeps records as sealed files. Thread-safe, fork-safe, and shared by processes; see `Tier` for the contract.

    `bytes_limit` bounds all files: records in whole blocks, and the index. `ttl_s`, if given, is how long after its
    writing a record is served. A lease holds copies, so leased records may be evicted. A directory that cannot be used
    (permissions, disk full, damage) makes misses, which `stats().errors` counts by kind; it is tried again later.
    Raises `SettingsError` for a limit that could hold nothing, and for what can be no path. Needs a local file system
    (SQLite's WAL).
    """

    name = "disk"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        bytes_limit: int,
        seal: Seal,
        *,
        max_variants: int = 4,
        ttl_s: float | None = None,
        orphan_grace_s: float = 600.0,
    ) -> None:
        if bytes_limit < 2 * INDEX_BYTES:
            raise SettingsError(
                f"a disk tier of {bytes_limit} bytes could hold nothing; give it at least {2 * INDEX_BYTES} bytes"
            )
        if "\0" in os.fspath(directory):
            raise SettingsError(f"disk_directory {os.fspath(directory)!r} holds a NUL, which no path can; remove it")
        self.directory = Path(directory)
        self.bytes_limit = bytes_limit
        self.max_variants = max_variants
        self._ttl_s = ttl_s
        self._grace_s = orphan_grace_s
        self._seal = seal
        self._folder = self.directory / FOLDER
        self._path = self._folder / "index.db"
        self._files = RecordFiles(self._folder / "records")
        self._trouble = Trouble(self.name)
        self._evictions: Counter[str] = Counter()
        self._headers: OrderedDict[str, _Header] = OrderedDict()  # by file, the oldest first
        self._opening = threading.RLock()  # taken before any lock of the index
        self._index: DiskIndex | None = None
        self._closed = False
        self._retry_at = 0.0
        self._paused_until = 0.0  # for writes, after one that found no room or waited for another process in vain
        self._paused_by = ""
        self._down = ""  # kind of failure since which the directory is not tried
        _tiers.add(self)
        self._attempt(lambda index: None, None)

    # --- the contract ----------------------------------------------------------------------------------------------

    def find(self, names: Sequence[bytes]) -> dict[bytes, list[ChunkHeader]]:
        """See `Tier.find`."""
        return self._attempt(self._find, {}, list(dict.fromkeys(names)))

    def get_many(self, record_ids: Sequence[bytes]) -> Lease:
        """See `Tier.get_many`. The lease holds copies of its own."""
        return Lease(self._attempt(self._get, {}, list(dict.fromkeys(record_ids))))

    def put_many(self, records: Sequence[ChunkKV]) -> int:
        """See `Tier.put_many`."""
        nothing: list[ChunkKV] = []
        wanted = self._attempt(self._wanted, nothing, records)
        return sum(self._put_unless_paused(r) for r in reversed(wanted))  # the head of a history is used last

    def delete(self, record_ids: Sequence[bytes] | None = None) -> int:
        """See `Tier.delete`."""
        return self._attempt(self._delete, 0, record_ids)

    def stats(self) -> TierStats:
        """See `Tier.stats`. `bytes_used` includes the index, with at least `INDEX_BYTES`."""
        entries, used = self._attempt(self._used, (0, 0))
        evictions, errors = dict(self._evictions), self._trouble.counts()
        return TierStats(self.name, used, self.bytes_limit, entries, 0, evictions, errors)

    def records(self) -> Iterator[StoredRecord]:
        """See `LastingTier.records`."""
        nothing: list[Row] = []
        for row in self._attempt(lambda index: list(index.every_row()), nothing):
            header = self._attempt(self._peek, None, row)
            yield StoredRecord(row.record_id, header, row.file_bytes, row.hits, row.used_ns / 1e9)

    def sealed(self, record_id: bytes) -> bytes | None:
        """See `LastingTier.sealed`."""
        return self._attempt(self._sealed, None, record_id)

    def close(self) -> None:
        """Writes what is pending and closes the index. Afterwards every call is a miss."""
        with self._opening:
            if self._index is not None:
                self._attempt(self._write_notes, None, True)
                self._drop_index()
            self._closed = True

    # --- find and get ----------------------------------------------------------------------------------------------

    def _find(self, index: DiskIndex, names: Sequence[bytes]) -> dict[bytes, list[ChunkHeader]]:
        found: dict[bytes, list[ChunkHeader]] = {}
        for name, rows in index.listed(names, MAX_LISTED, self._written_after_ns()).items():
            known = (self._header(index, row) for row in rows)
            headers = [h.header for h in known if h is not None and name in h.names]
            if headers:
                found[name] = headers
        self._write_notes(index)
        return found

    def _header(self, index: DiskIndex, row: Row) -> _Header | None:
        """The header of a row. One that is damaged is counted, and its record goes."""
        known = self._headers.get(row.file)
        if known is not None:
            return known
        try:
            header = self._verified(index, row)
        except DamagedRecord as error:
            self._trouble.note("damaged", f"the index's copy of a head: {error}")
            self._forget(index, row)
            return None
        if header is None:
            return None
        known = self._headers[row.file] = _Header(header, frozenset(header.names()))
        while len(self._headers) > HEADERS_KEPT:
            with suppress(KeyError):  # another thread was faster
                self._headers.popitem(last=False)
        return known

    def _verified(self, index: DiskIndex, row: Row) -> ChunkHeader | None:
        """The header in a row's head, None if it was evicted meanwhile. Raises `DamagedRecord`."""
        head = index.head(row.id)
        return None if head is None else _checked(unpack_header(head, self._seal), row)

    def _peek(self, index: DiskIndex, row: Row) -> ChunkHeader | None:
        try:
            return self._verified(index, row)
        except DamagedRecord:
            return None

    def _get(self, index: DiskIndex, record_ids: Sequence[bytes]) -> dict[bytes, ChunkKV]:
        rows = index.rows(record_ids, self._written_after_ns())
        read = [(i, self._read(index, rows[i])) for i in record_ids if i in rows]
        records = {i: record for i, record in read if record is not None}
        index.touch(list(reversed(records)))
        self._write_notes(index)
        return records

    def _read(self, index: DiskIndex, row: Row) -> ChunkKV | None:
        """A record from its file; None if that is gone, damaged, or cannot be read, which is counted."""
        try:
            data = self._files.read(row.file, row.file_bytes)
            record = unpack(data, self._seal)
            _checked(record.header, row)
        except FileNotFoundError:
            newer = index.rows([row.record_id]).get(row.record_id)
            if newer is None or newer.file != row.file:  # evicted or replaced meanwhile
                return None if newer is None else self._read(index, newer)
            self._trouble.note("missing", f"record file {row.file} is gone")
        except DamagedRecord as error:
            self._trouble.note("damaged", f"record file {row.file}: {error}")
        except OSError as error:
            self._trouble.note(kind_of(error), f"record file {row.file} cannot be read: {error}")
            return None  # it may be readable again
        else:
            return record
        self._forget(index, row)
        return None

    def _sealed(self, index: DiskIndex, record_id: bytes) -> bytes | None:
        row = index.rows([record_id]).get(record_id)
        try:
            return None if row is None else bytes(self._files.read(row.file, row.file_bytes))
        except (DamagedRecord, FileNotFoundError):
            return None

    def _forget(self, index: DiskIndex, row: Row) -> None:
        """Removes a record that cannot be served; its row goes with the next transaction, so that nobody waits."""
        index.doom(row.file)
        self._remove_files([row])

    def _written_after_ns(self) -> int:
        return -1 if self._ttl_s is None else time.time_ns() - int(self._ttl_s * 1e9)

    def _write_notes(self, index: DiskIndex, now: bool = False) -> None:
        """Writes uses and removals that were noted, if they are many. A request does not wait for other writers.

        Where the directory cannot be written (full, read-only) they wait on, and what is there is still served.
        """
        if index.num_noted < (1 if now else MAX_NOTES):
            return
        try:
            with index.writing(wait=now):
                pass
        except sqlite3.OperationalError as error:
            kind = kind_of(error)
            if kind == "index":
                raise
            if kind != "busy":
                self._trouble.note(kind, f"{self.directory}: uses cannot be written: {error}")

    # --- put and delete --------------------------------------------------------------------------------------------

    def _wanted(self, index: DiskIndex, records: Sequence[ChunkKV]) -> list[ChunkKV]:
        """The records that are new, or truer than what is there; the others count as used."""
        known = index.rows([r.header.record_id for r in records], self._written_after_ns())
        wanted = [r for r in records if not _is_known(r.header, known.get(r.header.record_id))]
        new = {r.header.record_id for r in wanted}
        index.touch([i for i in (r.header.record_id for r in reversed(records)) if i not in new])
        self._write_notes(index)
        return wanted

    def _put_unless_paused(self, record: ChunkKV) -> int:
        if time.monotonic() < self._paused_until:
            self._trouble.note(self._paused_by, f"{self.directory} could not be written a moment ago")
            return 0
        return self._attempt(self._put, 0, record)

    def _put(self, index: DiskIndex, record: ChunkKV) -> int:
        """Writes a file, then its row. Returns the rows of keys and values that were written."""
        try:
            data = pack(record, self._seal)
        except InputError as error:
            self._trouble.note("unsupported", error)
            return 0
        if self._charged(index, occupied_bytes(len(data))) > self.bytes_limit:
            return 0
        file = self._files.new_name(record.header.record_id)
        gone: list[tuple[Row, str]] = []
        try:
            self._files.write(file, data)
            with index.writing() as writing:
                gone = self._admit(index, writing, record.header, len(data))
                self._files.publish(file)
                hits = sum(row.hits for row, reason in gone if reason == "replaced")
                row = row_of(record.header, file, len(data), index.now_ns(), hits)
                writing.add(row, bytes(head_of(data)), record.header.names())
        except _NoRoom:
            self._files.remove(file)
            return 0
        except BaseException:
            self._files.remove(file)
            raise
        self._evicted(gone)
        return record.num_rows

    def _admit(self, index: DiskIndex, writing: Writing, header: ChunkHeader, file_bytes: int) -> list[tuple[Row, str]]:
        """Removes the rows that must go for a record, and returns them with the reason. Raises `_NoRoom`."""
        known = writing.row(header.record_id)
        if known is not None and _is_known(header, known) and known.written_ns > self._written_after_ns():
            raise _NoRoom  # another process was faster
        gone = [] if known is None else [(known, "replaced")]
        if header.source is None:
            variants = writing.variants(header.key.content_hash)
            others = [row for row in variants if row.record_id != header.record_id]
            gone += [(row, "quota") for row in others[: max(0, len(others) - self.max_variants + 1)]]
        writing.remove([row.file for row, _ in gone])
        return gone + self._make_room(index, writing, occupied_bytes(file_bytes))

    def _make_room(self, index: DiskIndex, writing: Writing, charged_bytes: int) -> list[tuple[Row, str]]:
        """Removes rows until `charged_bytes` more fit: first those that are too old, then the least valuable."""
        gone: list[tuple[Row, str]] = []
        while (excess := self._charged(index, writing.totals()[1] + charged_bytes) - self.bytes_limit) > 0:
            expired = [] if self._ttl_s is None or gone else writing.written_before(self._written_after_ns())
            rows = expired or _least_valuable(writing.oldest(CANDIDATES), excess, index.now_ns())
            if not rows:
                raise _NoRoom
            gone += [(row, "ttl" if expired else "importance_low") for row in rows]
            writing.remove([row.file for row in rows])
        return gone

    def _delete(self, index: DiskIndex, record_ids: Sequence[bytes] | None) -> int:
        with index.writing() as writing:
            found = (
                [writing.row(i) for i in dict.fromkeys(record_ids)] if record_ids is not None else writing.everything()
            )
            rows = [row for row in found if row is not None]
            writing.remove([row.file for row in rows])
        self._evicted((row, "invalidated") for row in rows)
        if record_ids is None:
            index.shrink()
        return len(rows)

    def _evicted(self, gone: Iterable[tuple[Row, str]]) -> None:
        """Counts committed removals and removes the files."""
        for row, reason in gone:
            if reason != "replaced":
                self._evictions[reason] += 1
            self._remove_files([row])

    def _remove_files(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._headers.pop(row.file, None)
            with suppress(OSError):  # then it is an orphan, and is tried again at start-up
                self._files.remove(row.file)

    def _used(self, index: DiskIndex) -> tuple[int, int]:
        entries, num_bytes = index.totals()
        return entries, self._charged(index, num_bytes)

    def _charged(self, index: DiskIndex, record_bytes: int) -> int:
        return record_bytes + INDEX_BYTES + max(0, index.num_bytes() - INDEX_BYTES // 2)

    # --- opening, and what goes wrong ------------------------------------------------------------------------------

    def _attempt(self, work: Callable[..., T], otherwise: T, *arguments: Any) -> T:
        """`work(index, *arguments)`, or `otherwise` if the directory does not allow it: counted, never raised."""
        for _ in range(2):  # the second time with another index
            index = None
            try:
                index = self._ready()
                return otherwise if index is None else work(index, *arguments)
            except FAILURES as error:
                kind = kind_of(error)
                if kind != "closed":
                    self._trouble.note(kind, f"{self.directory}: {error}")
                if kind in ("full", "busy"):
                    self._paused_until, self._paused_by = time.monotonic() + RETRY_S, kind
                if index is not None and kind == "index":
                    self._discard(index)
                elif kind != "closed":
                    break
        return otherwise

    def _ready(self) -> DiskIndex | None:
        """The open index; None while the directory is not tried. Raises what opening raises."""
        with self._opening:
            if self._closed:
                return None
            if self._index is not None and self._index.is_current():
                return self._index
            self._drop_index()
            if time.monotonic() < self._retry_at:
                self._trouble.note(self._down, f"{self.directory} could not be opened a moment ago")
                return None
            try:
                self._index = self._open()
            except FAILURES as error:
                self._down, self._retry_at = kind_of(error), time.monotonic() + RETRY_S
                raise
            return self._index

    def _open(self) -> DiskIndex:
        self.directory.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        make_private(self._folder)
        make_private(self._files.folder)
        with exclusive(self._folder / "index.lock"):
            try:
                return self._open_index()
            except FAILURES as error:
                if kind_of(error) != "index":
                    raise
                self._trouble.note("index", f"{self._path} is thrown away and made anew from the record files: {error}")
                remove_index(self._path)
                return self._open_index()

    def _open_index(self) -> DiskIndex:
        """Opens the index, makes one out of the record files if there is none, and puts the folder in order."""
        index = DiskIndex(self._path)
        try:
            if index.created:
                adopt(index, self._files, self._seal, self._trouble)
            claim(index, self._seal, self._trouble)
            sweep(index, self._files, self._seal, self._grace_s)
            gone: list[tuple[Row, str]] = []
            with suppress(_NoRoom), index.writing() as writing:  # the limit may have been lowered
                gone = self._make_room(index, writing, 0)
            self._evicted(gone)
        except BaseException:
            index.close()
            raise
        return index

    def _discard(self, index: DiskIndex) -> None:
        """Throws away an index that turned out to be damaged, unless another process did."""
        with self._opening, suppress(OSError):
            if self._index is index:
                self._drop_index()
            with exclusive(self._folder / "index.lock"):
                if index.is_current():
                    remove_index(index.path)

    def _drop_index(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            with suppress(sqlite3.Error):
                index.close()

    # --- forks -----------------------------------------------------------------------------------------------------

    def _locks(self) -> Iterator[Any]:
        """Every lock, in the order in which they are taken."""
        yield self._opening
        if self._index is not None:
            yield from (self._index.write_lock, self._index.read_lock, self._index.note_lock)
        yield self._trouble.lock

    def _after_fork_in_child(self) -> None:
        if self._index is not None:
            self._index.abandon()
            self._index = None


def _checked(header: ChunkHeader, row: Row) -> ChunkHeader:
    """Raises `DamagedRecord` if a rightly sealed header stands in the place of another record's."""
    if header.record_id != row.record_id:
        raise DamagedRecord("the record is another one than its place in the index says")
    return header


def _is_known(header: ChunkHeader, row: Row | None) -> bool:
    return row is not None and row.truth >= truth_of(header)


def _least_valuable(rows: Sequence[Row], excess_bytes: int, now_ns: int) -> list[Row]:
    """Of `rows`, those that free `excess_bytes` at the least loss."""
    chosen: list[Row] = []
    for row in sorted(rows, key=lambda r: (value(r, now_ns), r.used_ns)):
        if excess_bytes <= 0:
            break
        chosen.append(row)
        excess_bytes -= row.charged_bytes
    return chosen


def value(row: Row, now_ns: int) -> float:
    """What keeping a record is worth per byte: its recompute cost times how often it was used, fading with time."""
    idle_s = max(0.0, (now_ns - row.used_ns) / 1e9)
    cost_s = row.cost_s or UNKNOWN_COST_S * row.charged_bytes
    return (1 + row.hits) * cost_s / row.charged_bytes / (60.0 + idle_s)


# --- a fork must not happen while a lock is held, and a child must not use its parent's connections ------------------

_tiers: weakref.WeakSet[DiskTier] = weakref.WeakSet()
_held: list[Any] = []


def _before_fork() -> None:
    for tier in list(_tiers):
        for lock in tier._locks():
            lock.acquire()
            _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop().release()


def _after_fork_in_child() -> None:
    for tier in list(_tiers):
        tier._after_fork_in_child()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


@atexit.register
def _close_all() -> None:
    """A process that ends notes which records it used. Queues in front of tiers are closed before (`writing.py`)."""
    for tier in list(_tiers):
        tier.close()
