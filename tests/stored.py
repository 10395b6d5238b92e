"""The headers of made-up records, for the tests of all tiers."""

from __future__ import annotations

import numpy as np

from kvboost.types import ChunkHeader, ChunkKey, Lineage


def header(number: int, content: int | None, size: int, lineage: Lineage, cost_s: float = 0.0) -> ChunkHeader:
    """Of a record of `size` tokens whose identity is `number`; equal `content` means equal text."""
    text = (number if content is None else content).to_bytes(4, "big")
    return ChunkHeader(
        ChunkKey(b"content" + text, b"prefix" + number.to_bytes(4, "big")),
        b"parent" + number.to_bytes(4, "big"),
        40,
        np.full(size, number, np.int32),
        lineage,
        anchors={b"anchor" + text: 3},
        cost_s=cost_s,
    )
