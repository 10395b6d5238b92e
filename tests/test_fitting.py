"""Records that are soundly sealed and still are not of the model's shape: never served, removed, computed again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import build
from kvboost import KVBoost, codec
from kvboost.codec import SLOTS, Codec, Turns, pack, read_rows
from kvboost.planning import still_served
from kvboost.rotary import NO_ROTATION, Slot
from kvboost.store.disk import DiskTier
from kvboost.store.records import Seal
from kvboost.types import ChunkHeader, ChunkKey, ChunkKV, Kind, LayerKV, Lineage, Link, PackedKV, Segment, Span
from scenario import engine, greedy, logits, plain_logits, prompt, relative_error

pytestmark = pytest.mark.smoke
BYTES = 1 << 28


def on_disk(directory: Path, **flags: Any) -> KVBoost:
    return engine(build("llama"), disk_directory=str(directory), disk_bytes=BYTES, **flags)


def changed(record: ChunkKV, change: Callable[[torch.Tensor], torch.Tensor]) -> ChunkKV:
    """The record with other tensors, in its own kind of groups."""
    groups = [{name: change(t).contiguous() for name, t in g.named().items()} for g in record.payload]
    payload = [
        PackedKV(tensors) if isinstance(g, PackedKV) else LayerKV(**tensors)
        for g, tensors in zip(record.payload, groups, strict=True)
    ]
    return ChunkKV(record.header, tuple(payload))


def packed_without(record: ChunkKV, name: str) -> ChunkKV:
    """The record packed, without one tensor."""
    tensors: list[dict[str, torch.Tensor]] = []
    for group in record.payload:
        assert isinstance(group, LayerKV)
        packed = pack(group, NO_ROTATION, record.header.position, "k8v4")
        tensors.append(dict(packed.tensors) if packed is not None else {})
        tensors[-1].pop(name, None)
    header = replace(record.header, codec="k8v4", lineage=Lineage.LOSSY)
    return ChunkKV(header, tuple(map(PackedKV, tensors)))


FORGERIES: dict[str, Callable[[ChunkKV], ChunkKV]] = {
    "no group": lambda r: ChunkKV(r.header, ()),
    "one group more": lambda r: ChunkKV(r.header, (*r.payload, *r.payload)),
    "other heads": lambda r: changed(r, lambda t: t.repeat(1, 3, 1, 1)),
    "fewer layers": lambda r: changed(r, lambda t: t[1:]),
    "other width": lambda r: changed(r, lambda t: t[..., :-2]),
    "another type": lambda r: changed(r, torch.Tensor.half),
    "a packed tensor is missing": lambda r: packed_without(r, "values.low"),
    "nothing is left of a packed record": lambda r: ChunkKV(
        replace(r.header, codec="int8", lineage=Lineage.LOSSY), tuple(PackedKV({}) for _ in r.payload)
    ),
}


def forge(directory: Path, change: Callable[[ChunkKV], ChunkKV], wanted: Callable[[ChunkKV], bool]) -> int:
    """Puts changed records into the places of those that are wanted, soundly sealed; returns how many."""
    tier = DiskTier(directory, BYTES, Seal())
    with tier.get_many([r.record_id for r in tier.records()]) as lease:
        honest = [r for r in lease.records.values() if wanted(r)]
    tier.delete([r.header.record_id for r in honest])
    for record in honest:
        assert tier.put_many([change(record)]) or not record.num_rows
    tier.close()
    return len(honest)


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_record_of_another_shape_costs_its_hit_once(
    tmp_path: Path, forgery: str, caplog: pytest.LogCaptureFixture
) -> None:
    with on_disk(tmp_path) as first:
        greedy(first.generate, prompt("0123"), 1)
    forged = forge(tmp_path, FORGERIES[forgery], lambda r: 40 <= r.header.position < 80)
    assert forged
    with on_disk(tmp_path) as kv:
        truth = plain_logits(kv.model, prompt("0123"))
        out = greedy(kv.generate, prompt("0123"))
        assert out.report.fallback is None
        assert 0 < out.report.exact_tokens < prompt().shape[1] - 1, "the rest of the cache is used"
        assert relative_error(logits(out.output), truth) <= 1e-2, "text behind what is lost counts as moved"
        assert kv.store.stats().errors["misfit"] == forged
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
        again = greedy(kv.generate, prompt("0123"))
        assert again.report.fresh_tokens + again.report.moved_tokens < out.report.fresh_tokens + out.report.moved_tokens
        assert kv.store.stats().errors["misfit"] == forged, "they were removed"


def test_a_link_to_other_text_than_its_own_is_not_followed(tmp_path: Path) -> None:
    with on_disk(tmp_path) as first:
        greedy(first.generate, prompt("0123"), 1)
        greedy(first.generate, prompt("3120"), 1)

    def astray(record: ChunkKV) -> ChunkKV:
        assert record.header.source is not None
        link = Link(record.header.source.record_id, record.header.source.offset + 1)
        return ChunkKV(replace(record.header, source=link), record.payload)

    forged = forge(tmp_path, astray, lambda r: r.header.source is not None)
    assert forged
    with on_disk(tmp_path) as kv:
        out = greedy(kv.generate, prompt("3120"))
        assert out.report.fallback is None
        assert 0 < kv.store.stats().errors["misfit"] <= forged
        assert out.report.continued_tokens < 20, "what stands behind them has rows of its own"


def test_a_packed_record_that_claims_to_be_exact_is_not_served(tmp_path: Path) -> None:
    with on_disk(tmp_path, codec="int8") as first:
        greedy(first.generate, prompt("0123"), 1)
        assert first.flush()
    lie = {"lineage": Lineage.BIT_EXACT}
    assert forge(tmp_path, lambda r: ChunkKV(replace(r.header, **lie), r.payload), lambda r: r.header.codec == "int8")
    with on_disk(tmp_path) as kv:
        assert greedy(kv.generate, prompt("0123"), fidelity="exact").report.exact_tokens < 60, "short chunks are plain"


def test_a_record_that_became_shorter_than_what_was_planned_is_not_served() -> None:
    header = ChunkHeader(ChunkKey(b"c", b"p"), b"q", 0, np.arange(8, dtype=np.int32), Lineage.BIT_EXACT)
    segment = Segment(Span(0, 6), Kind.EXACT, header.record_id, 2)
    assert still_served(segment, {header.record_id: header})
    assert not still_served(replace(segment, offset=3), {header.record_id: header})


def test_failures_of_the_cache_have_one_traceback_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    kv = engine(build("llama"))
    kv.store.find = lambda names: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    for _ in range(3):
        greedy(kv.generate, prompt("01"), 1)
    told = [r for r in caplog.records if r.getMessage().startswith("the cache failed")]
    assert len(told) == 3
    assert all("ZeroDivisionError: division by zero" in r.getMessage() for r in told)
    assert [bool(r.exc_info) for r in told] == [True, False, False]


# --- packed groups --------------------------------------------------------------------------------------------------


def shapes_of(group: LayerKV) -> dict[Slot, tuple[int, ...]]:
    return {"keys": tuple(group.keys.shape), "values": tuple(group.values.shape)}


def readable(packed: PackedKV, like: LayerKV) -> bool:
    """Whether every row of a packed group can be read, and fills its place."""
    num_rows = like.keys.shape[2]
    out = {slot: torch.full_like(t, torch.nan) for slot, t in like.named().items()}
    for slot in SLOTS:
        read_rows(packed, slot, 0, out[slot], Turns(NO_ROTATION), Span(0, num_rows))
    return not any(bool(t.isnan().any()) for t in out.values())


def mutations(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Each tensor gone, of another type, and one larger or smaller along each axis; and one tensor too many."""
    found = [{**tensors, "more": torch.zeros(1)}]
    for name, t in tensors.items():
        other = torch.int16 if t.dtype in (torch.int8, torch.uint8) else torch.float64
        found += [{n: o for n, o in tensors.items() if n != name}, {**tensors, name: t.to(other)}]
        for axis in range(t.dim()):
            less = t.narrow(axis, 0, t.shape[axis] - 1)
            found += [{**tensors, name: less}, {**tensors, name: torch.cat([t, t.narrow(axis, 0, 1)], axis)}]
    return found


@pytest.mark.parametrize("name", ["int8", "k8v4"])
@pytest.mark.parametrize("plain", [(), (1,), (0, 2)])
@pytest.mark.parametrize(("dims", "rows", "position"), [((16, 16), 9, 40), ((8, 7), 140, 2), ((24, 80), 300, 0)])
def test_what_is_packed_fits_and_what_fits_can_be_read(
    name: Codec, plain: tuple[int, ...], dims: tuple[int, int], rows: int, position: int
) -> None:
    group = LayerKV(*(torch.randn(3, 2, rows, d) for d in dims))
    packed = pack(group, NO_ROTATION, position, name, plain)
    assert packed is not None
    assert codec.is_of_shape(packed, shapes_of(group), torch.float32, name)
    assert not codec.is_of_shape(packed, shapes_of(group), torch.bfloat16, name) or not (plain or position < 4)
    assert not codec.is_of_shape(packed, shapes_of(group), torch.float32, "none")
    other: Codec = "int8" if name == "k8v4" else "k8v4"
    assert not codec.is_of_shape(packed, shapes_of(group), torch.float32, other)
    wrong = [PackedKV(tensors) for tensors in mutations(dict(packed.tensors))]
    fitting = [w for w in wrong if codec.is_of_shape(w, shapes_of(group), torch.float32, name)]
    assert len(fitting) <= 2, "one group of scales more or less can be read"
    assert all(readable(w, group) for w in fitting)


def test_values_packed_by_channel_fit_too() -> None:
    """As in models that keep what is rotated in the other slot."""
    group = LayerKV(torch.randn(2, 1, 20, 32), torch.randn(2, 1, 20, 8))
    packed = pack(group, replace(NO_ROTATION, slot="values"), 100, "k8v4")
    assert packed is not None
    assert codec.is_of_shape(packed, shapes_of(group), torch.float32, "k8v4")


@pytest.mark.parametrize("flags", [[0, 0, 0], [1, 1, 1], [0, 2, 0], [0, 1]])
def test_flags_that_name_no_or_all_layers_do_not_fit(flags: list[int]) -> None:
    group = LayerKV(*(torch.randn(3, 2, 20, 16) for _ in SLOTS))
    packed = pack(group, NO_ROTATION, 100, "int8", (1,))
    assert packed is not None
    wrong = PackedKV({**packed.tensors, "plain": torch.tensor(flags, dtype=torch.uint8)})
    assert not codec.is_of_shape(wrong, shapes_of(group), torch.float32, "int8")
