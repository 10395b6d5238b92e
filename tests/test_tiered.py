"""Several tiers as one: what is served from where, what is promoted, and that nothing deleted comes back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvboost.store import Lease, MemoryTier, Tier, TieredStore, TierStats
from kvboost.store.writing import Encode
from kvboost.types import ChunkHeader, ChunkKV, Lineage, PackedKV
from test_store import holds, record

WAIT_S = 20.0
PLENTY = 1 << 24


def memory(name: str, limit: int = PLENTY) -> MemoryTier:
    tier = MemoryTier(limit, max_variants=3)
    tier.name = name
    return tier


def record_id(number: int) -> bytes:
    return record(number).header.record_id


def fill_of(store: Tier, number: int) -> float | None:
    with store.get_many([record_id(number)]) as lease:
        found = lease.records.get(record_id(number))
        return None if found is None else float(found.payload[0].named()["keys"].max())


def served_by(store: Tier, *numbers: int) -> dict[int, str]:
    with store.get_many([record_id(n) for n in numbers]) as lease:
        return {int(lease.records[i].header.tokens[0]): tier for i, tier in lease.tiers.items()}


def packed(chunk: ChunkKV) -> ChunkKV:
    """A smaller form of a record, as a codec would make it: half the bytes, and less true."""
    header = replace(chunk.header, codec="int8", lineage=Lineage.LOSSY)
    return ChunkKV(header, tuple(PackedKV({"keys": g.named()["keys"].to(torch.float16)}) for g in chunk.payload))


class Stalling:
    """A tier whose writes, or reads, wait at a gate."""

    def __init__(self, inner: MemoryTier, method: str) -> None:
        self._inner = inner
        self._method = method
        self.name = inner.name
        self.gate, self.began = threading.Event(), threading.Event()

    def __getattr__(self, method: str):
        call = getattr(self._inner, method)
        return call if method != self._method else lambda *args: self._wait(call(*args))

    def _wait(self, answer):
        self.began.set()
        assert self.gate.wait(WAIT_S)
        return answer


class Failing:
    """A tier that breaks its promise: every call raises."""

    name = "failing"

    def find(self, names: Sequence[bytes]) -> dict[bytes, list[ChunkHeader]]:
        raise OSError("gone")

    get_many = put_many = delete = stats = find


def test_tiers_need_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="names of their own"):
        TieredStore([memory("a"), memory("a")])
    with pytest.raises(ValueError, match="needs tiers"):
        TieredStore([])


def test_a_put_is_in_memory_at_once_and_below_after_a_flush() -> None:
    first, second = memory("first"), memory("second")
    store = TieredStore([first, second])
    assert store.put_many([record(1), record(2)]) == 16
    assert holds(first, 1)
    assert store.flush(WAIT_S)
    assert holds(second, 1)
    assert holds(second, 2)
    assert store.close(WAIT_S)


def test_a_miss_in_memory_is_served_from_below_promoted_and_told_apart() -> None:
    first, second = memory("first"), memory("second")
    first.put_many([record(1, fill=1.0)])
    second.put_many([record(1, fill=1.0), record(2, fill=2.0)])
    store = TieredStore([first, second])
    assert served_by(store, 1, 2, 3) == {1: "first", 2: "second"}
    assert served_by(store, 1, 2) == {1: "first", 2: "first"}
    assert fill_of(store, 2) == 2.0


def test_a_lease_holds_its_records_although_memory_does_not_take_them() -> None:
    tiny, second = memory("first", limit=10), memory("second")
    second.put_many([record(1, fill=1.0)])
    store = TieredStore([tiny, second])
    with store.get_many([record_id(1)]) as lease:
        store.delete()
        assert float(lease.records[record_id(1)].payload[0].keys.max()) == 1.0
    assert tiny.stats().entries == 0
    assert second.stats().pinned_entries == 0, "the lower tier's lease is closed too"


def test_a_record_is_listed_once_and_the_fastest_tiers_header_counts() -> None:
    first, second = memory("first"), memory("second")
    near, far = record(1), record(1)
    first.put_many([near])
    second.put_many([far, record(2, content=1)])
    store = TieredStore([first, second])
    name = near.header.key.content_hash
    found = store.find([name, b"unknown"])
    assert list(found) == [name]
    assert [h.record_id for h in found[name]] == [record_id(1), record_id(2)]
    assert found[name][0] is near.header


def test_a_truer_record_below_wins_and_replaces_the_one_in_memory() -> None:
    first, second = memory("first"), memory("second")
    first.put_many([record(1, lineage=Lineage.APPROXIMATE, fill=1.0)])
    second.put_many([record(1, fill=2.0)])
    store = TieredStore([first, second])
    name = record(1).header.key.content_hash
    assert store.find([name])[name][0].lineage is Lineage.BIT_EXACT
    assert fill_of(store, 1) == 2.0, "what find promised"
    assert served_by(store, 1) == {1: "first"}, "promoted"
    assert store.find([name])[name][0].lineage is Lineage.BIT_EXACT


def test_a_truer_record_that_is_gone_by_now_leaves_the_one_in_memory() -> None:
    first, second = memory("first"), memory("second")
    first.put_many([record(1, lineage=Lineage.APPROXIMATE, fill=1.0)])
    second.put_many([record(1, fill=2.0)])
    store = TieredStore([first, second])
    store.find(record(1).header.names())
    second.delete()
    assert fill_of(store, 1) == 1.0


def test_behind_the_answer_records_are_encoded_in_memory_and_below() -> None:
    first, second = memory("first"), memory("second")
    store = TieredStore([first, second])
    whole = first.stats().bytes_used
    store.put_many([record(1, fill=1.0)], packed)
    assert store.flush(WAIT_S)
    for tier in (first, second):
        with tier.get_many([record_id(1)]) as lease:
            assert lease.records[record_id(1)].header.codec == "int8"
        assert tier.stats().bytes_used == packed(record(1)).num_bytes
    first.check_integrity()
    assert whole == 0


def test_compaction_waits_for_leases_and_spares_what_was_replaced() -> None:
    tier, chunk = memory("first"), record(1, lineage=Lineage.APPROXIMATE)
    tier.put_many([chunk])
    with tier.get_many([record_id(1)]) as lease:
        assert tier.compact(packed(chunk), chunk)
        assert lease.records[record_id(1)] is chunk
        assert tier.stats().bytes_used == chunk.num_bytes
    assert tier.stats().bytes_used == packed(chunk).num_bytes
    tier.put_many([record(1, fill=3.0)])
    assert not tier.compact(packed(chunk), chunk), "a truer record has replaced the original"
    assert fill_of(tier, 1) == 3.0
    assert not tier.compact(packed(record(2))), "gone"
    tier.check_integrity()


def test_a_leased_record_that_is_compacted_and_deleted_is_gone() -> None:
    tier, chunk = memory("first"), record(1)
    tier.put_many([chunk])
    with tier.get_many([record_id(1)]):
        tier.compact(packed(chunk), chunk)
        tier.delete()
    assert not holds(tier, 1)
    tier.check_integrity()


def test_a_failing_encoder_costs_the_copy_below_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail(chunk: ChunkKV) -> ChunkKV:
        raise RuntimeError("cannot")

    first, second = memory("first"), memory("second")
    store = TieredStore([first, second])
    store.put_many([record(1)], fail)
    store.put_many([record(2)])
    assert store.flush(WAIT_S)
    assert [holds(first, 1), holds(second, 1), holds(second, 2)] == [True, False, True]
    assert store.stats().errors == {"encode_failed": 1}
    assert "cannot" in caplog.text


def test_the_queue_counts_as_memory_but_nothing_counts_twice() -> None:
    stalling = Stalling(memory("second"), "put_many")
    first = memory("first")
    store = TieredStore([first, stalling])
    store.put_many([record(1), record(2)])
    assert stalling.began.wait(WAIT_S)
    assert store.pending_bytes == 2 * record(1).num_bytes
    assert store.stats().pending_bytes == 0, "memory holds both"
    first.delete([record_id(1)])
    assert store.stats().pending_bytes == record(1).num_bytes
    stalling.gate.set()
    assert store.flush(WAIT_S)
    assert store.stats().pending_bytes == 0


def test_a_full_queue_costs_the_copy_below_and_is_counted() -> None:
    stalling = Stalling(memory("second"), "put_many")
    store = TieredStore([memory("first"), stalling], queue_bytes=record(0).num_bytes)
    assert store.put_many([record(1)]) == 8
    assert stalling.began.wait(WAIT_S)
    assert store.put_many([record(2)]) == 8
    assert store.stats().errors == {"queue_full": 1}
    stalling.gate.set()
    assert store.flush(WAIT_S)
    assert holds(store, 2)


@pytest.mark.parametrize("ids", [[record_id(1), record_id(2)], None])
def test_what_was_queued_before_a_delete_does_not_come_back(ids: list[bytes] | None) -> None:
    stalling = Stalling(memory("second"), "put_many")
    store = TieredStore([memory("first"), stalling])
    store.put_many([record(1)])
    assert stalling.began.wait(WAIT_S)
    store.put_many([record(2), record(3)])
    deleting = threading.Thread(target=lambda: store.delete(ids))
    deleting.start()
    deleting.join(0.05)
    assert deleting.is_alive(), "it waits for the write that is under way"
    stalling.gate.set()
    deleting.join(WAIT_S)
    assert store.flush(WAIT_S)
    assert [holds(store, n) for n in (1, 2, 3)] == [False, False, ids is not None]


def test_a_promotion_that_was_under_way_does_not_bring_a_deleted_record_back() -> None:
    stalling = Stalling(memory("second"), "get_many")
    first = memory("first")
    store = TieredStore([first, stalling])
    stalling.put_many([record(1)])
    reading = threading.Thread(target=lambda: store.get_many([record_id(1)]).__exit__(None, None, None))
    reading.start()
    assert stalling.began.wait(WAIT_S)
    store.delete([record_id(1)])
    stalling.gate.set()
    reading.join(WAIT_S)
    assert not holds(first, 1)


def test_a_tier_that_raises_is_a_miss_for_all_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    store = TieredStore([memory("first"), Failing(), memory("third")])  # type: ignore[list-item]
    assert store.put_many([record(1)]) == 8
    assert store.flush(WAIT_S)
    store.tiers[0].delete()
    assert served_by(store, 1) == {1: "third"}
    assert store.find(record(1).header.names())
    assert store.delete() == 1
    assert store.stats().errors == {"raised": 4}
    assert "gone" in caplog.text


def test_stats_are_those_of_memory_and_each_tiers_own() -> None:
    first, second = memory("first"), memory("second")
    store = TieredStore([first, second])
    store.put_many([record(1)])
    assert store.flush(WAIT_S)
    assert isinstance(store.stats(), TierStats)
    assert (store.stats().name, store.stats().entries) == ("first", 1)
    assert store.stats_by_tier() == {"first": first.stats(), "second": second.stats()}


def test_of_a_single_tier_nothing_is_queued_without_an_encoder() -> None:
    store = TieredStore([memory("first")])
    store.put_many([record(1)])
    assert store.pending_bytes == 0
    store.put_many([record(2)], packed)
    assert store.flush(WAIT_S)
    with store.get_many([record_id(2)]) as lease:
        assert lease.records[record_id(2)].header.codec == "int8"


NUMBERS = st.integers(0, 5)


class AnyOrderOfCalls(RuleBasedStateMachine):
    """The fill of a record tells its number and lineage, so another record's rows, or older ones, are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = memory("first", limit=4 * record(0).num_bytes), memory("second")
        self.store = TieredStore([self.first, self.second], queue_bytes=6 * record(0).num_bytes)
        self.alive: set[int] = set()  # put since they were last deleted
        self.leases: list[Lease] = []

    @rule(number=NUMBERS, lineage=st.sampled_from(Lineage), encode=st.sampled_from([None, packed]))
    def put(self, number: int, lineage: Lineage, encode: Encode | None) -> None:
        self.store.put_many([record(number, lineage=lineage, fill=10.0 * number + lineage)], encode)
        self.alive.add(number)

    @rule(number=NUMBERS, keep=st.booleans())
    def get(self, number: int, keep: bool) -> None:
        lease = self.store.get_many([record_id(number)])
        for found in lease.records.values():
            value = int(found.payload[0].named()["keys"].max())
            assert number in self.alive
            assert int(found.header.tokens[0]) == number == value // 10
            assert found.header.codec != "none" or value % 10 == found.header.lineage
        self.leases.append(lease)
        if not keep:
            self.release()

    @rule()
    def release(self) -> None:
        if self.leases:
            self.leases.pop().__exit__(None, None, None)

    @rule(number=NUMBERS)
    def find(self, number: int) -> None:
        for headers in self.store.find(record(number).header.names()).values():
            assert {h.record_id for h in headers} <= {record_id(n) for n in self.alive}

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        self.store.delete([record_id(number)])
        self.alive.discard(number)

    @rule()
    def delete_all(self) -> None:
        self.store.delete()
        self.alive.clear()

    @rule(number=NUMBERS)
    def lose_below(self, number: int) -> None:
        assert self.store.flush(WAIT_S)
        self.second.delete([record_id(number)])

    @invariant()
    def the_books_agree(self) -> None:
        self.first.check_integrity()
        assert max(self.store.stats().pending_bytes, self.store.pending_bytes) <= 6 * record(0).num_bytes

    def teardown(self) -> None:
        while self.leases:
            self.release()
        assert self.store.close(WAIT_S)
        self.first.check_integrity()
        self.second.check_integrity()
        assert self.store.pending_bytes == 0


class TestAnyOrderOfCalls(AnyOrderOfCalls.TestCase):
    settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
