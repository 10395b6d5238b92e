"""What the disk tier does before it serves: finds records that the index does not know, and files that nobody needs.

A file that another secret may have sealed is nobody's to judge but its owner's. It gets a row of its own, under no
name: it counts in the budget and is evicted like any other. When its owner opens the index, it is found again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvboost.errors import DamagedRecord, ForeignRecord
from kvboost.store.disk_files import ListedFile, RecordFiles
from kvboost.store.disk_index import DiskIndex, Row, Writing, foreign_row, row_of, truth_of
from kvboost.store.records import Buffer, Seal, unpack_header
from kvboost.store.trouble import Trouble

logger = logging.getLogger(__name__)


def adopt(index: DiskIndex, files: RecordFiles, seal: Seal, trouble: Trouble) -> int:
    """Fills a new index from the record files; reads their heads only. Returns how many records it has now."""
    found = [f for f in files.listed() if f.published]
    if not found:
        return 0
    with index.writing() as writing:
        for file in sorted(found, key=lambda f: f.written_s):
            _enter_sound(writing, _foreign(file), partial(files.read_head, file.name), seal, trouble)
        writing.set_judged(seal.tag, anew=True)
        entries, num_foreign = writing.totals()[0], len(writing.foreign())
    logger.warning(
        "disk tier: made a new index of %d records from %d files in %s; %d of them are of another secret",
        entries,
        len(found),
        files.folder,
        num_foreign,
    )
    return entries


def claim(index: DiskIndex, seal: Seal, trouble: Trouble) -> None:
    """Lists the records of this secret among those that another one could not judge; once, unless some are added."""
    if index.is_judged(seal.tag):
        return
    with index.writing() as writing:
        for row, head in writing.foreign():
            writing.remove([row.file])
            _enter_sound(writing, row, partial(bytes, head), seal, trouble)
        writing.set_judged(seal.tag, anew=False)


def _foreign(file: ListedFile) -> Row:
    return foreign_row(file.name, file.num_bytes, int(file.written_s * 1e9))


def _enter_sound(writing: Writing, foreign: Row, read_head: Callable[[], Buffer], seal: Seal, trouble: Trouble) -> None:
    """`_enter`, unless the head is damaged or cannot be read, which is counted."""
    try:
        _enter(writing, foreign, bytes(read_head()), seal)
    except (DamagedRecord, OSError) as error:
        trouble.note("damaged", f"record file {foreign.file}: {error}")


def _enter(writing: Writing, foreign: Row, head: bytes, seal: Seal) -> None:
    """Adds the row of a file with this head: its own if the seal opens it, else `foreign`. Raises `DamagedRecord`."""
    try:
        header = unpack_header(head, seal)
    except ForeignRecord:
        writing.add(foreign, head, ())
        return
    known = writing.row(header.record_id)
    if known is not None and known.truth > truth_of(header):
        return
    if known is not None:
        writing.remove([known.file])
    row = row_of(header, foreign.file, foreign.file_bytes, foreign.written_ns, foreign.hits)
    writing.add(replace(row, used_ns=foreign.used_ns), head, header.names())


def sweep(index: DiskIndex, files: RecordFiles, seal: Seal, grace_s: float) -> int:
    """Removes files without a row that are older than `grace_s`, once per `grace_s`. Returns how many.

    A younger one may be between its renaming and the commit of its row. A writer that was stopped for longer finds its
    file gone, or leaves a row without a file: a miss in either case. What another secret may have sealed stays.
    """
    now = index.now_ns()
    with index.writing() as writing:
        if 0 <= now - writing.swept_ns() < grace_s * 1e9:
            return 0
        writing.set_swept_ns(now)
        writing.end_future(now)
    old = [f for f in files.listed() if f.written_s < time.time() - grace_s]
    with index.writing() as writing:
        known = writing.files()
        orphans = [f for f in old if f.name not in known]
        kept = {f.name: head for f in orphans if (head := _foreign_head(files, f, seal)) is not None}
        for file in orphans:
            if file.name in kept:
                writing.add(_foreign(file), kept[file.name], ())
        if kept:
            writing.set_judged(seal.tag, anew=True)
    removed = [f.name for f in orphans if f.name not in kept]
    for name in removed:
        with suppress(OSError):
            files.remove(name)
    if removed:
        logger.info("disk tier: removed %d files that a killed process left in %s", len(removed), files.folder)
    return len(removed)


def _foreign_head(files: RecordFiles, file: ListedFile, seal: Seal) -> bytes | None:
    """The head of a file that another secret may have sealed; None for all others."""
    if not file.published:
        return None
    try:
        head = bytes(files.read_head(file.name))
        unpack_header(head, seal)
    except ForeignRecord:
        return head
    except (DamagedRecord, OSError):
        pass
    return None
