"""A cache of preloaded rows into which a forward writes the rows that it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer


class SpliceLayer(DynamicLayer):
    """Holds keys and values of all T positions; `update` overwrites the rows that are being computed.

    stored   k0 k1 k2 k3 k4 k5 k6 k7        rows = [2, 6, 7]
    update         ^^          ^^ ^^        returns all T rows, in place
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.rows = keys, values, rows
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [1, H, m, D] at the rows of this forward and returns keys and values of all T positions."""
        self.keys.index_copy_(2, self.rows, key_states)
        self.values.index_copy_(2, self.rows, value_states)
        return self.keys, self.values

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """Zero: positions are given explicitly, nothing may be derived from a length."""
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """All T positions, from the first."""
        return int(self.keys.shape[2]), 0


def make_splice_layers(
    keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], rows: torch.Tensor
) -> list[SpliceLayer]:
    """Cache layers over the given tensors, `[1, H, T, D]` each, which a forward changes in place at `rows`."""
    return [SpliceLayer(k, v, rows) for k, v in zip(keys, values, strict=True)]
