"""Whether a stored record is of the model's shape, so that loading it cannot fail.

A seal tells that a record is what was packed, not that whoever packed it knew the model: without a secret everybody can
seal nonsense. A record under the model's own names whose groups, shapes or types are others is never served.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvboost import codec
from kvboost.hf.layout import KVLayout, LayerGroup
from kvboost.rotary import Slot
from kvboost.types import ChunkHeader, ChunkKV, LayerKV, Lineage, PackedKV


def misfit(record: ChunkKV, records: Mapping[bytes, ChunkKV], layout: KVLayout) -> str | None:
    """Why a record cannot be loaded into rows of `layout`, or None. `records` holds the source of a link, if any."""
    header = record.header
    if len(record.payload) != len(layout.groups):
        return f"it has {len(record.payload)} layer groups instead of {len(layout.groups)}"
    if header.lineage is Lineage.BIT_EXACT and any(isinstance(g, PackedKV) for g in record.payload):
        return "it is packed and claims to be exact"
    num_rows = record.num_rows + header.corrected
    for i, (group, rows) in enumerate(zip(layout.groups, record.payload, strict=True)):
        if not _is_of_shape(rows, header, _shapes(group, num_rows), layout.dtype):
            return f"layer group {i} does not hold {num_rows} rows of this model in the codec {header.codec}"
    source = None if header.source is None else records.get(header.source.record_id)
    return None if source is None else _broken_link(header, source.header)


def _shapes(group: LayerGroup, num_rows: int) -> dict[Slot, tuple[int, ...]]:
    """The shapes [L, H, n, D] of a group's rows."""
    dims: dict[Slot, int] = {"keys": group.key_dim, "values": group.value_dim}
    return {slot: (len(group.layers), group.num_kv_heads, num_rows, dim) for slot, dim in dims.items()}


def _is_of_shape(
    rows: LayerKV | PackedKV, header: ChunkHeader, shapes: Mapping[Slot, tuple[int, ...]], dtype: torch.dtype
) -> bool:
    if isinstance(rows, PackedKV):
        return header.source is None and codec.is_of_shape(rows, shapes, dtype, header.codec)
    return all(rows.named()[slot].shape == shapes[slot] and rows.named()[slot].dtype is dtype for slot in codec.SLOTS)


def _broken_link(header: ChunkHeader, source: ChunkHeader) -> str | None:
    """Why a link's tokens are not those at its place in its source, or None."""
    start = 0 if header.source is None else header.source.offset
    if np.array_equal(source.tokens[start : start + len(header.tokens)], header.tokens):
        return None
    return f"it links to {len(header.tokens)} tokens at {start} of a record of {len(source.tokens)} that are others"
