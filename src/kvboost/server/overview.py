"""What an administrator sees at a glance: what the engine counted, and the requests of the last minutes."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from kvboost import __version__
from kvboost.engine import KVBoost
from kvboost.errors import SettingsError
from kvboost.metrics import RECENT, Metrics, by_source
from kvboost.repair.gate import bound
from kvboost.types import ReuseReport

WINDOW_S = 600.0
SETTINGS = (
    "disable",
    "mode",
    "fidelity",
    "recompute_strategy",
    "recompute_ratio",
    "codec",
    "shadow_share",
    "share_moved",
    "enabled_share",
)


def overview(kv: KVBoost, metrics: Metrics) -> dict[str, Any]:
    """All that the page shows, in one answer. Percentiles are of the requests of the last `WINDOW_S` themselves."""
    service = metrics.service_stats()
    return {
        "model": metrics.model,
        "version": __version__,
        "recent": _recent(metrics),
        "prompt_tokens": by_source(kv.stats.snapshot().tokens),
        "cache": cache_stats(kv),
        "service": asdict(service) if service is not None else None,
        "settings": _settings(kv),
        "support": {"refused": kv.support.refused, "moved_refused": kv.support.moved_refused},
    }


def cache_stats(kv: KVBoost) -> dict[str, Any]:
    """Counters of the engine, and every tier."""
    stats = kv.stats.snapshot()
    return {
        "requests": stats.requests,
        "tokens": dict(stats.tokens),
        "chunk_hits": dict(stats.chunk_hits),
        "repaired": dict(stats.repaired),
        "fallbacks": dict(stats.fallbacks),
        "tiers": {name: asdict(tier) for name, tier in kv.store.stats_by_tier().items()},
        "pending_bytes": kv.store.pending_bytes,
        "shadow": without_nan(asdict(kv.shadow.stats())),
    }


def without_nan(values: dict[str, Any]) -> dict[str, Any]:
    """The values as JSON can tell them: what was not measured is None."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}


def _recent(metrics: Metrics) -> dict[str, Any]:
    now = time.time()
    seen = metrics.recent(WINDOW_S)
    reports = [report for _, report in seen]
    ttft_s = [r.ttft_s for r in reports]
    p50, p95, worst = np.quantile(ttft_s, [0.5, 0.95, 1.0]).tolist() if ttft_s else (None, None, None)
    return {
        "window_s": WINDOW_S,
        "at_most": RECENT,
        "requests": len(reports),
        "ttft_p50_s": p50,
        "ttft_p95_s": p95,
        "ttft_max_s": worst,
        "tokens": _tokens(reports),
        "points": [
            {
                "age_s": round(max(0.0, now - at_s), 1),
                "ttft_s": round(report.ttft_s, 5),
                "prompt_tokens": report.prompt_tokens,
                "reused_tokens": report.reused_tokens,
            }
            for at_s, report in seen
        ],
    }


def _tokens(reports: list[ReuseReport]) -> dict[str, int]:
    """Prompt tokens of all of them by source."""
    names = ("exact", "continued", "moved", "repaired", "fresh")
    return by_source({name: sum(getattr(r, f"{name}_tokens") for r in reports) for name in names})


def _settings(kv: KVBoost) -> dict[str, Any]:
    """Those that matter most with where they come from, or why none are in force; and what happened to the file."""
    status = kv.live.status()
    told: dict[str, Any] = {
        "generation": status.generation,
        "rejected": status.rejected,
        "last_error": status.last_error,
        "file": status.file,
        "needs_restart": list(status.needs_restart),
        "overrides": sorted(status.admin),
        "error": None,
        "values": None,
        "bound": None,
    }
    try:
        resolved = kv.live.resolve()
    except SettingsError as error:  # an invalid environment; every request says so
        return {**told, "error": str(error)}
    values = resolved.settings.model_dump(mode="json", include=set(SETTINGS))
    told["values"] = {name: {"value": values[name], "origin": resolved.origins[name]} for name in SETTINGS}
    if resolved.settings.fidelity != "exact" or resolved.settings.risk_bound is not None:
        told["bound"] = bound(resolved.settings)
    return told
