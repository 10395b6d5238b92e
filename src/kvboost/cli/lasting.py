"""Opens a cache that outlives processes, for tools: a directory or a Redis server."""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost.cli.console import note
from kvboost.config import resolve
from kvboost.errors import InputError, KVBoostError

if TYPE_CHECKING:
    from kvboost.store.records import Seal
    from kvboost.store.tier import LastingTier, StoredRecord

UNLIMITED_BYTES = 1 << 62  # tools evict nothing; the next engine keeps its own limit


@dataclass(frozen=True, slots=True)
class Survey:
    """Sums over records; `groups` by kind, lineage and codec."""

    tokens: int
    hits: int
    unreadable: int
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, records: Iterable[StoredRecord]) -> Survey:
        """One pass over all records."""
        counts: Counter[tuple[str, ...]] = Counter()
        tokens: Counter[tuple[str, ...]] = Counter()
        sizes: Counter[tuple[str, ...]] = Counter()
        hits = unreadable = 0
        for record in records:
            if record.header is None:
                unreadable += 1
                continue
            entry = described(record)
            group = (entry["kind"], entry["lineage"], entry["codec"])
            counts[group] += 1
            tokens[group] += entry["tokens"]
            sizes[group] += record.num_bytes
            hits += record.hits
        groups = [
            {"kind": g[0], "lineage": g[1], "codec": g[2], "records": n, "tokens": tokens[g], "bytes": sizes[g]}
            for g, n in counts.most_common()
        ]
        return cls(tokens.total(), hits, unreadable, groups)


def described(record: StoredRecord) -> dict[str, Any]:
    """What may be told of a readable record: nothing of its text."""
    header = record.header
    if header is None:
        raise KVBoostError("a damaged record cannot be described")
    return {
        "position": header.position,
        "tokens": len(header.tokens),
        "kind": "own" if header.source is None else "link",
        "lineage": header.lineage.name.lower(),
        "codec": header.codec,
        "bytes": record.num_bytes,
        "hits": record.hits,
        "used": _time_text(record.used_at_s),
    }


def _time_text(unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(unix_s).isoformat(" ", "seconds") if unix_s else "-"
    except (ValueError, OverflowError, OSError):  # a server that others write to can tell any number
        return "?"


def secret_seal(*, encrypt: bool = False) -> Seal:
    """The seal of the secret in force."""
    from kvboost.store.records import Seal

    return Seal(resolve().settings.hash_secret.get_secret_value(), encrypt=encrypt)


@contextmanager
def open_store(
    where: str, prefix: str | None = None, *, create: bool = False, encrypt: bool = False
) -> Iterator[LastingTier]:
    """The cache at a directory or a `redis://` URL, closed afterwards; what went wrong is told at the end.

    Raises `InputError` if there is none, unless `create`, and `KVBoostError` if it cannot be used.
    """
    logging.getLogger("kvboost").setLevel(logging.CRITICAL)  # the commands say it themselves
    store = _open(where, prefix, create, secret_seal(encrypt=encrypt))
    try:
        if store.stats().errors and not store.stats().entries:
            silent = "; does a server listen there?" if "unreachable" in store.stats().errors else ""
            raise KVBoostError(f"the cache cannot be used ({_troubles(store)}){silent}")
        yield store
        if store.stats().errors:
            note(f"trouble: {_troubles(store)}")
    finally:
        store.close()


def _open(where: str, prefix: str | None, create: bool, seal: Seal) -> LastingTier:
    if "://" in where:
        return _open_redis(where, prefix, seal)
    if prefix is not None:
        raise InputError("--prefix is for Redis; a directory has none")
    from kvboost.store.disk import FOLDER, DiskTier

    if not create and not os.path.exists(Path(where) / FOLDER):
        raise InputError(f"there is no cache of this release in {where!r}: it has no folder {FOLDER}")
    return DiskTier(where, UNLIMITED_BYTES, seal)


def _open_redis(url: str, prefix: str | None, seal: Seal) -> LastingTier:
    try:
        module = importlib.import_module("kvboost.store.redis")
    except ImportError as error:
        raise InputError(f"Redis needs the package redis: pip install '.[redis]' in the checkout ({error})") from None
    options = {} if prefix is None else {"prefix": prefix}
    tier: LastingTier = module.RedisTier(url, seal, **options)
    return tier


def _troubles(store: LastingTier) -> str:
    return ", ".join(f"{kind}: {count}" for kind, count in sorted(store.stats().errors.items()))
