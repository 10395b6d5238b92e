"""Records for the tests of the disk tier, and what their child processes do."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvboost.store.disk import INDEX_BYTES, DiskTier
from kvboost.store.records import Seal
from kvboost.types import ChunkKV, LayerKV, Lineage
from stored import header

SECRET = "a secret"
LARGE = 1 << 30
ROWS = 8
NOBODY = 65534


def record(
    number: int, *, content: int | None = None, width: int = 16, lineage: Lineage = Lineage.BIT_EXACT, cost_s: float = 0
) -> ChunkKV:
    """A record whose bytes follow from `number` and its lineage; its payload has `256 * width` bytes."""
    keys = torch.full((2, 2, ROWS, width), number + int(lineage) / 4)
    return ChunkKV(header(number, content, ROWS, lineage, cost_s), (LayerKV(keys, -keys),))


def identity(number: int) -> bytes:
    return record(number).header.record_id


def is_right(found: ChunkKV) -> bool:
    """Whether a record's bytes are those of its number and lineage."""
    number = int(found.header.tokens[0])
    expected = record(number, width=found.payload[0].named()["keys"].shape[-1], lineage=found.header.lineage)
    pairs = zip(found.payload[0].named().values(), expected.payload[0].named().values(), strict=True)
    return found.header.record_id == identity(number) and all(torch.equal(a, b) for a, b in pairs)


def limit_for(count: int, width: int) -> int:
    """A limit that holds `count` records of a width, and the index."""
    return INDEX_BYTES + max(INDEX_BYTES, count * (256 * width + 8192))


def open_tier(directory: str | Path, limit: int = LARGE, **options: Any) -> DiskTier:
    return DiskTier(directory, limit, Seal(SECRET), **options)


# --- what children do; each reports over its connection -------------------------------------------------------------


def write_for_ever(report: Connection, directory: str, limit: int, first: int) -> None:
    """Writes records and tells each identity that was committed: some of its own, some that others write too."""
    tier = open_tier(directory, limit)
    rng = np.random.default_rng(first)
    number = first
    while True:
        shared = int(rng.integers(0, 20))
        batch = [record(number), record(shared, lineage=Lineage(int(rng.integers(0, 3))))]
        written = tier.put_many(batch)
        report.send((number, written, tier.stats().errors))
        with tier.get_many([identity(shared)]) as lease:
            if not all(map(is_right, lease.records.values())):
                report.send("wrong bytes")
        number += 1


def write_and_read(report: Connection, directory: str, first: int, count: int) -> None:
    """Writes some records and reads them back together with another process's."""
    tier = open_tier(directory)
    seen = 0
    for number in range(first, first + count):
        tier.put_many([record(number)])
        with tier.get_many([identity(n) for n in range(2 * count)]) as lease:
            seen = len(lease.records)
            if not all(map(is_right, lease.records.values())):
                report.send("wrong bytes")
                return
    tier.close()
    report.send((seen, dict(tier.stats().errors)))


def use_as(report: Connection, directory: str, uid: int, number: int) -> None:
    """Uses a directory as another user."""
    os.setgid(uid)
    os.setuid(uid)
    report.send(_use(open_tier(directory), number))


def use_with_small_files(report: Connection, directory: str, num_bytes: int) -> None:
    """Uses a directory while no file may grow beyond `num_bytes`: as if the disk were full for large ones."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    tier = open_tier(directory)
    large = tier.put_many([record(50, width=num_bytes // 128)])
    report.send((large, _use(tier, 51)))


def use_after_fork(report: Connection, directory: str) -> None:
    """Forks while the tier is open; both sides go on to write and read."""
    tier = open_tier(directory)
    tier.put_many([record(1)])
    child = os.fork()
    tier.put_many([record(3 if child else 2)])
    with tier.get_many([identity(1), identity(3 if child else 2)]) as lease:
        right = len(lease.records) == 2 and all(map(is_right, lease.records.values()))
    if not child:
        os._exit(0 if right and not tier.stats().errors else 1)
    status = os.waitpid(child, 0)[1]
    with tier.get_many([identity(2)]) as lease:
        report.send((status, right, len(lease.records), dict(tier.stats().errors)))


def _use(tier: DiskTier, number: int) -> dict[str, Any]:
    """What a caller gets from each method of the contract."""
    written = tier.put_many([record(number)])
    found = tier.find([record(number).header.key.content_hash])
    with tier.get_many([identity(number), identity(1)]) as lease:
        read = {int(r.header.tokens[0]) for r in lease.records.values() if is_right(r)}
    deleted = tier.delete([identity(number)])
    stats = asdict(tier.stats())
    list(tier.records())
    tier.close()
    return {"written": written, "found": len(found), "read": read, "deleted": deleted, **stats}


Child = Callable[..., None]
