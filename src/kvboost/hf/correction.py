"""Carries what a sample of recomputed rows learnt over to the rows that are not recomputed.

A chunk that is moved was computed behind another context, and a part of the error is *common* to its rows. A regular
sample of recomputed rows measures it: per layer, chunk and head, the mean change of the sampled rows (keys before
rotation), shrunk towards zero by the positive-part James-Stein factor (James and Stein 1961), is added to the others.

    rows of a chunk   . . s . . . . s . . . . s . .        s: sampled, recomputed
    change                a         b         c            mean (a + b + c) / 3, times max(0, 1 - var(mean) / |mean|^2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvboost.hf.layout import KVLayout
from kvboost.hf.splice import SpliceLayer
from kvboost.rotary import RotarySpec, Rotation, make_rotation, rotate
from kvboost.types import Int32Array, Span

MIN_SAMPLE = 3


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Which rows of a forward sample which chunks; all index tensors are int64."""

    at: torch.Tensor  # [S] indices into the forward's rows
    positions: torch.Tensor  # [S]
    chunk: torch.Tensor  # [S] number of the chunk
    rest: torch.Tensor  # [R] positions that are corrected
    rest_chunk: torch.Tensor  # [R]
    counts: torch.Tensor  # float32 [C] sampled rows per chunk

    @classmethod
    def of(cls, rows: Int32Array, sampled: Int32Array, chunks: Sequence[Span], device: torch.device) -> Sample | None:
        """The sample of a forward that computes `rows`, of which `sampled` are the sample; None if it is too small."""
        members = [sampled[(sampled >= c.start) & (sampled < c.stop)] for c in chunks]
        kept = [(c, m) for c, m in zip(chunks, members, strict=True) if len(m) >= MIN_SAMPLE]
        if not kept:
            return None
        rests = [np.setdiff1d(np.arange(c.start, c.stop), rows) for c, _ in kept]
        positions = np.concatenate([m for _, m in kept])

        def numbers(groups: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.arange(len(groups)), [len(g) for g in groups])).to(device)

        return cls(
            torch.from_numpy(np.searchsorted(rows, positions)).long().to(device),
            torch.from_numpy(positions).long().to(device),
            numbers([m for _, m in kept]),
            torch.from_numpy(np.concatenate(rests)).long().to(device),
            numbers(rests),
            torch.tensor([float(len(m)) for _, m in kept], device=device),
        )


class CorrectingLayer(SpliceLayer):
    """A splice layer that corrects the rows which its forward does not compute."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, sample: Sample, turn: LayerRotation
    ) -> None:
        super().__init__(keys, values, rows)
        self.sample, self.turn = sample, turn

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SpliceLayer.update`, after adding the sample's shrunken mean change to the other rows."""
        for slot, stored, fresh in (("keys", self.keys, key_states), ("values", self.values, value_states)):
            self._correct(stored[0], fresh[0], rotated=slot == self.turn.spec.slot)
        return super().update(key_states, value_states)

    def _correct(self, stored: torch.Tensor, fresh: torch.Tensor, *, rotated: bool) -> None:
        """`stored` [H, T, D], `fresh` [H, m, D]."""
        s = self.sample
        change = fresh[:, s.at].float() - stored[:, s.positions].float()
        if rotated:
            change = self.turn.apply(change, s.positions, inverse=True)
        mean = shrunken_mean(change, s.chunk, s.counts)[:, s.rest_chunk]
        if rotated:
            mean = self.turn.apply(mean, s.rest)
        stored.index_add_(1, s.rest, mean.to(stored.dtype))


def shrunken_mean(change: torch.Tensor, chunk: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Per chunk and head the mean of `change` [H, S, D], shrunk by max(0, 1 - var(mean) / |mean|^2): [H, C, D]."""
    heads, _, dim = change.shape
    n = counts[None, :, None]
    mean = change.new_zeros(heads, len(counts), dim).index_add_(1, chunk, change) / n
    spread = (change - mean[:, chunk]).pow_(2)
    variance = change.new_zeros(heads, len(counts), dim).index_add_(1, chunk, spread) / (n - 1) / n
    explained = 1 - variance.sum(-1, keepdim=True) / mean.pow(2).sum(-1, keepdim=True).clamp_min(1e-12)
    return mean * explained.clamp_(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class LayerRotation:
    """One layer's rotation from position 0 to every position; `cos`, `sin` float32 [T, R/2]."""

    spec: RotarySpec
    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, x: torch.Tensor, positions: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """Rotates float32 rows [H, n, D] to `positions` [n], or back."""
        if self.spec.style == "none":
            return x
        start, stop = self.spec.start, self.spec.stop
        out = x.clone()
        sin = self.sin[positions]
        rotate(x[..., start:stop], self.cos[positions], -sin if inverse else sin, self.spec.style, out[..., start:stop])
        return out


def layer_rotations(layout: KVLayout, regime: int, num_tokens: int) -> list[LayerRotation]:
    """One rotation per layer; layers of a group that share their frequencies share the tables."""
    turns: dict[int, LayerRotation] = {}
    for group in layout.groups:
        spec = group.rotary[regime]
        positions = torch.arange(num_tokens, device=layout.device)
        table = Rotation(spec, torch.empty(0), torch.empty(0))
        if spec.style != "none":
            table = make_rotation(spec, torch.zeros_like(positions), positions)
        for i, layer in enumerate(group.layers):
            own = table.cos.dim() == 4
            cos, sin = (table.cos[i, 0], table.sin[i, 0]) if own else (table.cos, table.sin)
            turns[layer] = LayerRotation(spec, cos, sin)
    return [turns[i] for i in range(len(layout.layers))]
