"""What a model keeps per token: shapes, windows and rotary settings of its cache layers, as measured by `probe`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from kvboost.rotary import NO_ROTATION, RotarySpec
from kvboost.types import LayerKV


@dataclass(frozen=True, slots=True, eq=False)
class LayerLayout:
    """One cache layer. `window` None means full attention; `rotary` one entry per position regime."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    rotary: tuple[RotarySpec, ...] = (NO_ROTATION,)


@dataclass(frozen=True, slots=True, eq=False)
class LayerGroup:
    """Layers that share shape and rotary style, so that their rows are kept and moved as one tensor.

    `rotary[regime].inv_freq` is [R/2] if all layers agree, else [L, R/2]; a layer without rotation has zeros.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    key_dim: int
    value_dim: int
    rotary: tuple[RotarySpec, ...]


@dataclass(frozen=True, slots=True, eq=False)
class KVLayout:
    """All cache layers of a model, and the groups in which their rows are stored."""

    layers: tuple[LayerLayout, ...]
    groups: tuple[LayerGroup, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return sum(la.num_kv_heads * (la.key_dim + la.value_dim) for la in self.layers) * self.dtype.itemsize

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of each layer."""
        return [la.window for la in self.layers]

    def allocate(self, num_rows: int) -> tuple[LayerKV, ...]:
        """Uninitialised rows: one `LayerKV` of [L, H, num_rows, D] per group."""
        return tuple(
            LayerKV(
                *(
                    torch.empty(len(g.layers), g.num_kv_heads, num_rows, dim, dtype=self.dtype, device=self.device)
                    for dim in (g.key_dim, g.value_dim)
                )
            )
            for g in self.groups
        )

    def per_layer(self, payload: Sequence[LayerKV]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of each layer, [1, H, n, D]: views into `payload`."""
        keys = [torch.empty(0)] * len(self.layers)
        values = [torch.empty(0)] * len(self.layers)
        for group, rows in zip(self.groups, payload, strict=True):
            for i, layer in enumerate(group.layers):
                keys[layer], values[layer] = rows.keys[i : i + 1], rows.values[i : i + 1]
        return keys, values

    def gather(self, cache: Cache, start: int, stop: int) -> tuple[LayerKV, ...]:
        """Copies rows `[start, stop)` out of a cache of plain layers."""
        return tuple(
            LayerKV(
                torch.stack([cache.layers[i].keys[0, :, start:stop] for i in group.layers]),
                torch.stack([cache.layers[i].values[0, :, start:stop] for i in group.layers]),
            )
            for group in self.groups
        )


def group_layers(layers: Sequence[LayerLayout]) -> tuple[LayerGroup, ...]:
    """Groups layers by shape and rotary style; unrotated layers join a rotated group of their shape."""
    buckets: dict[tuple[object, ...], list[int]] = {}
    for i, layer in enumerate(layers):
        buckets.setdefault((_shape(layer), *map(_style, layer.rotary)), []).append(i)
    for key in [k for k in buckets if all(s is None for s in k[1:])]:
        host = next((k for k in buckets if k[0] == key[0] and k != key), None)
        if host is not None:
            buckets[host] = sorted(buckets[host] + buckets.pop(key))
    return tuple(_make_group(layers, members) for members in buckets.values())


def _shape(layer: LayerLayout) -> tuple[int, int, int]:
    return layer.num_kv_heads, layer.key_dim, layer.value_dim


def _style(spec: RotarySpec) -> tuple[object, ...] | None:
    return None if spec.style == "none" else (spec.style, spec.start, spec.stop, spec.slot)


def _make_group(layers: Sequence[LayerLayout], members: Sequence[int]) -> LayerGroup:
    first = layers[members[0]]
    regimes = range(len(first.rotary))
    rotary = tuple(_merge([layers[i].rotary[regime] for i in members]) for regime in regimes)
    return LayerGroup(tuple(members), first.num_kv_heads, first.key_dim, first.value_dim, rotary)


def _merge(specs: Sequence[RotarySpec]) -> RotarySpec:
    rotated = next((s for s in specs if s.style != "none"), None)
    if rotated is None:
        return NO_ROTATION
    table = [s.inv_freq if s.style != "none" else torch.zeros_like(rotated.inv_freq) for s in specs]
    same = all(torch.equal(f, table[0]) for f in table)
    inv_freq = table[0] if same else torch.stack(table)
    return RotarySpec(rotated.style, inv_freq, rotated.start, rotated.slot)
