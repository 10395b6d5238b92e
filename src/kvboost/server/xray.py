"""The X-ray of a prompt: each token's kind, where its rows came from, and what a full prefill would have cost.

Requests can be kept for it, in a ring that is off unless an operator asks for it: it holds what users sent.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvboost.config import Settings
from kvboost.engine import KVBoost
from kvboost.metrics import configured_recompute_ratio
from kvboost.repair import gate
from kvboost.store.memory import MemoryTier
from kvboost.store.tier import StoredRecord
from kvboost.tokenmap import REPAIRED, token_texts
from kvboost.types import Int32Array, Kind, ReusePlan, ReuseReport, Segment

HASH_BYTES = 32  # of each half of a record id


@dataclass(frozen=True, slots=True, eq=False)
class SeenRequest:
    """A request that was answered. `at_s` is Unix time."""

    request_id: str
    at_s: float
    input_ids: Int32Array  # [T]
    plan: ReusePlan
    report: ReuseReport
    namespace: str = ""  # the settings cache_salt and session that it had
    session: str = ""

    def summary(self) -> dict[str, Any]:
        """What may be listed without its text."""
        counts = asdict(self.report)
        told = ("prompt_tokens", "exact_tokens", "continued_tokens", "moved_tokens", "repaired_tokens", "fresh_tokens")
        times = ("ttft_s", "risk", "fallback")
        whose = {"namespace": self.namespace, "session": self.session}
        return {
            "request_id": self.request_id,
            "at_s": self.at_s,
            **whose,
            **{name: counts[name] for name in (*told, *times)},
        }


class RequestRing:
    """The last `capacity` requests, with their prompts; 0 keeps nothing. Thread-safe."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, SeenRequest] = OrderedDict()

    def add(
        self,
        request_id: str,
        input_ids: Sequence[int],
        plan: ReusePlan | None,
        report: ReuseReport | None,
        *,
        namespace: str = "",
        session: str = "",
    ) -> None:
        """Keeps a request that has ended. One without plan or report was not answered and is left out."""
        if not self.capacity or plan is None or report is None or plan.num_tokens != len(input_ids):
            return
        ids = np.asarray(input_ids, np.int32)
        seen = SeenRequest(request_id, time.time(), ids, plan, report, namespace, session)
        with self._lock:
            self._seen.pop(request_id, None)
            self._seen[request_id] = seen
            while len(self._seen) > self.capacity:
                self._seen.popitem(last=False)

    def latest(self) -> list[SeenRequest]:
        """All that are kept, the latest first."""
        with self._lock:
            return list(reversed(self._seen.values()))

    def get(self, request_id: str) -> SeenRequest | None:
        """One of them, None if it is gone or was never kept."""
        with self._lock:
            return self._seen.get(request_id)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._seen.clear()


def xray(kv: KVBoost, input_ids: Sequence[int], plan: ReusePlan) -> dict[str, Any]:
    """The plan of a prompt, drawable: `tokens` and `segments` cover it once, in order.

    `cost` compares with a full prefill, in seconds as the kept chunks took them; None where none of them is known.
    """
    kinds = _kinds(plan)
    known = sources(kv, plan)
    texts = token_texts(input_ids, kv.tokenizer) if kv.tokenizer is not None else [""] * len(input_ids)
    tokens = [{"text": t, "kind": k} for t, k in zip(texts, kinds, strict=True)]
    return {
        "num_tokens": plan.num_tokens,
        "counts": {kind: kinds.count(kind) for kind in (*(k.value for k in Kind), REPAIRED)},
        "tokens": tokens,
        "segments": [_segment(s, known.get(s.record_id or b"")) for s in plan],
        "cost": _cost(kv, plan, known),
    }


def sources(kv: KVBoost, plan: ReusePlan) -> Mapping[bytes, tuple[str, StoredRecord]]:
    """Where each record of the plan stands right now: the fastest tier, and what that knows of it."""
    found: dict[bytes, tuple[str, StoredRecord]] = {}
    for tier in kv.store.tiers:
        wanted = {s.record_id for s in plan if s.record_id is not None} - found.keys()
        if isinstance(tier, MemoryTier):
            found |= {i: (tier.name, record) for i, record in tier.stored(wanted).items()}
        elif wanted:
            headers = (h for listed in tier.find([i[HASH_BYTES:] + b"end" for i in wanted]).values() for h in listed)
            records = ((h.record_id, StoredRecord(h.record_id, h, 0)) for h in headers if h.record_id in wanted)
            found |= {i: (tier.name, record) for i, record in records}
    return found


def _kinds(plan: ReusePlan) -> list[str]:
    """Of every token; repaired ones apart from the other moved ones."""
    kinds = [s.kind.value for s in plan for _ in range(len(s.span))]
    for position in plan.repaired.tolist():
        kinds[position] = REPAIRED
    return kinds


def _segment(segment: Segment, source: tuple[str, StoredRecord] | None) -> dict[str, Any]:
    told: dict[str, Any] = {"start": segment.span.start, "stop": segment.span.stop, "kind": segment.kind.value}
    if segment.kind is Kind.FRESH or segment.record_id is None:
        return told
    told |= {
        "record": segment.record_id[-HASH_BYTES:].hex()[:12],
        "source_position": segment.source_position,
        "shift": segment.shift,
        "joined": segment.joined,
        "tier": None,
    }
    if source is None:  # evicted since
        return told
    tier, record = source
    header = record.header
    return told | {
        "tier": tier,
        "age_s": round(time.time() - record.stored_at_s, 3) if record.stored_at_s else None,
        "unused_s": round(time.time() - record.used_at_s, 3) if record.used_at_s else None,
        "hits": record.hits if record.stored_at_s else None,
        "lineage": header.lineage.name.lower() if header is not None else None,
        "codec": header.codec if header is not None else None,
    }


def _cost(kv: KVBoost, plan: ReusePlan, known: Mapping[bytes, tuple[str, StoredRecord]]) -> dict[str, Any]:
    fresh, moved = plan.count(Kind.FRESH), plan.count(Kind.MOVED)
    planned = len(plan.repaired) if len(plan.repaired) else round(_first_budget(kv.settings(), plan) * moved)
    computed = fresh + planned
    per_token_s = _seconds_per_token(known)
    full_s = None if per_token_s is None else per_token_s * plan.num_tokens
    return {
        "full_tokens": plan.num_tokens,
        "computed_tokens": computed,
        "repaired_tokens": planned,
        "repaired_is_estimated": not len(plan.repaired) and moved > 0,
        "full_prefill_s": full_s,
        "computed_s": None if per_token_s is None else per_token_s * computed,
    }


def _first_budget(settings: Settings, plan: ReusePlan) -> float:
    """Share of the moved rows that is likely to be recomputed."""
    return gate.budgets(settings, plan)[0] if configured_recompute_ratio(settings) else 0.0


def _seconds_per_token(known: Mapping[bytes, tuple[str, StoredRecord]]) -> float | None:
    headers = [r.header for _, r in known.values() if r.header is not None and r.header.cost_s > 0]
    tokens = sum(len(h.tokens) for h in headers)
    return sum(h.cost_s for h in headers) / tokens if tokens else None
