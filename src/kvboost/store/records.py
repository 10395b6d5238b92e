"""Stored chunks as bytes, and back: what the disk and the remote tiers keep. No pickle, nothing is executed.

    0        4         6       7   8             12     16      32      64                     64 + head_bytes
    | "KVB1" | version | flags | 0 | head_bytes  | 0    | salt  | seal  | head: JSON, padded   | payload: tensors |

The seal covers all that stands before it and the head; the head holds the payload's length and BLAKE3 digest. So the
head alone (`head_of`) can be kept in an index and read without the payload. Tensors follow one another in the order
and the shapes that the head lists, each at a multiple of 64 bytes, so that they are used where they lie.

A `Seal` with a secret is a MAC: nobody without the secret can make a record that is accepted. Without a secret it is a
checksum, which finds damage but no intent. Numbers are little-endian, as on every machine that torch is released for.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from kvboost.errors import DamagedRecord, ForeignRecord, InputError, SettingsError
from kvboost.types import NO_SESSION, ChunkHeader, ChunkKey, ChunkKV, Int32Array, LayerKV, Lineage, Link, PackedKV

FORMAT_VERSION = 1
MAGIC = b"KVB1"
ALIGN_BYTES = 64
KEYED, ENCRYPTED = 1, 2  # flags
TAG_BYTES = 16  # that AES-GCM appends
MAX_HEAD_BYTES = 16 << 20
MAX_POSITION = 1 << 30
MAX_COST_S = 1e9

_PREFIX = struct.Struct("<4sHBBII16s")  # magic, version, flags, 0, head_bytes, 0, salt
_ENVELOPE_BYTES = 64  # prefix and seal
_CODEC = re.compile(r"[a-z0-9_]{1,16}")  # it is printed
_HEAD, _PAYLOAD = 0, 1  # numbers that keep the two parts of an encrypted record apart
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32)
}

Buffer = bytes | bytearray | memoryview


class Seal:
    """How records are protected: a checksum, with a `secret` a MAC, and with `encrypt` AES-256-GCM as well.

    Keys are derived from the secret. A seal with a secret refuses records that were sealed without it, and reads
    both plain and encrypted records of its secret. Raises `SettingsError` for `encrypt` without a secret or without the
    package `cryptography`.
    """

    def __init__(self, secret: str = "", *, encrypt: bool = False) -> None:
        if encrypt and not secret:
            raise SettingsError("records cannot be encrypted without a secret; set hash_secret (KVBOOST_HASH_SECRET)")
        if encrypt and not _can_encrypt():
            raise SettingsError("encrypted records need the package cryptography: pip install '.[encrypt]'")
        self._mac_key = _derive(secret, "kvboost record seal v1") if secret else None
        self._cipher_key = _derive(secret, "kvboost record encryption v1")
        self.flags = (KEYED if secret else 0) | (ENCRYPTED if encrypt else 0)

    @property
    def tag(self) -> str:
        """Tells secrets apart, and nothing of them."""
        return self.digest(b"tag").hex()[:16]

    def digest(self, *parts: Buffer) -> bytes:
        """The seal of bytes given in parts. 32 bytes."""
        hasher = blake3() if self._mac_key is None else blake3(key=self._mac_key)
        for part in parts:
            hasher.update(part)
        return bytes(hasher.digest())

    def encrypted(self, plain: Buffer, salt: bytes, part: int) -> bytes:
        """`plain` under a key that belongs to `salt` and is used for nothing else; 16 bytes longer."""
        return bytes(self._cipher(salt).encrypt(part.to_bytes(12, "little"), plain, None))

    def decrypted(self, data: Buffer, salt: bytes, part: int) -> bytearray:
        """The reverse of `encrypted`. Raises `DamagedRecord`."""
        from cryptography.exceptions import InvalidTag

        try:
            return bytearray(self._cipher(salt).decrypt(part.to_bytes(12, "little"), data, None))
        except InvalidTag:
            raise DamagedRecord("the record does not decrypt: it is damaged or of another secret") from None

    def _cipher(self, salt: bytes) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(blake3(salt, key=self._cipher_key).digest())


def pack(record: ChunkKV, seal: Seal) -> bytes:
    """A record as sealed bytes. Tensors are copied once, from any device. Raises `InputError` for a foreign dtype."""
    salt = os.urandom(16) if seal.flags & ENCRYPTED else bytes(16)
    groups = [_group_spec(group) for group in record.payload]
    chunks = [part for group in record.payload for tensor in group.named().values() for part in _tensor_bytes(tensor)]
    if seal.flags & ENCRYPTED:
        chunks = [memoryview(seal.encrypted(b"".join(chunks), salt, _PAYLOAD))]
    digest = blake3()
    for chunk in chunks:
        digest.update(chunk)
    payload = {"groups": groups, "bytes": sum(map(len, chunks)), "digest": digest.hexdigest()}
    return b"".join([_sealed_head(record.header, payload, salt, seal), *chunks])


def unpack(data: Buffer, seal: Seal) -> ChunkKV:
    """The record that `pack` was given. Tensors lie in `data` if it is writable and not encrypted, else in a copy.

    Raises `DamagedRecord` for anything that is not exactly what was packed; `ForeignRecord` where another seal may
    think otherwise.
    """
    view = memoryview(data).cast("B")
    head = head_of(view)
    header, payload, prefix = _opened_head(head, seal)
    body = view[len(head) :]
    if payload is None:
        raise DamagedRecord("the record is a header without a payload")
    with _damage("payload"):
        num_bytes, digest, groups = _int(payload["bytes"]), bytes.fromhex(payload["digest"]), payload["groups"]
    if len(body) != num_bytes:
        raise DamagedRecord(f"the record's payload has {len(body)} bytes instead of {num_bytes}")
    if not hmac.compare_digest(blake3(body).digest(), digest):
        raise DamagedRecord("the record's payload does not match its digest")
    if prefix.flags & ENCRYPTED:
        body = memoryview(seal.decrypted(body, prefix.salt, _PAYLOAD))
    elif body.readonly:
        body = memoryview(bytearray(body))
    with _damage("payload"):
        record = ChunkKV(header, tuple(_groups(groups, body)))
        _check_rows(record)
    return record


def pack_header(header: ChunkHeader, seal: Seal) -> bytes:
    """A header alone as sealed bytes, without a payload."""
    salt = os.urandom(16) if seal.flags & ENCRYPTED else bytes(16)
    return _sealed_head(header, None, salt, seal)


def unpack_header(data: Buffer, seal: Seal) -> ChunkHeader:
    """The header in what `pack_header` or `head_of` returned. Raises `DamagedRecord` as `unpack` does."""
    view = memoryview(data).cast("B")
    if len(head_of(view)) != len(view):
        raise DamagedRecord(f"the header has {len(view)} bytes instead of {len(head_of(view))}")
    return _opened_head(view, seal)[0]


def head_of(data: Buffer) -> memoryview:
    """The part of a packed record that `unpack_header` reads: its beginning. Raises `DamagedRecord` if it is cut."""
    view = memoryview(data).cast("B")
    prefix = _Prefix.of(view)
    if len(view) < prefix.stop:
        raise DamagedRecord(f"the record is cut: {len(view)} bytes, its head alone has {prefix.stop}")
    return view[: prefix.stop]


def head_length(start: Buffer) -> int:
    """Bytes of the head, from the first 64 bytes of a record. Raises `DamagedRecord`."""
    return _Prefix.of(memoryview(start).cast("B")).stop


def is_encrypted(data: Buffer) -> bool:
    """Whether a record was encrypted. Raises `DamagedRecord` if it is none."""
    return bool(_Prefix.of(memoryview(data).cast("B")).flags & ENCRYPTED)


class _Prefix:
    """The first fields of a record, checked for what can be checked without the seal."""

    __slots__ = ("flags", "salt", "stop")

    def __init__(self, flags: int, salt: bytes, stop: int) -> None:
        self.flags, self.salt, self.stop = flags, salt, stop

    @classmethod
    def of(cls, view: memoryview) -> _Prefix:
        if len(view) < _ENVELOPE_BYTES:
            raise DamagedRecord(f"the record is cut: {len(view)} bytes, not even {_ENVELOPE_BYTES}")
        magic, version, flags, zero, head_bytes, also_zero, salt = _PREFIX.unpack_from(view)
        if magic != MAGIC:
            raise DamagedRecord(f"no record: it begins with {magic!r} instead of {MAGIC!r}")
        if version != FORMAT_VERSION:
            raise DamagedRecord(f"the record has format version {version}; this release reads {FORMAT_VERSION}")
        if zero or also_zero or flags & ~(KEYED | ENCRYPTED) or head_bytes > MAX_HEAD_BYTES:
            raise DamagedRecord("the record's first bytes are damaged")
        return cls(flags, salt, _ENVELOPE_BYTES + head_bytes)


def _sealed_head(header: ChunkHeader, payload: Mapping[str, Any] | None, salt: bytes, seal: Seal) -> bytes:
    text = json.dumps({"header": _header_json(header), "payload": payload}, separators=(",", ":")).encode()
    tag = TAG_BYTES if seal.flags & ENCRYPTED else 0
    head: bytes = text + b" " * (-(len(text) + tag) % ALIGN_BYTES)
    if seal.flags & ENCRYPTED:
        head = seal.encrypted(head, salt, _HEAD)
    prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION, seal.flags, 0, len(head), 0, salt)
    return b"".join([prefix, seal.digest(prefix, head), head])


def _opened_head(view: memoryview, seal: Seal) -> tuple[ChunkHeader, Mapping[str, Any] | None, _Prefix]:
    prefix = _Prefix.of(view)
    body, keyed = view[_ENVELOPE_BYTES:], bool(prefix.flags & KEYED)
    if keyed and not seal.flags & KEYED:
        raise ForeignRecord("the record was sealed with a secret, and none was given")
    opener = seal if keyed == bool(seal.flags & KEYED) else Seal()
    if not hmac.compare_digest(opener.digest(view[: _PREFIX.size], body), view[_PREFIX.size : _ENVELOPE_BYTES]):
        unmatched = "the record's seal does not match: it is damaged"
        raise ForeignRecord(f"{unmatched}, forged or of another secret") if keyed else DamagedRecord(unmatched)
    if seal.flags & KEYED and not keyed:
        raise ForeignRecord("the record was sealed with no secret, and one was given")
    text = bytes(body)
    if prefix.flags & ENCRYPTED:
        if not _can_encrypt():
            raise ForeignRecord("the record is encrypted, which needs the package cryptography")
        text = bytes(seal.decrypted(body, prefix.salt, _HEAD))
    with _damage("head"):
        head = json.loads(text)
        return _header_of(head["header"]), head["payload"], prefix


class _damage:  # noqa: N801  # reads as a statement
    """Turns whatever malformed content raises into `DamagedRecord`: without a secret, anybody can seal nonsense."""

    def __init__(self, part: str) -> None:
        self.part = part

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, DamagedRecord):
            raise DamagedRecord(f"the record's {self.part} is malformed: {type(error).__name__}: {error}") from None


def _header_json(h: ChunkHeader) -> dict[str, Any]:
    return {
        "content": h.key.content_hash.hex(),
        "prefix": h.key.prefix_hash.hex(),
        "parent": h.parent.hex(),
        "position": h.position,
        "tokens": _array_hex(h.tokens),
        "lineage": int(h.lineage),
        "context": sorted(c.hex() for c in h.context),
        "anchors": [[name.hex(), at] for name, at in h.anchors.items()],
        "source": None if h.source is None else [h.source.record_id.hex(), h.source.offset],
        "rows": None if h.rows is None else _array_hex(h.rows),
        "corrected": h.corrected,
        "codec": h.codec,
        "cost_s": h.cost_s,
        "namespace": h.namespace.hex(),
        "session": h.session.hex(),
    }


def _header_of(d: Mapping[str, Any]) -> ChunkHeader:
    tokens = _array_of(d["tokens"])
    rows = None if d["rows"] is None else _array_of(d["rows"])
    source = None if d["source"] is None else Link(bytes.fromhex(d["source"][0]), _position(d["source"][1]))
    if rows is not None and len(rows) and (rows[0] < 0 or rows[-1] >= len(tokens) or (np.diff(rows) <= 0).any()):
        raise ValueError("rows are not offsets of tokens")
    if not isinstance(d["corrected"], bool) or not _CODEC.fullmatch(d["codec"]):
        raise TypeError("codec or corrected")
    if source is None and (rows is not None or d["corrected"]):
        raise ValueError("only a link has rows of its own beside others")
    return ChunkHeader(
        ChunkKey(bytes.fromhex(d["content"]), bytes.fromhex(d["prefix"])),
        bytes.fromhex(d["parent"]),
        _position(d["position"]),
        tokens,
        Lineage(d["lineage"]),
        frozenset(map(bytes.fromhex, d["context"])),
        {bytes.fromhex(name): _int(at) for name, at in d["anchors"]},
        source,
        rows,
        d["corrected"],
        d["codec"],
        _cost(d["cost_s"]),
        bytes.fromhex(d["namespace"]),
        bytes.fromhex(d.get("session", NO_SESSION.hex())),  # older records are nobody's
    )


def _array_hex(array: Int32Array) -> str:
    return np.ascontiguousarray(array, "<i4").tobytes().hex()


def _array_of(text: str) -> Int32Array:
    return np.frombuffer(bytearray.fromhex(text), "<i4").astype(np.int32, copy=False)


def _int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _position(value: Any) -> int:
    if _int(value) > MAX_POSITION:
        raise ValueError("no model reaches that position")
    return int(value)


def _cost(value: Any) -> float:
    """Neither NaN nor negative: one such record would spoil the means and the index that it gets into."""
    if type(value) not in (int, float) or not 0 <= value <= MAX_COST_S:
        raise ValueError(f"{value!r} is no cost in seconds")
    return float(value)


def _group_spec(group: LayerKV | PackedKV) -> dict[str, Any]:
    tensors = group.named()
    foreign = [str(t.dtype) for t in tensors.values() if t.dtype not in _DTYPES.values()]
    if foreign:
        raise InputError(f"a record cannot hold tensors of type {foreign[0]}; known types: {', '.join(_DTYPES)}")
    described = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    return {"packed": isinstance(group, PackedKV), "tensors": described}


def _tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's bytes, and what fills them up to a multiple of 64."""
    flat = tensor.detach().cpu().contiguous().flatten()
    data = memoryview(flat.view(torch.uint8).numpy().data) if len(flat) else memoryview(b"")
    yield data
    yield memoryview(bytes(-len(data) % ALIGN_BYTES))


def _groups(specs: Sequence[Mapping[str, Any]], body: memoryview) -> Iterator[LayerKV | PackedKV]:
    at = 0
    for spec in specs:
        tensors: dict[str, torch.Tensor] = {}
        for name, dtype, shape in spec["tensors"]:
            tensors[name], at = _tensor_at(body, at, _DTYPES[dtype], tuple(map(_int, shape)))
        yield PackedKV(tensors) if spec["packed"] else LayerKV(**tensors)
    if at != len(body):
        raise ValueError(f"tensors of {at} bytes in {len(body)}")


def _tensor_at(body: memoryview, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    """The tensor that begins at byte `at`, and where the next one begins."""
    count = 1
    for size in shape:
        count *= size
    stop = at + count * dtype.itemsize
    stop += -stop % ALIGN_BYTES
    if stop > len(body):
        raise ValueError(f"a tensor ends at byte {stop} of {len(body)}")
    if count == 0:
        return torch.empty(shape, dtype=dtype), stop
    return torch.frombuffer(body, dtype=dtype, count=count, offset=at).view(shape), stop


def _check_rows(record: ChunkKV) -> None:
    """Raises `ValueError` unless every unpacked group has the rows that the header tells."""
    rows = record.num_rows + record.header.corrected
    for group in record.payload:
        if isinstance(group, PackedKV):
            if record.header.codec == "none":
                raise ValueError("packed tensors without a codec")
            continue
        keys, values = group.keys, group.values
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[2] != rows:
            raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} for {rows} rows")


def _derive(secret: str, purpose: str) -> bytes:
    return bytes(blake3(secret.encode("utf-8", "surrogatepass"), derive_key_context=purpose).digest())


def _can_encrypt() -> bool:
    try:
        import cryptography.hazmat.primitives.ciphers.aead  # noqa: F401
    except ImportError:
        return False
    return True
