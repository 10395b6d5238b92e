"""Writes stored rows into the place of a prompt: copied when they did not move, rotated once when they did."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvboost.hf.layout import KVLayout, LayerGroup
from kvboost.rotary import RotarySpec, shift
from kvboost.types import ChunkKV, LayerKV, ReusePlan, Segment, Span


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
    """Allocates `num_rows` rows per layer group and fills those that the plan reuses; the others hold anything."""
    payload, times = layout.allocate(num_rows), LoadTimes()
    for segment in plan:
        if segment.record_id is not None and segment.span.start < num_rows:
            _load_segment(segment, records, layout, regime, payload, times)
    return payload, times


def _load_segment(
    segment: Segment,
    records: Mapping[bytes, ChunkKV],
    layout: KVLayout,
    regime: int,
    payload: Sequence[LayerKV],
    times: LoadTimes,
) -> None:
    record = records[segment.record_id or b""]
    link = record.header.source
    donor = record if link is None else records[link.record_id]
    offset = segment.offset + (0 if link is None else link.offset)
    for i, group in enumerate(layout.groups):
        _copy(donor, i, offset, segment.span, group, regime, payload[i], times)
        if record.header.rows is not None:
            _overlay(record, i, segment, payload[i])


def _copy(
    donor: ChunkKV,
    index: int,
    offset: int,
    span: Span,
    group: LayerGroup,
    regime: int,
    target: LayerKV,
    times: LoadTimes,
) -> None:
    source, size = donor.payload[index], len(span)
    position = donor.header.position + offset
    spec = group.rotary[regime]
    moved = position != span.start and spec.style != "none"
    for slot in ("keys", "values"):
        rows = getattr(source, slot)[:, :, offset : offset + size]
        out = getattr(target, slot)[:, :, span.start : span.stop]
        began = time.perf_counter()
        if moved and spec.slot == slot:
            _shift_on_device(rows, position, span.start, spec, out)
            times.shift_s += time.perf_counter() - began
        else:
            out.copy_(rows)
            times.load_s += time.perf_counter() - began


def _shift_on_device(rows: torch.Tensor, old: int, new: int, spec: RotarySpec, out: torch.Tensor) -> None:
    steps = torch.arange(rows.shape[2], device=out.device)
    here = RotarySpec(spec.style, spec.inv_freq.to(out.device), spec.start, spec.slot)
    shift(rows.to(out.device), steps + old, steps + new, here, out)


def _overlay(record: ChunkKV, index: int, segment: Segment, target: LayerKV) -> None:
    """Rows that a linked record holds itself (they were repaired) replace those of its source."""
    rows = torch.from_numpy(record.header.rows).long()
    wanted = (rows >= segment.offset) & (rows < segment.offset + len(segment.span))
    where = (rows[wanted] - segment.offset + segment.span.start).to(target.keys.device)
    mine = wanted.to(target.keys.device)
    target.keys[:, :, where] = record.payload[index].keys[:, :, mine]
    target.values[:, :, where] = record.payload[index].values[:, :, mine]
