"""Writes stored rows into the place of a prompt: copied when they did not move, rotated once when they did.

Packed rows (`kvboost.codec`) are stored before rotation, so they are rotated once in either case.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvboost.codec import SLOTS, Turns, has_plain_rows, read_rows
from kvboost.hf.layout import KVLayout
from kvboost.rotary import RotarySpec, Rotation, Slot, make_rotation
from kvboost.types import ChunkKV, Int32Array, Kind, LayerKV, PackedKV, ReusePlan, Segment


@dataclass(slots=True)
class LoadTimes:
    """Seconds spent copying or unpacking rows, and rotating them; rows that need both count as rotated."""

    load_s: float = 0.0
    shift_s: float = 0.0


def load_rows(
    plan: ReusePlan,
    records: Mapping[bytes, ChunkKV],
    layout: KVLayout,
    regime: int,
    num_rows: int,
) -> tuple[tuple[LayerKV, ...], LoadTimes]:
    """Allocates `num_rows` rows per layer group and fills those that the plan reuses; FRESH rows are zero."""
    payload, times = layout.allocate(num_rows), LoadTimes()
    for span in plan.spans(Kind.FRESH):
        for rows in payload:
            rows.keys[:, :, span.start : span.stop] = 0
            rows.values[:, :, span.start : span.stop] = 0
    pieces = [_Piece.of(s, records) for s in plan if s.record_id is not None and s.span.start < num_rows]
    for i, group in enumerate(layout.groups):
        spec = group.rotary[regime]
        began = time.perf_counter()
        turns = _turns(pieces, i, spec, num_rows, layout.device)
        times.shift_s += time.perf_counter() - began
        for piece in pieces:
            for slot in SLOTS:
                began = time.perf_counter()
                piece.write(i, slot, payload[i], turns)
                spent = time.perf_counter() - began
                if spec.slot == slot and spec.style != "none" and piece.is_turned(i):
                    times.shift_s += spent
                else:
                    times.load_s += spent
    return payload, times


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Rows of a prompt and the record whose rows serve them; a linked record takes them from its source."""

    segment: Segment
    record: ChunkKV
    donor: ChunkKV
    offset: int  # of the first row in the donor

    @classmethod
    def of(cls, segment: Segment, records: Mapping[bytes, ChunkKV]) -> _Piece:
        record = records[segment.record_id or b""]
        link = record.header.source
        if link is None:
            return cls(segment, record, record, segment.offset)
        return cls(segment, record, records[link.record_id], segment.offset + link.offset)

    @property
    def position(self) -> int:
        """Where the first row was computed."""
        return self.donor.header.position + self.offset

    @property
    def is_moved(self) -> bool:
        return self.position != self.segment.span.start

    def is_turned(self, group: int) -> bool:
        """Whether rows of this layer group must be rotated: they were moved, or are stored before rotation."""
        return self.is_moved or isinstance(self.donor.payload[group], PackedKV)

    def write(self, group: int, slot: Slot, target: LayerKV, turns: Turns) -> None:
        """Copies, rotates or unpacks one slot of one layer group to its place, and adds what a link has of its own."""
        span, header = self.segment.span, self.record.header
        out = getattr(target, slot)[:, :, span.start : span.stop]
        if not self.is_moved:
            turns = replace(turns, moved=None)
        read_rows(self.donor.payload[group], slot, self.offset, out, turns, span)
        if header.source is None:
            return
        own = self.record.payload[group].named()[slot]
        if header.corrected:
            self._add_correction(own[:, :, -1:], turns.spec, slot, out)
        if header.rows is not None:
            self._overlay(own, header.rows, out)

    def _add_correction(self, row: torch.Tensor, spec: RotarySpec, slot: Slot, out: torch.Tensor) -> None:
        """Adds one row [L, H, 1, D], stored before rotation, to every row of `out` [L, H, n, D]."""
        added = row.to(out.device).float().expand(out.shape).contiguous()
        if spec.slot == slot and spec.style != "none":
            new = torch.arange(self.segment.span.start, self.segment.span.stop, device=out.device)
            turned = torch.empty_like(added)
            make_rotation(spec, torch.zeros_like(new), new).apply(added, slice(None), turned)
            added = turned
        out += added.to(out.dtype)

    def _overlay(self, own: torch.Tensor, offsets: Int32Array, out: torch.Tensor) -> None:
        """Lays a link's own rows, at `offsets` of its chunk, over `out`."""
        rows = torch.from_numpy(offsets).long() - self.segment.offset
        wanted = (rows >= 0) & (rows < len(self.segment.span))
        held = own[:, :, : len(offsets)][:, :, wanted.to(own.device)]
        out[:, :, rows[wanted].to(out.device)] = held.to(out.device)


def _turns(pieces: Sequence[_Piece], group: int, spec: RotarySpec, num_rows: int, device: torch.device) -> Turns:
    """The rotations that the pieces need in one layer group."""
    if spec.style == "none":
        return Turns(spec)
    donors = [p.donor.payload[group] for p in pieces]
    moving = [p for p, donor in zip(pieces, donors, strict=True) if p.is_moved and has_plain_rows(donor)]
    packed = [p for p, donor in zip(pieces, donors, strict=True) if isinstance(donor, PackedKV)]
    return Turns(
        spec, _rotation(moving, spec, num_rows, device), _rotation(packed, spec, num_rows, device, from_zero=True)
    )


def _rotation(
    pieces: Sequence[_Piece], spec: RotarySpec, num_rows: int, device: torch.device, *, from_zero: bool = False
) -> Rotation | None:
    """One table of angles for all rows of the prompt: many small ones would cost more than the rotation."""
    if not pieces:
        return None
    new = torch.arange(num_rows, device=device)
    if from_zero:
        return make_rotation(spec, torch.zeros_like(new), new)
    old = new.clone()
    for piece in pieces:
        span = piece.segment.span
        old[span.start : span.stop] += piece.position - span.start
    return make_rotation(spec, old, new)
