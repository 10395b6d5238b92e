"""Records as bytes: read back as they were, and never read at all when a single bit is not what was packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.errors import DamagedRecord, InputError, SettingsError
from kvboost.store import records
from kvboost.store.records import Seal, head_of, pack, pack_header, unpack, unpack_header
from kvboost.types import ChunkHeader, ChunkKey, ChunkKV, LayerKV, Lineage, Link, PackedKV

PLAIN, KEYED = Seal(), Seal("a secret")
SECRET_TOKENS = np.arange(10_001, 10_009, dtype=np.int32)


def encrypting(secret: str = "a secret") -> Seal:
    pytest.importorskip("cryptography")
    return Seal(secret, encrypt=True)


def small(tokens: Any = SECRET_TOKENS) -> ChunkKV:
    header = ChunkHeader(
        ChunkKey(b"content", b"prefix"), b"parent", 40, np.asarray(tokens, np.int32), Lineage.BIT_EXACT
    )
    n = len(header.tokens)
    keys = torch.arange(2 * n * 2, dtype=torch.float32).view(2, 1, n, 2)
    return ChunkKV(header, (LayerKV(keys, -keys),))


def assert_equal(a: ChunkKV, b: ChunkKV) -> None:
    assert_equal_headers(a.header, b.header)
    assert [type(g) for g in a.payload] == [type(g) for g in b.payload]
    for x, y in zip(a.payload, b.payload, strict=True):
        assert list(x.named()) == list(y.named())
        for p, q in zip(x.named().values(), y.named().values(), strict=True):
            assert p.dtype == q.dtype
            assert p.shape == q.shape
            flat = (t.contiguous().flatten().view(torch.uint8) for t in (p, q))
            assert p.numel() == 0 or torch.equal(*flat), "bits, so that NaN equals itself"


def assert_equal_headers(a: ChunkHeader, b: ChunkHeader) -> None:
    arrays = {"tokens", "rows"}
    for name in ChunkHeader.__slots__:
        x, y = getattr(a, name), getattr(b, name)
        if name in arrays and x is not None:
            assert y.dtype == np.int32
            assert np.array_equal(x, y), name
        else:
            assert x == y, name
    assert list(a.anchors) == list(b.anchors)


# --- round trip ---------------------------------------------------------------------------------------------------

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
names = st.binary(min_size=1, max_size=40)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits: NaN and infinities too."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def headers(draw: st.DrawFn) -> ChunkHeader:
    tokens = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)), np.int32)
    offsets = st.integers(0, len(tokens) - 1)
    linked = draw(st.booleans())
    rows = np.array(sorted(draw(st.sets(offsets))), np.int32) if linked else None
    return ChunkHeader(
        ChunkKey(draw(names), draw(names)),
        draw(names),
        draw(st.integers(0, 2**20)),
        tokens,
        draw(st.sampled_from(Lineage)),
        draw(st.frozensets(names, max_size=4)),
        draw(st.dictionaries(names, offsets, max_size=4)),
        Link(draw(names), draw(st.integers(0, 9))) if linked else None,
        rows,
        linked and draw(st.booleans()),
        "none" if linked else draw(st.sampled_from(["none", "int8", "k8v4"])),
        draw(st.floats(0, 1e6)),
    )


@st.composite
def chunks(draw: st.DrawFn) -> ChunkKV:
    header = draw(headers())
    rows = (len(header.tokens) if header.rows is None else len(header.rows)) + header.corrected
    payload: list[LayerKV | PackedKV] = []
    for i in range(draw(st.integers(1, 3))):
        layers, heads, width, other = (draw(st.integers(1, 4)) for _ in range(4))
        dtype = draw(st.sampled_from(FLOATS))
        if header.codec == "none" or draw(st.booleans()):
            shape = (layers, heads, rows)
            payload.append(LayerKV(noise((*shape, width), dtype, i), noise((*shape, other), dtype, i + 9)))
        else:
            kinds = draw(st.dictionaries(st.text(min_size=1, max_size=8), st.sampled_from([*FLOATS, torch.uint8])))
            payload.append(PackedKV({name: noise((layers, rows, width), kind, i) for name, kind in kinds.items()}))
    return ChunkKV(header, tuple(payload))


@pytest.mark.parametrize("kind", ["plain", "keyed", "encrypted"])
@settings(max_examples=60, deadline=None)
@given(chunk=chunks())
def test_what_was_packed_is_read_back_bit_by_bit(kind: str, chunk: ChunkKV) -> None:
    seal = {"plain": PLAIN, "keyed": KEYED}.get(kind) or encrypting()
    data = pack(chunk, seal)
    assert_equal(chunk, unpack(data, seal))
    assert_equal(chunk, unpack(memoryview(bytearray(data)), seal))
    assert_equal_headers(chunk.header, unpack_header(head_of(data), seal))
    assert_equal_headers(chunk.header, unpack_header(pack_header(chunk.header, seal), seal))


def test_tensors_that_are_views_or_share_memory_are_packed_by_their_values() -> None:
    chunk = small()
    keys = torch.randn(2, 1, 16, 2)[:, :, ::2]
    chunk = replace(chunk, payload=(LayerKV(keys, keys),))
    assert_equal(chunk, unpack(pack(chunk, PLAIN), PLAIN))


def test_tensors_are_used_where_they_lie_in_a_writable_buffer() -> None:
    buffer = bytearray(pack(small(), PLAIN))
    keys = unpack(buffer, PLAIN).payload[0].named()["keys"]
    assert keys.data_ptr() % 4 == 0
    buffer[len(head_of(buffer))] ^= 1
    assert not torch.equal(keys, small().payload[0].named()["keys"])


def test_a_type_that_no_reader_knows_is_refused_when_packing() -> None:
    chunk = replace(small(), payload=(PackedKV({"x": torch.zeros(2, dtype=torch.complex64)}),))
    with pytest.raises(InputError, match=r"torch\.complex64.*known types: bfloat16"):
        pack(chunk, PLAIN)


# --- damage -------------------------------------------------------------------------------------------------------


def reads(data: bytes | bytearray, seal: Seal) -> bool:
    """Whether `data` is accepted as a record or as a header."""
    return accepts(unpack, data, seal) or accepts(unpack_header, data, seal)


def accepts(read: Callable[[bytes | bytearray, Seal], object], data: bytes | bytearray, seal: Seal) -> bool:
    try:
        read(data, seal)
    except DamagedRecord:
        return False
    return True


@pytest.mark.parametrize("kind", ["plain", "keyed", "encrypted"])
@pytest.mark.parametrize("make", [pack, lambda chunk, seal: pack_header(chunk.header, seal)], ids=["record", "header"])
def test_every_flipped_bit_is_detected(kind: str, make: Any) -> None:
    seal = {"plain": PLAIN, "keyed": KEYED}.get(kind) or encrypting()
    data = bytearray(make(small([7, 8]), seal))
    assert reads(data, seal)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert not reads(data, seal), f"bit {bit % 8} of byte {bit // 8}"
        data[bit // 8] ^= 1 << bit % 8
    assert reads(data, seal)


@pytest.mark.parametrize("seal", [PLAIN, KEYED], ids=["plain", "keyed"])
def test_a_record_cut_at_any_byte_or_with_more_behind_it_is_detected(seal: Seal) -> None:
    data = pack(small([7, 8]), seal)
    head = len(head_of(data))
    for stop in set(range(len(data))) - {head}:
        assert not reads(data[:stop], seal), stop
    with pytest.raises(DamagedRecord, match="payload has 0 bytes"):
        unpack(data[:head], seal)
    assert not reads(data + b"\0", seal)
    assert not reads(data + data, seal)
    with pytest.raises(DamagedRecord, match="without a payload"):
        unpack(pack_header(small().header, seal), seal)


def test_parts_of_two_records_do_not_make_a_third() -> None:
    first, second = (pack(small(tokens), KEYED) for tokens in ([1, 2], [1, 3]))
    other = replace(small([1, 2]), payload=(LayerKV(torch.ones(2, 1, 2, 2), torch.ones(2, 1, 2, 2)),))
    third = pack(other, KEYED)
    head = len(head_of(first))
    assert not reads(first[:head] + third[head:], KEYED)
    assert not reads(first[:64] + second[64:], KEYED)


def test_another_format_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FORMAT_VERSION", 2)
    data = pack(small(), KEYED)
    monkeypatch.undo()
    with pytest.raises(DamagedRecord, match="format version 2; this release reads 1"):
        unpack(data, KEYED)


# --- secrets ------------------------------------------------------------------------------------------------------


def test_a_record_of_another_secret_or_of_none_is_refused() -> None:
    for ours, theirs in ((KEYED, Seal("another")), (KEYED, PLAIN), (PLAIN, KEYED)):
        for make in (pack, lambda chunk, seal: pack_header(chunk.header, seal)):
            assert reads(make(small(), theirs), theirs)
            assert not reads(make(small(), theirs), ours)


def test_a_forged_record_needs_the_secret() -> None:
    """Whoever may write to the store can make a checksum right, but no MAC: not even by claiming there is none."""
    honest = pack(small(), KEYED)
    forged = bytearray(pack(small(), PLAIN))
    assert reads(forged, PLAIN)
    forged[6] = honest[6]
    assert not reads(forged, KEYED)
    forged[32:64] = Seal("a guess").digest(forged[:32], bytes(head_of(forged))[64:])
    assert not reads(forged, KEYED)


def test_encrypted_records_hold_neither_tokens_nor_keys_and_values() -> None:
    seal = encrypting()
    data = pack(small(), seal)
    plain = pack(small(), KEYED)
    needles = [SECRET_TOKENS.tobytes(), SECRET_TOKENS.tobytes().hex().encode(), b"tokens", b"float32"]
    needles += [small().payload[0].named()["keys"][0, 0, :2].numpy().tobytes(), b"content".hex().encode()]
    assert sum(n in plain for n in needles) == 5
    assert not any(n in data for n in needles)
    assert data != pack(small(), seal), "every record has a key of its own"
    assert_equal(small(), unpack(data, KEYED))
    assert not reads(data, Seal("another"))


def test_encryption_needs_a_secret() -> None:
    with pytest.raises(SettingsError, match="hash_secret"):
        Seal(encrypt=True)


# --- nonsense with a right checksum -------------------------------------------------------------------------------

NONSENSE: list[tuple[str, Any]] = [
    ("head", b"[]"),
    ("head", b"{}"),
    ("head", b"\xff\xfe"),
    ("head", b"[" * 100_000),
    ("tokens", "zz"),
    ("tokens", "00"),
    ("tokens", None),
    ("position", -1),
    ("position", True),
    ("position", 1.5),
    ("lineage", 3),
    ("context", 7),
    ("anchors", [["00"]]),
    ("source", ["00"]),
    ("rows", "0500000004000000"),
    ("rows", "ffffffff"),
    ("rows", "00000000"),
    ("corrected", 1),
    ("corrected", True),
    ("position", 2**31),
    ("source", ["00", 2**31]),
    ("codec", None),
    ("codec", "[/red]\x1b[31m"),
    ("rows", np.arange(8, dtype="<i4").tobytes().hex()),  # as many as tokens, but of no link
    ("cost_s", "much"),
    ("cost_s", "nan"),
    ("cost_s", float("nan")),
    ("cost_s", float("inf")),
    ("cost_s", -1.0),
]


def sealed(head: bytes, body: bytes) -> bytes:
    prefix = records._PREFIX.pack(records.MAGIC, records.FORMAT_VERSION, 0, 0, len(head), 0, bytes(16))
    return prefix + PLAIN.digest(prefix, head) + head + body


@pytest.mark.parametrize(("field", "value"), NONSENSE, ids=lambda v: repr(v)[:20])
def test_malformed_content_behind_a_right_checksum_is_damage(field: str, value: Any) -> None:
    data = pack(small(), PLAIN)
    body = data[len(head_of(data)) :]
    head = json.loads(bytes(head_of(data))[64:])
    assert reads(sealed(json.dumps(head).encode(), body), PLAIN)
    if field != "head":
        head["header"][field] = value
    with pytest.raises(DamagedRecord):
        unpack(sealed(value if field == "head" else json.dumps(head).encode(), body), PLAIN)


@pytest.mark.parametrize(
    "tensors",
    [
        [["keys", "float32", [2, 1, 8, 2]]],
        [["keys", "float32", [2, 1, 8, 2]], ["values", "float32", [2, 1, 8, 1]]],
        [["keys", "float32", [2, 1, 8, 2]], ["values", "float32", [2, 1, 4, 4]]],
        [["keys", "float32", [2, 1, 8, 2]], ["values", "object", [2, 1, 8, 2]]],
        [["keys", "float32", [2, 1, 8, 2]], ["values", "float32", [2, 1, 8, -2]]],
        [["keys", "float32", [2, 1, 8, 2]], ["values", "float32", [2**40, 2**40, 8, 2]]],
        [["keys", "float32", [2, 1, 8, 2]], ["other", "float32", [2, 1, 8, 2]]],
        [["keys", "float32", [2, 1, 8, 2]], ["values", "float32", [2, 1, 8, 2]], ["values", "float32", [0]]],
        "keys",
    ],
    ids=repr,
)
def test_tensors_that_do_not_fit_header_or_payload_are_damage(tensors: Any) -> None:
    data = pack(small(), PLAIN)
    head = json.loads(bytes(head_of(data))[64:])
    head["payload"]["groups"][0]["tensors"] = tensors
    with pytest.raises(DamagedRecord, match="payload"):
        unpack(sealed(json.dumps(head).encode(), data[len(head_of(data)) :]), PLAIN)
