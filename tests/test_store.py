"""The contract that every store of chunks obeys, run over every implementation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.store import MemoryTier, Tier
from kvboost.store.disk import INDEX_BYTES, DiskTier
from kvboost.store.records import Seal
from kvboost.types import ChunkHeader, ChunkKey, ChunkKV, LayerKV, Lineage

MakeTier = Callable[[int], Tier]


def make_memory(limit: int) -> MemoryTier:
    return MemoryTier(limit, max_variants=3)


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[MakeTier]:
    tiers: list[DiskTier] = []

    def make(limit: int) -> Tier:
        tiers.append(DiskTier(tmp_path, limit + 2 * INDEX_BYTES, Seal("secret"), max_variants=3))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def make_memory_only() -> MakeTier:
    """A store whose leases pin, and whose budget counts single bytes. On disk leases are copies, so nothing is pinned,
    and a file takes whole blocks: what is evicted there, and when, is in test_disk.py.
    """
    return make_memory


@pytest.fixture(params=["memory", "disk"])
def make_tier(request: pytest.FixtureRequest) -> MakeTier:
    makers: dict[str, Callable[[], MakeTier]] = {
        "memory": lambda: make_memory,
        "disk": lambda: request.getfixturevalue("make_disk"),
    }
    return makers[request.param]()


def record(
    number: int, *, content: int | None = None, size: int = 8, lineage: Lineage = Lineage.BIT_EXACT, fill: float = 0.0
) -> ChunkKV:
    """A record of `size` tokens whose identity is `number`; equal `content` means equal text."""
    text = (number if content is None else content).to_bytes(4, "big")
    header = ChunkHeader(
        ChunkKey(b"content" + text, b"prefix" + number.to_bytes(4, "big")),
        b"parent" + number.to_bytes(4, "big"),
        40,
        np.full(size, number, np.int32),
        lineage,
        anchors={b"anchor" + text: 3},
    )
    return ChunkKV(header, (LayerKV(torch.full((2, 1, size, 4), fill), torch.zeros(2, 1, size, 4)),))


def holds(tier: Tier, number: int) -> bool:
    with tier.get_many([record(number).header.record_id]) as lease:
        return bool(lease.records)


def test_a_record_is_found_under_each_of_its_names_and_read_back_unchanged(make_tier: MakeTier) -> None:
    tier, chunk = make_tier(1 << 20), record(1, fill=0.5)
    assert tier.put_many([chunk]) == 8
    for name in chunk.header.names():
        assert [h.record_id for h in tier.find([name])[name]] == [chunk.header.record_id]
    with tier.get_many([chunk.header.record_id]) as lease:
        found = lease.records[chunk.header.record_id]
    assert torch.equal(found.payload[0].keys, chunk.payload[0].keys)
    assert np.array_equal(found.header.tokens, chunk.header.tokens)


def test_unknown_names_and_records_are_left_out(make_tier: MakeTier) -> None:
    tier = make_tier(1 << 20)
    assert tier.find([b"nothing"]) == {}
    with tier.get_many([b"nothing"]) as lease:
        assert lease.records == {}
    assert tier.delete([b"nothing"]) == 0


def test_the_least_recently_used_goes_first(make_memory_only: MakeTier) -> None:
    tier = make_memory_only(3 * record(0).num_bytes)
    for number in (1, 2, 3):
        tier.put_many([record(number)])
    assert holds(tier, 1)
    tier.put_many([record(4)])
    assert [holds(tier, i) for i in (1, 2, 3, 4)] == [True, False, True, True]
    assert tier.stats().evictions == {"importance_low": 1}


def test_of_one_history_the_tail_goes_before_the_head(make_memory_only: MakeTier) -> None:
    tier = make_memory_only(3 * record(0).num_bytes)
    chain = [record(1), record(2), record(3)]
    tier.put_many(chain)
    tier.put_many([record(4)])
    assert [holds(tier, i) for i in (1, 2, 3)] == [True, True, False]
    with tier.get_many([c.header.record_id for c in chain]):
        pass
    tier.put_many([record(5)])
    assert [holds(tier, i) for i in (1, 2, 4)] == [True, True, False]


def test_a_record_larger_than_the_budget_is_not_kept_and_evicts_nothing(make_memory_only: MakeTier) -> None:
    tier = make_memory_only(2 * record(0).num_bytes)
    tier.put_many([record(1)])
    assert tier.put_many([record(2, size=500)]) == 0
    assert holds(tier, 1)


def test_leased_records_are_not_evicted_and_the_budget_still_holds(make_memory_only: MakeTier) -> None:
    tier = make_memory_only(2 * record(0).num_bytes)
    tier.put_many([record(1), record(2)])
    with tier.get_many([record(1).header.record_id, record(2).header.record_id]):
        assert tier.put_many([record(3)]) == 0
        assert tier.stats().pinned_entries == 2
        assert tier.stats().bytes_used <= tier.stats().bytes_limit
    assert tier.put_many([record(3)]) == 8


def test_a_deleted_record_goes_when_its_lease_is_closed(make_tier: MakeTier) -> None:
    tier = make_tier(1 << 20)
    empty_bytes = tier.stats().bytes_used  # not 0 on disk: the index
    tier.put_many([record(1)])
    with tier.get_many([record(1).header.record_id]) as lease:
        assert tier.delete() == 1
        assert lease.records
        assert not holds(tier, 1), "nobody finds it any more"
        assert not any(tier.find(record(1).header.names()).values())
    assert not holds(tier, 1)
    assert tier.stats().bytes_used == empty_bytes


def test_a_truer_record_replaces_and_a_worse_one_does_not(make_tier: MakeTier) -> None:
    tier = make_tier(1 << 20)
    record_id = record(1).header.record_id
    for lineage, fill, expected in (
        (Lineage.APPROXIMATE, 1.0, 1.0),
        (Lineage.BIT_EXACT, 2.0, 2.0),
        (Lineage.APPROXIMATE, 3.0, 2.0),
        (Lineage.BIT_EXACT, 4.0, 2.0),
    ):
        tier.put_many([record(1, lineage=lineage, fill=fill)])
        with tier.get_many([record_id]) as lease:
            assert lease.records[record_id].payload[0].keys.max() == expected
    assert tier.stats().entries == 1


def test_variants_of_one_text_are_bounded(make_tier: MakeTier) -> None:
    tier = make_tier(1 << 20)
    for i in range(6):
        tier.put_many([record(i, content=7)])
    name = record(0, content=7).header.key.content_hash
    assert [h.record_id for h in tier.find([name])[name]] == [record(i).header.record_id for i in (5, 4, 3)]
    assert tier.stats().evictions == {"quota": 3}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "get", "delete", "lease", "release"]), st.integers(0, 9), st.integers(1, 40)),
        max_size=60,
    )
)
def test_the_books_agree_after_any_sequence_of_calls(calls: list[tuple[str, int, int]]) -> None:
    tier = MemoryTier(12_000, max_variants=2)
    leases = []
    for action, number, size in calls:
        chunk = record(number, content=number % 3, size=size, lineage=Lineage(size % 3))
        if action == "put":
            tier.put_many([chunk])
        elif action == "delete":
            tier.delete([chunk.header.record_id])
        elif action == "get":
            with tier.get_many([chunk.header.record_id]):
                pass
        elif action == "lease":
            leases.append(tier.get_many([chunk.header.record_id]))
        elif leases:
            leases.pop().__exit__(None, None, None)
        tier.check_integrity()
    for lease in leases:
        lease.__exit__(None, None, None)
    tier.check_integrity()
    assert tier.stats().pinned_entries == 0


def test_many_threads_leave_consistent_books(make_tier: MakeTier) -> None:
    tier = make_tier(8 * record(0).num_bytes)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for number in rng.integers(0, 30, 300).tolist():
                tier.put_many([record(number)])
                with tier.get_many([record(number).header.record_id]) as lease:
                    for found in lease.records.values():
                        assert found.header.tokens[0] == number
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    stats = tier.stats()
    assert stats.bytes_used <= stats.bytes_limit
    assert stats.pinned_entries == 0
