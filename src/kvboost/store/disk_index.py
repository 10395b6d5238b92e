"""The index of the disk tier: which records there are, under which names, their heads, and their use. SQLite, WAL.

Any number of processes share it. Readers never wait. A writer holds the lock for one small transaction. After
`kill -9` SQLite rolls back what was not committed; after a power loss the last seconds may be missing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost.store.disk_files import FILE_MODE, occupied_bytes
from kvboost.types import DECLARED, ChunkHeader

INDEX_VERSION = 1
BUSY_S = 5.0  # how long a writer waits for writers of other processes
LISTED_ROWS = 256  # rows of a name that are considered, the last written; a name can have thousands
WAL_PAGES = 200  # after which the log is written back: it stays below a MiB
JOURNAL_BYTES = 1 << 20
FOREIGN = -1  # truth of a record of another secret, of which nothing is known but its head's bytes and its size

_SCHEMA = """
CREATE TABLE records(
    id INTEGER PRIMARY KEY,
    record_id BLOB NOT NULL UNIQUE,
    content BLOB,  -- NULL for a link, which is no variant of its text
    truth INTEGER NOT NULL,
    file TEXT NOT NULL UNIQUE,
    file_bytes INTEGER NOT NULL,
    charged_bytes INTEGER NOT NULL,
    written_ns INTEGER NOT NULL,
    used_ns INTEGER NOT NULL,
    hits INTEGER NOT NULL,
    cost_s REAL NOT NULL
);
CREATE INDEX records_by_use ON records(used_ns);
CREATE INDEX records_by_content ON records(content, used_ns) WHERE content IS NOT NULL;
CREATE TABLE heads(id INTEGER PRIMARY KEY, head BLOB NOT NULL);
CREATE TABLE names(name BLOB NOT NULL, id INTEGER NOT NULL, PRIMARY KEY(name, id)) WITHOUT ROWID;
CREATE INDEX names_by_id ON names(id);
CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('entries', 0), ('bytes', 0), ('swept_ns', 0);
CREATE TRIGGER record_added AFTER INSERT ON records BEGIN
    UPDATE meta SET value = value + 1 WHERE key = 'entries';
    UPDATE meta SET value = value + new.charged_bytes WHERE key = 'bytes';
END;
CREATE TRIGGER record_removed AFTER DELETE ON records BEGIN
    DELETE FROM heads WHERE id = old.id;
    DELETE FROM names WHERE id = old.id;
    UPDATE meta SET value = value - 1 WHERE key = 'entries';
    UPDATE meta SET value = value - old.charged_bytes WHERE key = 'bytes';
END;
"""
_COLUMNS = "id, record_id, content, truth, file, file_bytes, charged_bytes, written_ns, used_ns, hits, cost_s"


@dataclass(frozen=True, slots=True)
class Row:
    """One record as the index has it. Times in nanoseconds since 1970, so that they compare between processes."""

    id: int
    record_id: bytes
    content: bytes | None
    truth: int
    file: str
    file_bytes: int
    charged_bytes: int
    written_ns: int
    used_ns: int
    hits: int
    cost_s: float


_TYPES: tuple[Any, ...] = (int, bytes, (bytes, type(None)), int, str, int, int, int, int, int, (float, int))


def _row(values: Sequence[Any]) -> Row:
    """A row as it was read. Raises `sqlite3.DatabaseError` if its values cannot be what was written."""
    if not all(isinstance(v, t) for v, t in zip(values, _TYPES, strict=True)):
        raise sqlite3.DatabaseError("a row of the index is malformed")
    return Row(*values)


def _meta(connection: sqlite3.Connection) -> dict[str, int]:
    """The counters. Raises `sqlite3.DatabaseError` if one is missing or no number."""
    found = dict(connection.execute("SELECT key, value FROM meta"))
    if not all(isinstance(found.get(key), int) for key in ("entries", "bytes", "swept_ns")):
        raise sqlite3.DatabaseError("the counters of the index are malformed")
    return found


def row_of(header: ChunkHeader, file: str, file_bytes: int, now_ns: int, hits: int = 0) -> Row:
    """The row of a record that is not in the index yet."""
    content = header.key.content_hash if header.source is None else None
    charged = occupied_bytes(file_bytes)
    truth = truth_of(header)
    return Row(0, header.record_id, content, truth, file, file_bytes, charged, now_ns, now_ns, hits, header.cost_s)


def foreign_row(file: str, file_bytes: int, written_ns: int) -> Row:
    """The row of a record that cannot be judged: found under no name, evicted like any other."""
    charged = occupied_bytes(file_bytes)
    return Row(0, b"foreign " + file.encode(), None, FOREIGN, file, file_bytes, charged, written_ns, written_ns, 0, 0.0)


def truth_of(header: ChunkHeader) -> int:
    """Of two records of one identity the one with more of it stays, as `is_truer` says."""
    return 4 * int(header.lineage) + 2 * (header.source is None) + (header.session == DECLARED)


class DiskIndex:
    """Connections to one index file. Methods raise `sqlite3.Error`, and `UnicodeError` where SQLite quotes damage.

    `touch` and `doom` only note what the next transaction writes, so that a reader never waits for a writer.
    """

    def __init__(self, path: Path) -> None:
        """Opens the index, and makes it if it is not there. `created` tells which. Raises `OSError` too."""
        self.path = path
        _create_private(path)
        self.inode = path.stat().st_ino
        self.read_lock, self.write_lock = threading.RLock(), threading.RLock()
        self.note_lock = threading.Lock()
        self._touched: dict[bytes, tuple[int, int]] = {}  # record id -> time, hits since the last transaction
        self._doomed: dict[str, None] = {}  # files whose rows go with the next transaction
        self._last_ns = 0
        self._writer = _connect(path)
        try:
            self.created = _prepare(self._writer)
            self._reader = _connect(path)
        except BaseException:
            self._writer.close()
            raise

    def is_current(self) -> bool:
        """False when another process has thrown this index file away, or somebody removed the directory."""
        try:
            return os.stat(self.path).st_ino == self.inode
        except OSError:
            return False

    # --- reading ---------------------------------------------------------------------------------------------------

    def listed(self, names: Sequence[bytes], limit: int, written_after_ns: int) -> dict[bytes, list[Row]]:
        """Rows listed under each name, the most recently used first; names without any are absent."""
        query = (
            f"SELECT {_qualified()} FROM names n JOIN records r ON r.id = n.id "
            f"WHERE n.name = ? AND r.written_ns > ? ORDER BY n.id DESC LIMIT {LISTED_ROWS}"
        )
        found: dict[bytes, list[Row]] = {}
        with self.read_lock:
            for name in names:
                rows = self._alive(self._reader.execute(query, (name, written_after_ns)))
                if rows:
                    found[name] = sorted(rows, key=self._used_ns, reverse=True)[:limit]
        return found

    def rows(self, record_ids: Sequence[bytes], written_after_ns: int = 0) -> dict[bytes, Row]:
        """The rows of the records that are there."""
        query = f"SELECT {_COLUMNS} FROM records WHERE record_id = ? AND written_ns > ?"
        with self.read_lock:
            found = [self._alive(self._reader.execute(query, (i, written_after_ns))) for i in record_ids]
        return {rows[0].record_id: rows[0] for rows in found if rows}

    def head(self, row_id: int) -> bytes | None:
        """The sealed head of a record."""
        with self.read_lock:
            found = self._reader.execute("SELECT head FROM heads WHERE id = ?", (row_id,)).fetchone()
        if found is not None and not isinstance(found[0], bytes):
            raise sqlite3.DatabaseError("a head in the index is malformed")
        return None if found is None else found[0]

    def is_judged(self, tag: str) -> bool:
        """Whether a secret has looked at all records of other secrets that are there."""
        with self.read_lock:
            return self._reader.execute("SELECT 1 FROM meta WHERE key = ?", (f"judged {tag}",)).fetchone() is not None

    def every_row(self) -> Iterator[Row]:
        """All rows, in pages, so that no lock is held while the caller works."""
        last = 0
        while True:
            query = f"SELECT {_COLUMNS} FROM records WHERE id > ? ORDER BY id LIMIT 1000"
            with self.read_lock:
                page = [_row(r) for r in self._reader.execute(query, (last,))]
            yield from page
            if not page:
                return
            last = page[-1].id

    def totals(self) -> tuple[int, int]:
        """Records, and the bytes that their files occupy."""
        with self.read_lock:
            meta = _meta(self._reader)
        return meta["entries"], meta["bytes"]

    def num_bytes(self) -> int:
        """Bytes of the index's own files."""
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                total += os.stat(f"{self.path}{suffix}").st_size
        return total

    def _alive(self, cursor: sqlite3.Cursor) -> list[Row]:
        return [row for row in (_row(r) for r in cursor) if row.file not in self._doomed]

    def _used_ns(self, row: Row) -> int:
        touched = self._touched.get(row.record_id)
        return row.used_ns if touched is None else max(row.used_ns, touched[0])

    # --- noting ----------------------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """The time, larger at every call."""
        with self.note_lock:
            self._last_ns = max(time.time_ns(), self._last_ns + 1)
            return self._last_ns

    def touch(self, record_ids: Sequence[bytes]) -> None:
        """Notes a use; the last one given is the most recent."""
        for record_id in record_ids:
            now = self.now_ns()
            with self.note_lock:
                self._touched[record_id] = (now, self._touched.get(record_id, (0, 0))[1] + 1)

    def doom(self, file: str) -> None:
        """Notes that the row of a file is to go. It is not listed any more."""
        with self.note_lock:
            self._doomed[file] = None

    @property
    def num_noted(self) -> int:
        """Notes that wait for a transaction."""
        return len(self._touched) + len(self._doomed)

    # --- writing ---------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, *, wait: bool = True) -> Iterator[Writing]:
        """A transaction. It begins with what was noted, and is rolled back when the block raises.

        Raises `sqlite3.OperationalError` "database is locked" after `BUSY_S`, without `wait` at once.
        """
        if not self.write_lock.acquire(blocking=wait):  # held by a thread that may wait for another process
            raise sqlite3.OperationalError("database is locked by another thread")
        try:
            self._writer.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000) if wait else 0}")
            self._writer.execute("BEGIN IMMEDIATE")
            touched, doomed = self._take_notes()
            try:
                writing = Writing(self._writer)
                writing.apply(touched, list(doomed))
                yield writing
                self._writer.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                with self.note_lock:
                    self._touched = touched | self._touched
                raise
            finally:
                with self.note_lock:
                    for file in doomed:  # until here, so that readers do not list them again
                        self._doomed.pop(file, None)
        finally:
            self.write_lock.release()

    def shrink(self) -> None:
        """Gives pages of removed rows back to the file system, as far as no other process reads them."""
        with self.write_lock, suppress(sqlite3.OperationalError):
            self._writer.executescript("PRAGMA incremental_vacuum")  # `execute` would free a single page
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Closes the connections; the last process to close writes the log back."""
        with self.write_lock, self.read_lock:
            self._reader.close()
            self._writer.close()

    def abandon(self) -> None:
        """After a fork: the connections belong to the parent, and even closing them here could harm it."""
        for connection in (self._reader, self._writer):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))

    def _take_notes(self) -> tuple[dict[bytes, tuple[int, int]], dict[str, None]]:
        with self.note_lock:
            touched, self._touched = self._touched, {}
            return touched, dict(self._doomed)


class Writing:
    """What can be done within a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def apply(self, touched: dict[bytes, tuple[int, int]], doomed: Sequence[str]) -> None:
        """Writes what was noted."""
        if touched:
            query = "UPDATE records SET used_ns = max(used_ns, ?), hits = hits + ? WHERE record_id = ?"
            self._connection.executemany(query, [(now, hits, i) for i, (now, hits) in touched.items()])
        self.remove(doomed)

    def row(self, record_id: bytes) -> Row | None:
        """The row of a record."""
        rows = self._rows("WHERE record_id = ?", record_id)
        return rows[0] if rows else None

    def variants(self, content: bytes) -> list[Row]:
        """Records of one text, the least recently used first."""
        return self._rows("WHERE content = ? ORDER BY used_ns", content)

    def oldest(self, count: int) -> list[Row]:
        """The least recently used records."""
        return self._rows("ORDER BY used_ns LIMIT ?", count)

    def written_before(self, limit_ns: int) -> list[Row]:
        """Records that were written too long ago."""
        return self._rows("WHERE written_ns <= ?", limit_ns)

    def totals(self) -> tuple[int, int]:
        """See `DiskIndex.totals`."""
        meta = _meta(self._connection)
        return meta["entries"], meta["bytes"]

    def everything(self) -> list[Row]:
        """All records."""
        return self._rows("")

    def swept_ns(self) -> int:
        """When files without a row were last looked for."""
        return _meta(self._connection)["swept_ns"]

    def set_swept_ns(self, now_ns: int) -> None:
        """Notes that files without a row were looked for."""
        self._connection.execute("UPDATE meta SET value = ? WHERE key = 'swept_ns'", (now_ns,))

    def end_future(self, now_ns: int) -> None:
        """Records that a wrong clock dated ahead would be the last to go: they count as used and written now."""
        self._connection.execute("UPDATE records SET used_ns = ? WHERE used_ns > ?", (now_ns, now_ns))
        self._connection.execute("UPDATE records SET written_ns = ? WHERE written_ns > ?", (now_ns, now_ns))

    def set_judged(self, tag: str, *, anew: bool) -> None:
        """Notes that a secret has looked at the records of others; with `anew` other secrets are to look again."""
        if anew:
            self._connection.execute("DELETE FROM meta WHERE key LIKE 'judged %'")
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, 1)", (f"judged {tag}",))

    def foreign(self) -> list[tuple[Row, bytes]]:
        """Records of other secrets, and their heads."""
        query = "SELECT head FROM heads WHERE id = ?"
        rows = self._rows("WHERE truth = ?", FOREIGN)
        return [(row, head) for row in rows for (head,) in self._connection.execute(query, (row.id,))]

    def files(self) -> set[str]:
        """The files of all rows."""
        return {file for (file,) in self._connection.execute("SELECT file FROM records")}

    def add(self, row: Row, head: bytes, names: Sequence[bytes]) -> None:
        """Adds a record; `row.id` is chosen here."""
        query = f"INSERT INTO records({_COLUMNS}) VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        values = (row.record_id, row.content, row.truth, row.file, row.file_bytes, row.charged_bytes)
        cursor = self._connection.execute(query, (*values, row.written_ns, row.used_ns, row.hits, row.cost_s))
        self._connection.execute("INSERT INTO heads VALUES (?, ?)", (cursor.lastrowid, head))
        self._connection.executemany(
            "INSERT OR IGNORE INTO names VALUES (?, ?)", [(n, cursor.lastrowid) for n in names]
        )

    def remove(self, files: Sequence[str]) -> None:
        """Removes the rows of files."""
        if files:
            self._connection.executemany("DELETE FROM records WHERE file = ?", [(f,) for f in files])

    def _rows(self, where: str, *values: object) -> list[Row]:
        return [_row(r) for r in self._connection.execute(f"SELECT {_COLUMNS} FROM records {where}", values)]


@contextmanager
def exclusive(path: Path, timeout_s: float = 10.0) -> Iterator[None]:
    """Holds the lock file `path`; the kernel frees it when the process dies. Raises `OSError` after the timeout."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield
        fcntl.flock(fd, fcntl.LOCK_UN)  # said explicitly: a child forked meanwhile holds the file open too
    finally:
        os.close(fd)


def remove_index(path: Path) -> None:
    """Throws an index away. Processes that have it open notice by `is_current`."""
    for suffix in ("", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")


def _create_private(path: Path) -> None:
    """Makes an empty file before SQLite does, which would let others read it.

    An existing one is not even opened: closing it would drop the locks that other connections of this process hold.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}").fetchall()
        connection.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection) -> bool:
    """Makes the tables if the file is empty; returns whether it was. Raises `sqlite3.DatabaseError` for another's."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if version == INDEX_VERSION and {"records", "heads", "names", "meta"} <= tables:
        return False
    if version or tables:
        raise sqlite3.DatabaseError(f"the index has version {version}; this release reads {INDEX_VERSION}")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL").fetchall()
    connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {INDEX_VERSION}; COMMIT;")
    return True


def _qualified() -> str:
    return ", ".join(f"r.{column}" for column in _COLUMNS.split(", "))
