"""What the disk tier does before it serves: finds records that the index does not know, and files that nobody needs."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from kvboost.errors import DamagedRecord
from kvboost.store.disk_files import ListedFile, RecordFiles
from kvboost.store.disk_index import DiskIndex, Writing, row_of, truth_of
from kvboost.store.records import Seal, unpack_header
from kvboost.store.trouble import Trouble

logger = logging.getLogger(__name__)


def adopt(index: DiskIndex, files: RecordFiles, seal: Seal, trouble: Trouble) -> int:
    """Fills a new index from the record files; reads their heads only. Returns how many records it has now."""
    found = [f for f in files.listed() if f.published]
    if not found:
        return 0
    with index.writing() as writing:
        for file in sorted(found, key=lambda f: f.written_s):
            _adopt(writing, files, file, seal, trouble)
        entries = writing.totals()[0]
    logger.warning("disk tier: made a new index of %d records from %d files in %s", entries, len(found), files.folder)
    return entries


def _adopt(writing: Writing, files: RecordFiles, file: ListedFile, seal: Seal, trouble: Trouble) -> None:
    try:
        head = files.read_head(file.name)
        header = unpack_header(head, seal)
    except (DamagedRecord, OSError) as error:
        trouble.note("damaged", f"record file {file.name}: {error}")
        return
    known = writing.row(header.record_id)
    if known is not None and known.truth > truth_of(header):
        return
    if known is not None:
        writing.remove([known.file])
    row = row_of(header, file.name, file.num_bytes, int(file.written_s * 1e9))
    writing.add(row, bytes(head), header.names())


def sweep(index: DiskIndex, files: RecordFiles, grace_s: float) -> int:
    """Removes files without a row that are older than `grace_s`, once per `grace_s`. Returns how many.

    A younger one may be between its renaming and the commit of its row. A writer that was stopped for longer finds its
    file gone, or leaves a row without a file: a miss in either case.
    """
    now = index.now_ns()
    with index.writing() as writing:
        if 0 <= now - writing.swept_ns() < grace_s * 1e9:
            return 0
        writing.set_swept_ns(now)
        writing.end_future(now)
    old = [f.name for f in files.listed() if f.written_s < time.time() - grace_s]
    with index.writing() as writing:
        known = writing.files()
    orphans = [name for name in old if name not in known]
    for name in orphans:
        with suppress(OSError):
            files.remove(name)
    if orphans:
        logger.info("disk tier: removed %d files that a killed process left in %s", len(orphans), files.folder)
    return len(orphans)
