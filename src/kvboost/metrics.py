"""Metrics for Prometheus. The only module that knows prometheus_client, and it keeps to a registry of its own.

What an engine counts is read when it is scraped; times are observed per request. Counters never go back, whatever
happens to the engine behind them, and no label value comes from what a user sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvboost import __version__
from kvboost.config import Settings
from kvboost.engine import CACHE_FAILED, OBSERVING, OUT_OF_MEMORY, KVBoost
from kvboost.errors import SettingsError
from kvboost.hf.generation import UNSERVED_OPTIONS
from kvboost.hf.quant_probe import QuantProbe
from kvboost.prefilling import GIVEN_UP
from kvboost.repair.gate import BUDGETS, bound
from kvboost.serving import ServiceStats
from kvboost.store.tier import TierStats
from kvboost.types import ReuseReport

logger = logging.getLogger("kvboost")

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
EVICTION_REASONS = ("importance_low", "quota", "ttl", "oom", "invalidated")
OUTCOMES = ("stop", "length", "eos", "deadline", "cancelled", "failed", "refused")
SOURCES = ("exact", "continued", "moved", "repaired", "fresh")
RECENT = 500  # requests of which the report is kept, for those who look at single ones
TIER_ERRORS: Mapping[str, Sequence[str]] = {  # that are told while they are zero: a first one is an increase then
    "memory": ("raised", "encode_failed", "write_failed", "queue_full"),
    "disk": ("damaged", "missing", "full", "permission", "busy", "io", "index", "unsupported"),
    "redis": ("timeout", "unreachable", "refused", "damaged", "full", "open"),
}
OTHER = "other"
FALLBACKS: Mapping[str, str] = {
    "switched off": "switched_off",
    OBSERVING: "observing",
    CACHE_FAILED: "cache_failed",
    OUT_OF_MEMORY: "out_of_memory",
    GIVEN_UP: "risk_above_bound",
    "the model is in train mode": "train_mode",
    "the caller brings a cache": "own_cache",
    "the prompt is not a tensor of token ids": "no_token_ids",
    "batch size is not 1": "batch",
    "the prompt has fewer than two tokens": "too_short",
    "the prompt is padded": "padded",
    "autocast is on": "autocast",
    "use_cache is False": "generate_option",
    "positional arguments after the prompt": "generate_option",
    **dict.fromkeys(UNSERVED_OPTIONS.values(), "generate_option"),
}
"""Label values of the reasons for which (a part of) the cache was not used; all others are `other`."""


@dataclass(frozen=True, slots=True)
class Definition:
    """A metric as it is exposed, but for its name."""

    kind: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: Mapping[str, Definition] = {
    "kvboost_cache_hits_total": Definition(
        "counter",
        "Chunks served from the cache: exact, continued, or by how moved ones are repaired.",
        ("model", "strategy"),
    ),
    "kvboost_prompt_tokens_total": Definition(
        "counter", "Prompt tokens by where their rows came from; the sources sum to all prompt tokens.", ("source",)
    ),
    "kvboost_recompute_tokens_total": Definition("counter", "Moved tokens that were computed again.", ("strategy",)),
    "kvboost_fallbacks_total": Definition("counter", "Requests that (a part of) the cache did not serve.", ("reason",)),
    "kvboost_requests_total": Definition("counter", "Requests that have ended.", ("outcome",)),
    "kvboost_requests_running": Definition("gauge", "Requests that are prefilled or decoded now."),
    "kvboost_queue_length": Definition("gauge", "Requests that wait."),
    "kvboost_ttft_seconds": Definition("histogram", "Time from a request to its first token."),
    "kvboost_prefill_seconds": Definition("histogram", "Time that the forwards over a prompt took."),
    "kvboost_cache_bytes": Definition("gauge", "Bytes that a tier holds, metadata included.", ("tier",)),
    "kvboost_cache_limit_bytes": Definition("gauge", "Budget of a tier; 0 if it has none of its own.", ("tier",)),
    "kvboost_cache_entries": Definition("gauge", "Chunks that a tier holds.", ("tier",)),
    "kvboost_cache_evictions_total": Definition("counter", "Chunks that left a tier.", ("reason",)),
    "kvboost_tier_errors_total": Definition(
        "counter", "Failures of a tier; each was a miss, or a chunk not kept.", ("tier", "kind")
    ),
    "kvboost_quant_error_psnr": Definition("gauge", "Signal to noise of packed rows, worst head, now; dB.", ("kind",)),
    "kvboost_quant_error_psnr_at_load": Definition("gauge", "The same, when it was first measured; dB.", ("kind",)),
    "kvboost_shadow_kl": Definition("summary", "KL of answers against full prefills, last checks; nat.", ("quantile",)),
    "kvboost_shadow_bound": Definition("gauge", "The KL that the settings tolerate; nat."),
    "kvboost_shadow_checks_total": Definition("counter", "Requests that were checked by a full prefill."),
    "kvboost_moved_suspended": Definition("gauge", "1 while inexact reuse is suspended by what the checks found."),
    "kvboost_settings_generation": Definition("gauge", "Changes of the settings since the start."),
    "kvboost_settings_rejected_total": Definition("counter", "Versions of the settings file that were refused."),
    "kvboost_disabled": Definition("gauge", "1 while the cache is switched off."),
    "kvboost_configured_recompute_ratio": Definition(
        "gauge", "Share of the moved rows that is recomputed at first; of short runs, more."
    ),
    "kvboost_build_info": Definition("gauge", "Always 1; versions.", ("version", "transformers", "torch")),
}
"""Every metric of ours, by the name that Prometheus stores."""

Sample = tuple[str, tuple[str, ...], float]  # metric, label values, value


class Metrics:
    """The metrics of one engine, and of the service in front of it. Thread-safe."""

    def __init__(
        self, kv: KVBoost, *, model: str, service_stats: Callable[[], ServiceStats] | None = None, process: bool = True
    ) -> None:
        """`model` is the served name, a label. With `process`, memory and CPU time of the process are told too."""
        self.model = model
        self._service_stats = service_stats
        self._recent: deque[tuple[float, ReuseReport]] = deque(maxlen=RECENT)
        self._recent_lock = threading.Lock()
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector(kv, model, service_stats)
        self._registry.register(self._engine)
        if process:
            ProcessCollector(registry=self._registry)
        self._ttft = self._histogram("kvboost_ttft_seconds")
        self._prefill = self._histogram("kvboost_prefill_seconds")

    def observe(self, report: ReuseReport) -> None:
        """Adds the times of a request that has ended."""
        self._ttft.observe(report.ttft_s)
        self._prefill.observe(report.prefill_s)
        if report.ttft_s > 0:  # one that was given up before has no first token
            with self._recent_lock:
                self._recent.append((time.time(), report))

    def recent(self, within_s: float) -> list[tuple[float, ReuseReport]]:
        """Requests with a first token that ended in the last `within_s`: Unix time and report, the latest last.

        At most `RECENT` are kept.
        """
        since_s = time.time() - within_s
        with self._recent_lock:
            return [(at_s, report) for at_s, report in self._recent if at_s >= since_s]

    def service_stats(self) -> ServiceStats | None:
        """What the service in front of the engine says of itself; None without one."""
        return self._service_stats() if self._service_stats is not None else None

    def rebind(self, kv: KVBoost) -> None:
        """Goes on with another engine; what the former counted stays in the sums."""
        self._engine.rebind(kv)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type; `accept` is the scraper's header."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _histogram(self, name: str) -> Histogram:
        return Histogram(name, METRICS[name].help, buckets=BUCKETS_S, registry=self._registry)


class _EngineCollector(Collector):
    """Reads everything but the histograms when it is scraped."""

    def __init__(self, kv: KVBoost, model: str, service_stats: Callable[[], ServiceStats] | None) -> None:
        self._kv = kv
        self._model = model
        self._service_stats = service_stats
        self._lock = threading.Lock()
        self._sums = _GrowingSums()

    def describe(self) -> Iterable[Metric]:
        """Names only: registering must not ask the engine."""
        return [_family(name) for name, d in METRICS.items() if d.kind != "histogram"]

    def collect(self) -> Iterable[Metric]:
        """All families. A source that fails is left out and logged; a scrape does not fail."""
        with self._lock:
            families = {name: _family(name) for name, d in METRICS.items() if d.kind != "histogram"}
            for name, labels, value in self._read():
                _add(families[name], name, labels, value)
            for name, labels, value in self._sums.all():  # what an earlier engine counted too
                _add(families[name], name, labels, value)
            return list(families.values())

    def rebind(self, kv: KVBoost) -> None:
        """See `Metrics.rebind`."""
        with self._lock:
            list(self._read())
            self._sums.restart(lambda name: name != "kvboost_requests_total")  # the service stays
            self._kv = kv

    def _read(self) -> Iterator[Sample]:
        """Takes over all counters as they stand now, and yields the gauges."""
        for source in (self._traffic, self._service, self._tiers, self._shadow, self._quality, self._settings, _build):
            for name, labels, value in _all_or_nothing(source):
                if METRICS[name].kind == "counter":
                    self._sums.take(name, labels, value)
                else:
                    yield name, labels, value

    def _traffic(self) -> Iterator[Sample]:
        stats = self._kv.stats.snapshot()
        for strategy, count in _with_zeros(stats.chunk_hits, ("exact", "continued")).items():
            yield "kvboost_cache_hits_total", (self._model, strategy), count
        for source, count in by_source(stats.tokens).items():
            yield "kvboost_prompt_tokens_total", (source,), count
        for strategy, count in stats.repaired.items():
            yield "kvboost_recompute_tokens_total", (strategy,), count
        by_label = dict.fromkeys(sorted({*FALLBACKS.values(), "model", OTHER}), 0)
        for reason, count in stats.fallbacks.items():
            by_label[self._fallback_label(reason)] += count
        for label, count in by_label.items():
            yield "kvboost_fallbacks_total", (label,), count

    def _fallback_label(self, reason: str) -> str:
        return "model" if reason == self._kv.support.refused else FALLBACKS.get(reason, OTHER)

    def _service(self) -> Iterator[Sample]:
        stats = self._service_stats() if self._service_stats is not None else ServiceStats(0, 0, 0, 0, False)
        yield "kvboost_queue_length", (), stats.queued
        yield "kvboost_requests_running", (), stats.prefilling + stats.decoding
        for outcome, count in _with_zeros(stats.finished, OUTCOMES).items():
            yield "kvboost_requests_total", (outcome,), count

    def _tiers(self) -> Iterator[Sample]:
        tiers = self._kv.store.stats_by_tier()
        whole = self._kv.store.stats()  # the first tier's, with the failures of the queue behind it
        evictions = dict.fromkeys(EVICTION_REASONS, 0)
        for name, tier in tiers.items():
            yield from _of_tier(name, tier, whole.errors if name == whole.name else tier.errors)
            for reason, count in tier.evictions.items():
                evictions[reason] = evictions.get(reason, 0) + count
        for reason, count in evictions.items():
            yield "kvboost_cache_evictions_total", (reason,), count

    def _shadow(self) -> Iterator[Sample]:
        stats = self._kv.shadow.stats()
        yield "kvboost_shadow_checks_total", (), stats.checks
        yield "kvboost_moved_suspended", (), stats.suspended is not None
        if stats.kl_p95 == stats.kl_p95:  # nan: nothing was measured
            yield "kvboost_shadow_kl", ("0.95",), stats.kl_p95

    def _quality(self) -> Iterator[Sample]:
        settings = self._settings_in_force()
        probes = None
        if settings is not None and settings.codec != "none":
            probes = self._kv.quantization.measured(settings.codec)
        names = ("kvboost_quant_error_psnr_at_load", "kvboost_quant_error_psnr")
        for name, probe in zip(names, probes or (), strict=False):
            for kind, worst in _worst_psnr(probe).items():
                yield name, (kind,), worst

    def _settings(self) -> Iterator[Sample]:
        status = self._kv.live.status()
        yield "kvboost_settings_generation", (), status.generation
        yield "kvboost_settings_rejected_total", (), status.rejected
        settings = self._settings_in_force()
        if settings is not None:
            yield "kvboost_disabled", (), not settings.enabled
            yield "kvboost_configured_recompute_ratio", (), configured_recompute_ratio(settings)
            if settings.fidelity != "exact" or settings.risk_bound is not None:
                yield "kvboost_shadow_bound", (), bound(settings)

    def _settings_in_force(self) -> Settings | None:
        try:
            return self._kv.settings()
        except SettingsError:  # an invalid environment; every request says so
            return None


class _GrowingSums:
    """Counters as they would be if nothing behind them had ever begun anew."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, tuple[str, ...]], float] = {}  # counted by sources that began anew since
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def take(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """A source stands at `value`; less than before means that it began anew."""
        last = self._last.get((name, labels), 0.0)
        if value < last:
            self._keep(name, labels)
        self._last[name, labels] = value

    def restart(self, chosen: Callable[[str], bool]) -> None:
        """The sources of the chosen metrics begin anew at zero."""
        for name, labels in self._last:
            if chosen(name):
                self._keep(name, labels)

    def all(self) -> Iterator[Sample]:
        """Every sum."""
        for (name, labels), last in self._last.items():
            yield name, labels, self._before.get((name, labels), 0.0) + last

    def _keep(self, name: str, labels: tuple[str, ...]) -> None:
        self._before[name, labels] = self._before.get((name, labels), 0.0) + self._last[name, labels]
        self._last[name, labels] = 0.0


def _all_or_nothing(source: Callable[[], Iterator[Sample]]) -> list[Sample]:
    try:
        return list(source())
    except Exception:
        logger.exception("some metrics cannot be read (%s)", source.__name__)
        return []


def by_source(tokens: Mapping[str, int]) -> dict[str, int]:
    """Tokens by kind and `repaired`, a part of `moved`, as sources that sum to all of them."""
    counts = {source: tokens.get(source, 0) for source in SOURCES}
    return {**counts, "moved": counts["moved"] - counts["repaired"]}


def configured_recompute_ratio(settings: Settings) -> float:
    """Share of the moved rows that the settings recompute at first; 0 where nothing is moved or repaired."""
    if settings.exact_only or settings.recompute_strategy == "none":
        return 0.0
    return BUDGETS[settings.fidelity][0] if settings.recompute_ratio is None else settings.recompute_ratio


def _family(name: str) -> Metric:
    return Metric(name.removesuffix("_total"), METRICS[name].help, METRICS[name].kind)


def _add(family: Metric, name: str, labels: tuple[str, ...], value: float) -> None:
    family.add_sample(name, dict(zip(METRICS[name].labels, labels, strict=True)), float(value))


def _of_tier(name: str, tier: TierStats, errors: Mapping[str, int]) -> Iterator[Sample]:
    yield "kvboost_cache_bytes", (name,), tier.bytes_used
    yield "kvboost_cache_limit_bytes", (name,), tier.bytes_limit
    yield "kvboost_cache_entries", (name,), tier.entries
    for kind, count in _with_zeros(errors, TIER_ERRORS.get(name, ())).items():
        yield "kvboost_tier_errors_total", (name, kind), count


def _worst_psnr(probe: QuantProbe) -> dict[str, float]:
    """By kind: the worst head of the layers that are packed, dB."""
    worst = {}
    for slot, kind in (("keys", "key"), ("values", "value")):
        layers = enumerate(probe.psnr_db.get(slot, ()))  # type: ignore[call-overload]
        heads = [db for i, layer in layers if i not in probe.plain_layers for db in layer]
        if heads:
            worst[kind] = min(heads)
    return worst


def _with_zeros(counts: Mapping[str, int], known: Iterable[str]) -> dict[str, int]:
    """Counts with those that are still zero, so that the first one is an increase too."""
    return {**dict.fromkeys(known, 0), **counts}


def _build() -> Iterator[Sample]:
    yield "kvboost_build_info", (__version__, _version("transformers"), _version("torch")), 1


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # built in place
        return "unknown"
