"""What a store of chunks must do. Five methods; every tier passes the same contract suite, `tests/test_store.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from kvboost.types import DECLARED, ChunkHeader, ChunkKV

MAX_LISTED = 64  # headers returned per name, the most recently used first


class Lease:
    """Records that stay in their tier, unchanged, until the lease is closed. A context manager.

    `tiers` tells by record id which tier served a record, where a store has several.
    """

    def __init__(
        self,
        records: Mapping[bytes, ChunkKV],
        release: Callable[[], None] = lambda: None,
        tiers: Mapping[bytes, str] | None = None,
    ) -> None:
        self.records = records
        self.tiers: Mapping[bytes, str] = tiers or {}
        self._release = release

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()


@dataclass(frozen=True, slots=True)
class TierStats:
    """Counters of one tier since it was made; `bytes_used` and `entries` are current."""

    name: str
    bytes_used: int
    bytes_limit: int  # 0: none of its own
    entries: int
    pinned_entries: int
    evictions: Mapping[str, int] = field(default_factory=dict)  # by reason
    errors: Mapping[str, int] = field(default_factory=dict)  # by kind; each was a miss, or a record not kept
    pending_bytes: int = 0  # waiting to be written to lower tiers, and held by no tier


class Tier(Protocol):
    """A byte-bounded store of chunk records. Thread-safe. A tier never raises for missing or damaged records."""

    name: str

    def find(self, names: Sequence[bytes]) -> dict[bytes, list[ChunkHeader]]:
        """Headers listed under each name, most recently used first, at most `MAX_LISTED`; unknown names are absent."""
        ...

    def get_many(self, record_ids: Sequence[bytes]) -> Lease:
        """The records that are still there, safe from eviction until the lease is closed. Marks them as used."""
        ...

    def put_many(self, records: Sequence[ChunkKV]) -> int:
        """Stores records and returns how many rows were written (a link has only those that were repaired).

        A record whose identity is known replaces the old one only if it is truer; the budget holds at every moment.
        """
        ...

    def delete(self, record_ids: Sequence[bytes] | None = None) -> int:
        """Forgets records, or all with `None`; returns how many. Leased records go when their lease is closed."""
        ...

    def stats(self) -> TierStats:
        """A consistent snapshot."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredRecord:
    """What a lasting tier knows of one record without reading its payload."""

    record_id: bytes
    header: ChunkHeader | None  # None: damaged
    num_bytes: int
    hits: int = 0
    used_at_s: float = 0.0  # Unix time of the last use, or of the writing


class LastingTier(Tier, Protocol):
    """A tier whose records outlive the process, as sealed bytes (`kvboost.store.records`) that tools may look into."""

    def records(self) -> Iterator[StoredRecord]:
        """Every record, damaged ones too, in no particular order."""
        ...

    def sealed(self, record_id: bytes) -> bytes | None:
        """A record's bytes as stored, unchecked and not counted as use; None if it is gone or cannot be read."""
        ...

    def close(self) -> None:
        """Writes what is pending. Afterwards every call is a miss."""
        ...


def is_truer(new: ChunkHeader, old: ChunkHeader) -> bool:
    """A better lineage wins; between equals, own rows over a link to another record's, then declared text."""

    def rank(header: ChunkHeader) -> tuple[int, bool, bool]:
        return header.lineage, header.source is None, header.session == DECLARED

    return rank(new) > rank(old)
