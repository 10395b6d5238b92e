"""Carries what a sample of recomputed rows learnt over to the rows that are not recomputed.

A chunk that is moved was computed behind another context, and a part of its error is *common* to its rows. A regular
sample of recomputed rows measures it: per layer and head, the mean change of the sampled rows (keys before rotation) is
added to the others, first of all chunks together, then what each chunk has besides; each mean is shrunk towards zero by
the positive-part James-Stein factor (James and Stein 1961).

    rows of a chunk   . . s . . . . s . . . . s . .        s: sampled, recomputed
    change                a         b         c            mean (a + b + c) / 3, times max(0, 1 - var(mean) / |mean|^2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvboost.hf.layout import KVLayout
from kvboost.hf.splice import SpliceLayer
from kvboost.rotary import RotarySpec, make_rotation, rotate
from kvboost.types import Int32Array, LayerKV, Span

MIN_SAMPLE = 3
CLIP = 2.0


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Which rows of a forward sample which chunks; all index tensors are int64."""

    chunks: Sequence[Span]
    at: torch.Tensor  # [S] indices into the forward's rows
    positions: torch.Tensor  # [S]
    chunk: torch.Tensor  # [S] number of the chunk
    rest: torch.Tensor  # [R] positions that are corrected
    rest_chunk: torch.Tensor  # [R]
    counts: torch.Tensor  # float32 [C] sampled rows per chunk

    @classmethod
    def of(
        cls,
        rows: Int32Array,
        sampled: Int32Array,
        repaired: Int32Array,
        chunks: Sequence[Span],
        device: torch.device,
    ) -> Sample | None:
        """The sample of a forward that computes `rows`, of which `sampled` are the sample; None if it is too small.

        Rows that were `repaired` before neither show the change nor need a correction.
        """
        sampled = np.setdiff1d(np.intersect1d(sampled, rows), repaired)
        members = [sampled[(sampled >= c.start) & (sampled < c.stop)] for c in chunks]
        positions = np.concatenate([sampled[:0], *members])
        if len(positions) < MIN_SAMPLE:
            return None
        known = np.union1d(rows, repaired)
        rests = [np.setdiff1d(np.arange(c.start, c.stop), known) for c in chunks]

        def numbers(groups: Sequence[np.ndarray[Any, Any]]) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.arange(len(groups)), [len(g) for g in groups])).to(device)

        return cls(
            chunks,
            torch.from_numpy(np.searchsorted(rows, positions)).long().to(device),
            torch.from_numpy(positions).long().to(device),
            numbers(members),
            torch.from_numpy(np.concatenate(rests)).long().to(device),
            numbers(rests),
            torch.tensor([float(len(m)) for m in members], device=device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """What was added to the rows of each chunk: `added` holds one row per chunk, keys before rotation.

    `unexplained` is the share of the sampled values' energy that the means leave, per layer: how far the rows that were
    not recomputed may still be off.
    """

    chunks: Sequence[Span]
    added: tuple[LayerKV, ...]
    unexplained: list[float] = field(default_factory=list)

    def plus(self, later: Correction) -> Correction:
        """Both corrections of the same chunks, one after the other."""
        pairs = zip(self.added, later.added, strict=True)
        added = tuple(LayerKV(a.keys + b.keys, a.values + b.values) for a, b in pairs)
        return Correction(self.chunks, added, later.unexplained)


class CorrectingLayer(SpliceLayer):
    """A splice layer that corrects the rows which its forward does not compute."""

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: torch.Tensor,
        sample: Sample,
        turn: LayerRotation,
        added: tuple[torch.Tensor, torch.Tensor],
        correct: bool,
    ) -> None:
        """`added` (keys and values, [H, C, D]) is written; without `correct` the sample is measured only."""
        super().__init__(keys, values, rows)
        self.sample, self.turn, self.added, self.correct = sample, turn, added, correct
        self.unexplained = torch.zeros((), device=keys.device)  # read after the forward: reading waits for the device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `SpliceLayer.update`, after adding the sample's shrunken mean change to the other rows."""
        self._correct("keys", self.keys[0], key_states[0], self.added[0])
        self._correct("values", self.values[0], value_states[0], self.added[1])
        return super().update(key_states, value_states)

    def _correct(self, slot: str, stored: torch.Tensor, fresh: torch.Tensor, added: torch.Tensor) -> None:
        """`stored` [H, T, D], `fresh` [H, m, D]; `added` [H, C, D] is written."""
        s, rotated = self.sample, slot == self.turn.spec.slot
        change = fresh[:, s.at].float() - stored[:, s.positions].float()
        if rotated:
            change = self.turn.apply(change, s.positions, inverse=True)
        means = shrunken_means(change, s.chunk, s.counts) * self.correct
        added.copy_(means)
        if slot == "values":
            left = (change - means[:, s.chunk]).pow(2).sum()
            self.unexplained = left / fresh[:, s.at].float().pow(2).sum().clamp_min(1e-12)
        if self.correct:
            means = means[:, s.rest_chunk]
            means = self.turn.apply(means, s.rest) if rotated else means
            stored.index_add_(1, s.rest, means.to(stored.dtype))


def shrunken_means(change: torch.Tensor, chunk: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The mean change of all rows, and what each chunk has besides, both shrunk. `change` [H, S, D] -> [H, C, D]."""
    change = clipped(change)
    everything = torch.zeros_like(chunk)
    common = shrunken_mean(change, everything, counts.sum()[None])
    return common + shrunken_mean(change - common, chunk, counts)


def clipped(change: torch.Tensor) -> torch.Tensor:
    """Changes [H, S, D] of which none is longer than `CLIP` times its head's median length.

    A few rows, of delimiters most of all, change by far more than the others and would make the mean their own.
    """
    length = change.norm(dim=-1, keepdim=True)
    limit = CLIP * length.median(1, keepdim=True).values
    scaled: torch.Tensor = change * (limit / length.clamp_min(1e-12)).clamp_max(1)
    return scaled


def shrunken_mean(change: torch.Tensor, chunk: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Per chunk and head the mean of `change` [H, S, D], shrunk by max(0, 1 - var(mean) / |mean|^2): [H, C, D].

    A chunk with fewer than two rows gets zero: nothing is known of the variance.
    """
    heads, _, dim = change.shape
    n = counts[None, :, None].clamp_min(1)
    mean = change.new_zeros(heads, len(counts), dim).index_add_(1, chunk, change) / n
    spread = (change - mean[:, chunk]).pow_(2)
    variance = change.new_zeros(heads, len(counts), dim).index_add_(1, chunk, spread) / (n - 1).clamp_min(1) / n
    explained = 1 - variance.sum(-1, keepdim=True) / mean.pow(2).sum(-1, keepdim=True).clamp_min(1e-12)
    return mean * explained.clamp_(0, 1) * (n > 1)


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
    positions = torch.arange(num_tokens, device=layout.device)
    for group in layout.groups:
        spec = group.rotary[regime]
        if spec.style == "none":
            turns.update({i: LayerRotation(spec, torch.empty(0), torch.empty(0)) for i in group.layers})
            continue
        table = make_rotation(spec, torch.zeros_like(positions), positions)
        for i, layer in enumerate(group.layers):
            own = table.cos.dim() == 4
            cos, sin = (table.cos[i, 0], table.sin[i, 0]) if own else (table.cos, table.sin)
            turns[layer] = LayerRotation(spec, cos, sin)
    return [turns[i] for i in range(len(layout.layers))]


def correcting_layers(
    layout: KVLayout, layers: Sequence[SpliceLayer], sample: Sample, regime: int, num_tokens: int, *, correct: bool
) -> tuple[list[CorrectingLayer], tuple[LayerKV, ...]]:
    """Correcting layers in place of plain ones, and the rows into which they write what they add."""
    added = layout.allocate(len(sample.chunks))
    turns = layer_rotations(layout, regime, num_tokens)
    slots = zip(*layout.per_layer(added), strict=True)
    correcting = [
        CorrectingLayer(la.keys, la.values, la.rows, sample, turn, (keys[0], values[0]), correct)
        for la, turn, (keys, values) in zip(layers, turns, slots, strict=True)
    ]
    return correcting, added
