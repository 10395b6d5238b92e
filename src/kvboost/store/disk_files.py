"""Record files of the disk tier: one per record, written under another name and renamed, never changed afterwards.

    records/3f/3f09...-8c41d2e7.kv       published
    records/3f/3f09...-8c41d2e7.kv.tmp   being written, or left by a process that was killed

Files are read, not mapped: a file that is cut while it is mapped, or a disk error, would kill the process (SIGBUS).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from kvboost.errors import DamagedRecord
from kvboost.store.records import head_length

FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
BLOCK_BYTES = 4096  # that file systems hand out

_NAME = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32}-[0-9a-f]{8}\.kv")
_TEMPORARY = ".tmp"
_PREFIX_BYTES = 64
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe in the place of a file is not waited for


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file below `records/`: published, or temporary. `name` is relative to it."""

    name: str
    num_bytes: int
    written_s: float  # Unix time

    @property
    def published(self) -> bool:
        """False while it is being written, and when the writer died."""
        return _NAME.fullmatch(self.name) is not None


class RecordFiles:
    """The folder of record files. Every method may raise `OSError`; there is no state but the folder's path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def new_name(record_id: bytes) -> str:
        """A name that no other writer takes, also for the same record; it tells nothing about the content."""
        digest = blake3(record_id).hexdigest(16)
        return f"{digest[:2]}/{digest}-{secrets.token_hex(4)}.kv"

    def write(self, name: str, data: bytes) -> None:
        """Writes a file that nobody sees before `publish`."""
        path = self._path(name, _TEMPORARY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, FILE_MODE)
        except FileNotFoundError:
            make_private(Path(path).parent)
            fd = os.open(path, flags, FILE_MODE)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(fd)

    def publish(self, name: str) -> None:
        """Gives a written file its name."""
        os.rename(self._path(name, _TEMPORARY), self._path(name))

    def remove(self, name: str) -> None:
        """Removes a file, published or not; no error if it is gone. Who has opened it can still read it."""
        if not _NAME.fullmatch(name.removesuffix(_TEMPORARY)):
            return
        for suffix in ("", _TEMPORARY):
            with suppress(FileNotFoundError):
                os.unlink(self._path(name.removesuffix(_TEMPORARY), suffix))

    def read(self, name: str, num_bytes: int) -> memoryview:
        """A file's bytes in memory of their own, writable. Raises `DamagedRecord` if it has another length."""
        fd = os.open(self._path(name), _READ)
        try:
            return _read(fd, num_bytes)
        finally:
            os.close(fd)

    def read_head(self, name: str) -> memoryview:
        """The head of a record, for `unpack_header`. Raises `DamagedRecord`."""
        fd = os.open(self._path(name), _READ)
        try:
            length = head_length(os.pread(fd, _PREFIX_BYTES, 0))
            head = os.pread(fd, length, 0)
        finally:
            os.close(fd)
        if len(head) < length:
            raise DamagedRecord(f"file {name} is cut: {len(head)} bytes, its head alone has {length}")
        return memoryview(head)

    def listed(self) -> Iterator[ListedFile]:
        """Every file, the newest state that the file system shows."""
        for shard in _entries(self.folder):
            if shard.is_dir(follow_symlinks=False):
                for entry in _entries(Path(shard.path)):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield ListedFile(f"{shard.name}/{entry.name}", status.st_size, status.st_mtime)

    def _path(self, name: str, suffix: str = "") -> str:
        """Refuses names that lead elsewhere: an index could have been tampered with."""
        if not _NAME.fullmatch(name):
            raise DamagedRecord(f"{name!r} is no name of a record file")
        return f"{self.folder}/{name}{suffix}"


def make_private(folder: Path) -> None:
    """Makes a folder, and those above it, that only this user may enter.

    Raises `PermissionError` if it belongs to another user, who could read what is put there (root may use it), and if a
    link stands there: whoever set it chose a folder that may be used for something else.
    """
    if folder.is_symlink():
        raise PermissionError(errno.EPERM, "a link stands in the place of the cache's folder", str(folder))
    folder.mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
    status, user = folder.stat(), os.geteuid()
    if status.st_uid != user and user != 0:
        raise PermissionError(errno.EPERM, "the folder belongs to another user", str(folder))
    if status.st_uid == user and status.st_mode & 0o077:
        folder.chmod(DIRECTORY_MODE)


def occupied_bytes(num_bytes: int) -> int:
    """What a file of `num_bytes` takes from the file system."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _read(fd: int, num_bytes: int) -> memoryview:
    found = os.fstat(fd).st_size
    if found != num_bytes:
        raise DamagedRecord(f"the file has {found} bytes instead of {num_bytes}")
    buffer = np.empty(num_bytes, np.uint8).data.cast("B")
    at = 0
    while at < num_bytes:
        got = os.readv(fd, [buffer[at:]])
        if got == 0:
            raise DamagedRecord(f"the file ended after {at} of {num_bytes} bytes")
        at += got
    return buffer


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return list(entries)
    return []
