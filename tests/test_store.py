"""The contract that every store of chunks obeys, run over every implementation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.store import DiskTier, MemoryTier, Tier, TieredStore
from kvboost.store.disk import INDEX_BYTES
from kvboost.store.records import Seal
from kvboost.store.redis import RedisTier
from kvboost.types import ChunkKV, LayerKV, Lineage
from stored import header

MakeTier = Callable[[int], Tier]
prefixes = count()


def make_memory(limit: int) -> MemoryTier:
    return MemoryTier(limit, max_variants=3)


def make_slower(limit: int) -> Tier:
    """A second tier in memory; it stands for any slower one."""
    tier = MemoryTier(10 * limit, max_variants=3)
    tier.name = "slower"
    return tier


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
def make_redis(request: pytest.FixtureRequest) -> Iterator[MakeTier]:
    tiers: list[RedisTier] = []

    def make(limit: int) -> Tier:
        url = request.getfixturevalue("redis_server").url
        tiers.append(RedisTier(url, Seal("secret"), prefix=f"contract{next(prefixes)}", timeout_s=20.0, touch_s=0.0))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def make_memory_only() -> MakeTier:
    """A store whose leases pin, and that evicts by itself, at once, and by single bytes. On disk leases are copies and
    a file takes whole blocks (test_disk.py), Redis evicts by its own settings (test_redis.py), and what a tiered store
    evicts from its first tier is still in the second (test_tiered.py).
    """
    return make_memory


@pytest.fixture(params=["memory", "disk", "redis", "memory and memory", "memory and disk", "memory and redis"])
def make_tier(request: pytest.FixtureRequest) -> Iterator[MakeTier]:
    makers: dict[str, Callable[[], MakeTier]] = {
        "memory": lambda: make_memory,
        "disk": lambda: request.getfixturevalue("make_disk"),
        "redis": lambda: request.getfixturevalue("make_redis"),
    }
    if " and " not in request.param:
        yield makers[request.param]()
        return
    lower = request.param.removeprefix("memory and ")
    second = make_slower if lower == "memory" else makers[lower]()
    stores: list[TieredStore] = []

    def make(limit: int) -> Tier:
        stores.append(TieredStore([make_memory(limit), second(limit)]))
        return stores[-1]

    yield make
    for store in stores:
        store.close(20.0)


def record(
    number: int, *, content: int | None = None, size: int = 8, lineage: Lineage = Lineage.BIT_EXACT, fill: float = 0.0
) -> ChunkKV:
    """A record of `size` tokens whose identity is `number`; equal `content` means equal text."""
    payload = LayerKV(torch.full((2, 1, size, 4), fill), torch.zeros(2, 1, size, 4))
    return ChunkKV(header(number, content, size, lineage), (payload,))


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


def test_of_equally_valuable_records_the_least_recently_used_goes_first(make_memory_only: MakeTier) -> None:
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


def test_variants_of_one_text_are_bounded(make_memory_only: MakeTier) -> None:
    tier = make_memory_only(1 << 20)
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
    assert stats.bytes_used <= stats.bytes_limit or isinstance(tier, RedisTier)
    assert stats.pinned_entries == 0


# --- what only the store in memory does -------------------------------------------------------------------------------


def owned(number: int, namespace: bytes, **more: Any) -> ChunkKV:
    made = record(number, **more)
    return replace(made, header=replace(made.header, namespace=namespace))


def chained(*numbers: int) -> list[ChunkKV]:
    """Records of one history, the head first."""
    made, parent = [], b"root"
    for number in numbers:
        chunk = record(number)
        made.append(replace(chunk, header=replace(chunk.header, parent=parent)))
        parent = chunk.header.key.prefix_hash
    return made


def used(tier: MemoryTier, *records: ChunkKV) -> int:
    """Uses records as a request does; returns how many are there."""
    with tier.get_many([r.header.record_id for r in records]) as lease:
        return len(lease.records)


def test_records_that_are_used_survive_a_flood_of_records_that_are_not() -> None:
    tier = MemoryTier(10 * record(0).num_bytes)
    warm = [record(i) for i in range(5)]
    tier.put_many(warm)
    assert used(tier, *warm) == used(tier, *warm) == 5
    for number in range(100, 1100):
        tier.put_many([record(number)])
    assert used(tier, *warm) == 5
    tier.check_integrity()


def test_what_comes_back_again_enters_a_store_full_of_used_records() -> None:
    tier = MemoryTier(3 * record(0).num_bytes)
    old = [record(i) for i in range(3)]
    tier.put_many(old)
    assert used(tier, *old) == used(tier, *old) == 3
    assert tier.put_many([record(9)]) == 0
    assert tier.refused == {"importance_low": 1}
    assert [tier.put_many([record(9)]) for _ in range(2)][-1] == 8, "asked for as often as the others, and later"


def test_the_tail_of_a_used_history_goes_before_its_head_whatever_it_cost() -> None:
    tier = MemoryTier(4 * record(0).num_bytes)
    chain = chained(1, 2, 3, 4)
    chain[3] = replace(chain[3], header=replace(chain[3].header, cost_s=9.0))
    tier.put_many(chain)
    used(tier, *chain)
    for number in (20, 21):
        tier.put_many([record(number)])
        tier.put_many([record(number)])
    there = [used(tier, r) for r in chain]
    assert there == sorted(there, reverse=True)
    assert sum(there) < 4


def test_a_namespace_keeps_within_its_quota_and_out_of_the_others() -> None:
    size = record(0).num_bytes
    tier = MemoryTier(10 * size, namespace_bytes=5 * size)
    ours = [owned(i, b"ours") for i in range(4)]
    tier.put_many(ours)
    for number in range(100, 140):
        tier.put_many([owned(number, b"theirs")])
        used(tier, owned(number, b"theirs"))
    assert used(tier, *ours) == 4
    assert tier.stats().entries == 4 + 5
    assert tier.stats().evictions.keys() <= {"quota"}
    tier.check_integrity()


def test_pinned_records_stay_and_count() -> None:
    size = record(0).num_bytes
    tier = MemoryTier(3 * size)
    tier.put_many([record(1), record(2)])
    pinned = [record(1).header.record_id, record(2).header.record_id]
    assert tier.pin([*pinned, b"unknown"]) == 2
    for number in range(10, 40):
        tier.put_many([record(number)])
        used(tier, record(number))
    assert used(tier, record(1), record(2)) == 2
    assert tier.stats().bytes_used == 3 * size
    assert tier.stats().pinned_entries == 2
    tier.unpin(pinned)
    for number in range(10, 40):
        for _ in range(3):
            tier.put_many([record(number), record(number + 100), record(number + 200)])
            used(tier, record(number), record(number + 100), record(number + 200))
    assert used(tier, record(1), record(2)) == 0
    tier.put_many([record(5)])
    tier.pin([record(5).header.record_id])
    tier.delete()
    assert tier.stats().entries == 0, "what is wrong goes, pinned or not"
    assert tier.stats().pinned_entries == 0


def test_a_pinned_record_that_is_replaced_by_a_truer_one_stays_pinned() -> None:
    tier = MemoryTier(1 << 20)
    tier.put_many([record(1, lineage=Lineage.APPROXIMATE)])
    tier.pin([record(1).header.record_id])
    tier.put_many([record(1)])
    assert tier.stats().pinned_entries == 1
    tier.check_integrity()


def test_shrinking_evicts_the_least_valuable_at_once() -> None:
    size = record(0).num_bytes
    tier = MemoryTier(6 * size)
    tier.put_many([record(i) for i in range(6)])
    used(tier, record(4), record(5))
    assert tier.shrink(2 * size) == 4 * size
    assert used(tier, record(4), record(5)) == 2
    assert tier.stats().evictions == {"oom": 4}
    assert tier.stats().bytes_limit == 2 * size
    assert tier.shrink(9 * size) == 0, "it never grows"
    tier.check_integrity()


def test_shrinking_waits_for_leases_and_leaves_pins() -> None:
    size = record(0).num_bytes
    tier = MemoryTier(4 * size)
    tier.put_many([record(i) for i in range(4)])
    tier.pin([record(0).header.record_id])
    with tier.get_many([record(1).header.record_id]) as lease:
        assert tier.shrink(0) == 2 * size
        assert lease.records
        assert tier.stats().bytes_limit == tier.stats().bytes_used == 2 * size
        tier.check_integrity()
    assert tier.stats().bytes_used == tier.stats().bytes_limit == size
    tier.unpin([record(0).header.record_id])
    tier.shrink(0)
    assert tier.stats().bytes_used == tier.stats().bytes_limit == 0
    tier.check_integrity()


def test_records_that_need_much_repair_go_first() -> None:
    tier = MemoryTier(3 * record(0).num_bytes)
    tier.put_many([record(1), record(2), record(3)])
    for _ in range(2):
        used(tier, record(2), record(1), record(3))
    tier.note_quality(record(1).header.record_id, 0.1)
    tier.note_quality(b"unknown", 0.1)
    tier.put_many([record(4)])
    tier.put_many([record(4)])
    assert [used(tier, record(i)) for i in (1, 2, 3, 4)] == [0, 1, 1, 1]


def test_a_refused_variant_costs_no_other_its_place() -> None:
    size = record(0).num_bytes
    tier = MemoryTier(3 * size, max_variants=1)
    tier.put_many([record(1, content=7)])
    used(tier, record(1))
    assert tier.put_many([record(2, content=7, size=500)]) == 0
    assert used(tier, record(1)) == 1


ACTIONS = ["put", "get", "delete", "lease", "release", "pin", "unpin", "shrink", "quality"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.integers(1, 40)), max_size=60),
    st.sampled_from([None, 6_000]),
)
def test_the_books_of_the_memory_agree_after_any_sequence_of_calls(
    calls: list[tuple[str, int, int]], quota: int | None
) -> None:
    tier = MemoryTier(12_000, max_variants=2, namespace_bytes=quota)
    leases = []
    for action, number, size in calls:
        chunk = owned(number, b"%d" % (number % 2), content=number % 3, size=size, lineage=Lineage(size % 3))
        record_id = chunk.header.record_id
        acts: dict[str, Callable[[], object]] = {
            "put": partial(tier.put_many, [chunk]),
            "get": partial(used, tier, chunk),
            "delete": partial(tier.delete, [record_id]),
            "lease": lambda i=record_id: leases.append(tier.get_many([i])),  # type: ignore[misc]
            "release": lambda: leases.pop().__exit__(None, None, None) if leases else None,
            "pin": partial(tier.pin, [record_id]),
            "unpin": partial(tier.unpin, [record_id]),
            "shrink": partial(tier.shrink, 12_000 - 200 * size),
            "quality": partial(tier.note_quality, record_id, number / 9),
        }
        acts[action]()
        tier.check_integrity()
    for lease in leases:
        lease.__exit__(None, None, None)
    tier.check_integrity()
