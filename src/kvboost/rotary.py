"""Rotary position embedding, seen from the cache: find how a model rotates its keys, and move keys that were stored.

RoFormer (Su et al. 2021) rotates pairs of key dimensions by `position * inv_freq`. Two rotations compose, so a key that
was computed at one position can be moved to another by one more rotation. *half* pairs dimension i with i + R/2
(Llama, NeoX); *interleaved* pairs 2i with 2i + 1 (GPT-J, Cohere).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Style = Literal["half", "interleaved", "none"]
Slot = Literal["keys", "values"]


@dataclass(frozen=True, slots=True, eq=False)
class RotarySpec:
    """How one layer rotates a slot of its cache.

    `inv_freq` float32 [R/2] in radians per position; dimensions `start ... start + R` of `slot` are rotated.
    """

    style: Style
    inv_freq: torch.Tensor
    start: int = 0
    slot: Slot = "keys"

    @property
    def stop(self) -> int:
        """One past the last rotated dimension."""
        return self.start + 2 * self.inv_freq.shape[-1]


NO_ROTATION = RotarySpec("none", torch.empty(0))


def angles(positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Angles as a model computes them: the product is rounded to float32. [n], [..., R/2] -> float64 [..., n, R/2]."""
    return (positions.float()[:, None] * inv_freq.float()[..., None, :]).double()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, style: Style, out: torch.Tensor) -> None:
    """Writes `x` [..., n, R], rotated, to `out` of the same shape. `cos`, `sin` float32 [..., n, R/2], broadcast.

    Arithmetic is float32; the result is rounded once to `out`'s dtype. `out` must not share memory with `x`.
    """
    if style == "interleaved":
        (a, b), (out_a, out_b) = (x[..., ::2], x[..., 1::2]), (out[..., ::2], out[..., 1::2])
    else:
        (a, b), (out_a, out_b) = x.chunk(2, -1), out.chunk(2, -1)
    if x.dtype is torch.float32 and out.dtype is torch.float32:
        torch.mul(a, cos, out=out_a)
        out_a.addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out_b)
        out_b.addcmul_(a, sin)
        return
    a, b = a.float(), b.float()
    out_a.copy_((a * cos).addcmul_(b, sin, value=-1))
    out_b.copy_((b * cos).addcmul_(a, sin))


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What moves rows from old to new positions: `cos`, `sin` float32 [n, R/2], or [L, 1, n, R/2] per layer."""

    spec: RotarySpec
    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, x: torch.Tensor, rows: slice, out: torch.Tensor) -> None:
        """Writes `x`, rotated as the given rows of this rotation, to `out`; both [L, H, n, D] or [H, n, D]."""
        start, stop = self.spec.start, self.spec.stop
        out[..., :start].copy_(x[..., :start])
        out[..., stop:].copy_(x[..., stop:])
        cos, sin = self.cos[..., rows, :], self.sin[..., rows, :]
        rotate(x[..., start:stop], cos, sin, self.spec.style, out[..., start:stop])


def make_rotation(spec: RotarySpec, old: torch.Tensor, new: torch.Tensor) -> Rotation:
    """The rotation from positions `old` to `new`, int64 [n]; `spec.inv_freq` is [R/2] or [L, R/2].

    The rounding of the model's own angles is reproduced, so moved keys equal computed keys to the last bits in float32.
    """
    if spec.inv_freq.dim() == 1:
        return Rotation(spec, *_tables(spec.inv_freq, old, new))
    # most layers share theirs, and cosines are slow
    distinct, layer = torch.unique(spec.inv_freq, dim=0, return_inverse=True)
    cos, sin = (table[layer.to(new.device), None] for table in _tables(distinct, old, new))
    return Rotation(spec, cos, sin)  # [L, 1, n, R/2]


def _tables(inv_freq: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, float32 [..., n, R/2], of the angle between two positions."""
    inv_freq = inv_freq.to(new.device)
    delta = angles(new, inv_freq) - angles(old, inv_freq)
    return delta.cos().float(), delta.sin().float()


def shift(x: torch.Tensor, old: torch.Tensor, new: torch.Tensor, spec: RotarySpec, out: torch.Tensor) -> None:
    """Writes `x`, rows computed at positions `old` int64 [n], to `out` as if computed at `new`.

    `x`, `out` [L, H, n, D] or [H, n, D]. Equal positions mean no arithmetic.
    """
    if spec.style == "none" or torch.equal(old, new):
        out.copy_(x)
    else:
        make_rotation(spec, old, new).apply(x, slice(None), out)


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A rotation that explains measured keys, and the largest error it leaves, relative to the largest key."""

    spec: RotarySpec
    error: float


def fit_rotation(
    measured: torch.Tensor, positions: Sequence[int], candidates: Iterable[torch.Tensor], tolerance: float
) -> Fit | None:
    """Finds R with `measured[i] == R(positions[i]) measured[0]`, where `positions[0] == 0`.

    `measured` float32 [P, N, D]: one slot of one layer for P positions and N independent samples. `candidates` are
    frequency vectors that the model is known to hold; they are tried first since their values are exact. Otherwise the
    frequencies are estimated from the angles. None if no rotation explains the measurement within `tolerance`.
    """
    scale = measured.abs().max().item() or 1.0
    if ((measured - measured[:1]).abs().max().item()) / scale <= tolerance / 10:
        return Fit(NO_ROTATION, 0.0)
    dim = measured.shape[-1]
    exact = [RotarySpec(s, f.float(), o) for f in candidates for s, o in _placements(dim, 2 * len(f))]
    fits = [Fit(spec, _residual(measured, positions, spec) / scale) for spec in exact]
    best = min(fits, key=lambda fit: fit.error, default=None)
    if best is None or best.error > tolerance:
        fits = [Fit(spec, _residual(measured, positions, spec) / scale) for spec in _estimate(measured, positions)]
        best = min(fits, key=lambda fit: fit.error, default=None)
    return best if best is not None and best.error <= tolerance else None


def _placements(dim: int, rotated: int) -> list[tuple[Style, int]]:
    styles: tuple[Style, ...] = ("half", "interleaved")
    return [(s, o) for s in styles for o in sorted({0, dim - rotated}) if 0 < rotated <= dim]


def _residual(measured: torch.Tensor, positions: Sequence[int], spec: RotarySpec) -> float:
    zero = torch.zeros(measured.shape[1], dtype=torch.long)
    worst = 0.0
    for i, position in enumerate(positions):
        moved = torch.empty_like(measured[0])
        shift(measured[0], zero, zero + position, spec, moved)
        worst = max(worst, (moved - measured[i]).abs().max().item())
    return worst


def _estimate(measured: torch.Tensor, positions: Sequence[int]) -> list[RotarySpec]:
    """Frequencies from phase differences, refined from small to large positions (the phase is unwrapped on the way)."""
    changed = ((measured - measured[:1]).abs().amax((0, 1)) > 0).nonzero().flatten()
    start = int(changed[0]) if len(changed) else 0
    stop = int(changed[-1]) + 1 if len(changed) else 0
    stop += (stop - start) % 2
    if stop > measured.shape[-1] or stop == start:
        return []
    styles: tuple[Style, ...] = ("half", "interleaved")
    return [RotarySpec(s, _frequencies(measured[..., start:stop], positions, s), start) for s in styles]


def _frequencies(x: torch.Tensor, positions: Sequence[int], style: Style) -> torch.Tensor:
    real, imag = (x[..., ::2], x[..., 1::2]) if style == "interleaved" else x.chunk(2, -1)
    z = torch.complex(real.double(), imag.double())
    frequency = torch.zeros(z.shape[-1], dtype=torch.float64)
    for i, position in enumerate(positions):
        if position == 0:
            continue
        phase = (z[i] * z[0].conj()).sum(0).angle()
        turns = torch.round((frequency * position - phase) / (2 * math.pi))
        frequency = (phase + 2 * math.pi * turns) / position
    return frequency.float()
