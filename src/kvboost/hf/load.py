"""Writes stored rows into the place of a prompt: copied when they did not move, rotated once when they did."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvboost.hf.layout import KVLayout
from kvboost.rotary import RotarySpec, Rotation, make_rotation
from kvboost.types import ChunkKV, Int32Array, Kind, LayerKV, ReusePlan, Segment


@dataclass(slots=True)
class LoadTimes:
    """Seconds spent copying rows, and rotating them."""

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
        rotation = _rotation(pieces, spec, num_rows, layout.device)
        times.shift_s += time.perf_counter() - began
        for piece in pieces:
            for slot in ("keys", "values"):
                began = time.perf_counter()
                moved = piece.is_moved and spec.slot == slot
                piece.write(i, slot, payload[i], rotation if moved else None, spec)
                spent = time.perf_counter() - began
                if moved and rotation is not None:
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

    def write(self, group: int, slot: str, target: LayerKV, rotation: Rotation | None, spec: RotarySpec) -> None:
        """Copies or rotates one slot of one layer group to its place, then applies what a link has of its own."""
        span = self.segment.span
        rows = getattr(self.donor.payload[group], slot)[:, :, self.offset : self.offset + len(span)]
        out = getattr(target, slot)[:, :, span.start : span.stop]
        if rotation is None:
            out.copy_(rows)
        else:
            rotation.apply(rows.to(out.device), slice(span.start, span.stop), out)
        if self.record.header.corrected:
            self._add_correction(getattr(self.record.payload[group], slot)[:, :, -1:], spec, slot, out)
        if self.record.header.rows is not None:
            self._overlay(getattr(self.record.payload[group], slot), self.record.header.rows, out)

    def _add_correction(self, row: torch.Tensor, spec: RotarySpec, slot: str, out: torch.Tensor) -> None:
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


def _rotation(pieces: Sequence[_Piece], spec: RotarySpec, num_rows: int, device: torch.device) -> Rotation | None:
    """One table of angles for all rows of the prompt: many small ones would cost more than the rotation."""
    if spec.style == "none" or not any(p.is_moved for p in pieces):
        return None
    new = torch.arange(num_rows, device=device)
    old = new.clone()
    for piece in pieces:
        span = piece.segment.span
        old[span.start : span.stop] += piece.position - span.start
    return make_rotation(spec, old, new)
