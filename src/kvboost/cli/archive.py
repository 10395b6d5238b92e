"""Records in one tar file, each sealed as it is stored: a cache on its way to another machine."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kvboost.cli.lasting import open_store, secret_seal
from kvboost.errors import DamagedRecord, InputError
from kvboost.store.records import Seal, is_encrypted, unpack
from kvboost.store.tier import LastingTier, StoredRecord

if TYPE_CHECKING:
    from kvboost.types import ChunkKV

MAX_RECORD_BYTES = 4 << 30
GONE = "the record is gone, or cannot be read"


def damage_of(store: LastingTier, record: StoredRecord) -> str | None:
    """What is wrong with a record; None if it is sound."""
    data = store.sealed(record.record_id)
    try:
        _opened(data, record, secret_seal())
    except DamagedRecord as error:
        return str(error)
    return None


def write_archive(path: Path, store: LastingTier) -> tuple[int, Counter[str]]:
    """Writes the sound records; returns how many, and the reasons for which others were left out.

    Nothing is left at `path` if it fails. Raises `InputError` if the file exists or cannot be written.
    """
    partial = ""
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "it exists already")
        number, partial = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".part", dir=path.parent)  # mode 0600
        with open(number, "wb") as file:
            counts = _write_records(file, store)
        os.rename(partial, path)
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            os.unlink(partial)
    return counts


def _write_records(file: IO[bytes], store: LastingTier) -> tuple[int, Counter[str]]:
    damaged: Counter[str] = Counter()
    written, seal = 0, secret_seal()
    with tarfile.open(fileobj=file, mode="w|") as archive:
        for record in store.records():
            data = store.sealed(record.record_id)
            try:
                _opened(data, record, seal)
            except DamagedRecord as error:
                damaged[str(error)] += 1
                continue
            _add(archive, f"{written:08}.kv", data or b"")
            written += 1
    return written, damaged


def read_archive(path: Path, where: str, prefix: str | None) -> tuple[int, int, Counter[str]]:
    """Puts the sound records of an archive into a cache: how many were read, how many are new, what was left out."""
    damaged: Counter[str] = Counter()
    read = new = 0
    seal = secret_seal()
    with ExitStack() as stack:
        stores: dict[bool, LastingTier] = {}
        for data in _members(path):
            try:
                record: ChunkKV = unpack(data, seal)
            except DamagedRecord as error:
                damaged[str(error)] += 1
                continue
            encrypt = is_encrypted(data)
            if encrypt not in stores:
                stores[encrypt] = stack.enter_context(open_store(where, prefix, create=True, encrypt=encrypt))
            before = stores[encrypt].stats().entries
            stores[encrypt].put_many([record])
            read += 1
            new += stores[encrypt].stats().entries > before
    return read, new, damaged


def _opened(data: bytes | None, record: StoredRecord, seal: Seal) -> ChunkKV:
    """Raises `DamagedRecord` for whatever is not a sound record in its own place."""
    if data is None:
        raise DamagedRecord(GONE)
    if record.header is None:
        raise DamagedRecord("the copy of its head that finds it is damaged or of another secret")
    found = unpack(data, seal)
    if found.header.record_id != record.record_id:
        raise DamagedRecord("another record stands in its place")
    return found


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(data), 0o600
    archive.addfile(member, io.BytesIO(data))


def _members(path: Path) -> Iterator[bytes]:
    """Each file in an archive. Raises `InputError` if it is none, ends too early, or holds what no record can be."""
    try:
        with tarfile.open(path, mode="r|") as archive:
            for member in archive:
                if not 0 <= member.size <= MAX_RECORD_BYTES or member.issparse():  # a few bytes that claim to be many
                    raise tarfile.ReadError(f"a member of {member.size} bytes is no record")
                if member.isfile():
                    file = archive.extractfile(member)
                    yield file.read() if file is not None else b""
    except (tarfile.TarError, EOFError, OSError, ValueError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InputError(f"cannot read the archive {str(path)!r}: {reason}") from None
