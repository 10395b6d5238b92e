"""The break-even length: how long a run of moved text must be before reusing it costs less than computing it.

Reusing n tokens costs copying them, rotating their keys, and computing the rows that repair recomputes. Computing them
costs what n more rows add to the forward, which runs anyway for the last token. Both are measured as the engine does
them, behind a context of a few hundred rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvboost.hf.assembly import Assembly
from kvboost.hf.declared import max_positions
from kvboost.hf.load import load_rows
from kvboost.types import ChunkHeader, ChunkKey, ChunkKV, Kind, Lineage, ReusePlan, Segment, Span

if TYPE_CHECKING:
    from kvboost.engine import KVBoost

CONTEXT_TOKENS = 512
RUN_TOKENS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REPEATS = 5
_RECORD = b"measured"


@dataclass(frozen=True, slots=True)
class RunCost:
    """Seconds that a run of `tokens` adds to a request when it is computed, and when it is reused and repaired."""

    tokens: int
    compute_s: float
    reuse_s: float


def measure_costs(kv: KVBoost) -> list[RunCost]:
    """Costs for growing runs. The model must support MOVED reuse. Takes a few seconds for a small model on a CPU."""
    settings = kv.settings()
    head = settings.recompute_head_tokens if settings.recompute_strategy == "epic" else 0
    limit = max_positions(kv.model.config.get_text_config()) or 2 * CONTEXT_TOKENS
    context = min(CONTEXT_TOKENS, limit // 2)
    lengths = [n for n in RUN_TOKENS if context + n < limit]
    rows = sorted({1, 1 + head, *(1 + n for n in lengths)})
    forward = _fastest({m: partial(_forward, kv, context, m) for m in rows})
    seconds = dict(zip(rows, np.maximum.accumulate([forward[m] for m in rows]).tolist(), strict=True))
    load = _fastest({n: partial(_load, kv, context, n) for n in lengths})
    return [RunCost(n, seconds[1 + n] - seconds[1], load[n] + seconds[1 + min(n, head)] - seconds[1]) for n in lengths]


def break_even(costs: Sequence[RunCost]) -> int | None:
    """The length from which reuse stays cheaper, interpolated; None if it never is among the measured lengths."""
    gains = [c.compute_s - c.reuse_s for c in costs]
    last_loss = max((i for i, gain in enumerate(gains) if gain <= 0), default=-1)
    if last_loss == len(costs) - 1:
        return None
    if last_loss < 0:
        return costs[0].tokens
    (low, lost), (high, won) = ((costs[i].tokens, gains[i]) for i in (last_loss, last_loss + 1))
    return round(low + (high - low) * -lost / (won - lost))


def _fastest(actions: Mapping[int, Callable[[], float]]) -> dict[int, float]:
    """The shortest of several durations per action, taken in turns so that a slow moment hits all alike."""
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(REPEATS):
        for key, action in actions.items():
            best[key] = min(best[key], action())
    return best


def _forward(kv: KVBoost, context: int, num_rows: int) -> float:
    total = context + num_rows
    payload = kv.support.require_layout().allocate(total)
    for group in payload:
        group.keys.zero_()
        group.values.zero_()
    ids = torch.full((1, total), 5, device=kv.model.device)
    rows = torch.arange(context, total, device=kv.model.device)
    block = kv.settings().query_block_tokens
    assembly = Assembly(kv.model, kv.support, ids, ReusePlan.nothing(total), payload, block)
    began = time.perf_counter()
    assembly.forward(rows, assembly.splice_layers(rows))
    _wait(kv)
    return time.perf_counter() - began


def _load(kv: KVBoost, context: int, num_tokens: int) -> float:
    layout = kv.support.require_layout()
    key = ChunkKey(_RECORD, _RECORD)
    header = ChunkHeader(key, b"", context, np.arange(num_tokens, dtype=np.int32), Lineage.BIT_EXACT)
    payload = layout.allocate(num_tokens)
    for group in payload:
        group.keys.fill_(0.5)
        group.values.fill_(0.5)
    record = ChunkKV(header, payload)
    plan = ReusePlan(num_tokens, (Segment(Span(0, num_tokens), Kind.MOVED, _RECORD, 0, context),))
    began = time.perf_counter()
    load_rows(plan, {_RECORD: record}, layout, 0, num_tokens)
    _wait(kv)
    return time.perf_counter() - began


def _wait(kv: KVBoost) -> None:
    if kv.model.device.type == "cuda":
        torch.cuda.synchronize(kv.model.device)
