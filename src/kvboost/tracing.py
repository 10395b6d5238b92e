"""OpenTelemetry spans of a request, if the extra `otel` is installed and the program has set up a tracer.

    kvboost.request |--------------------------------------------------------|
                      wait | lookup | load | shift | select | prefill | decode

The stages are drawn from the durations in the report, after the request has ended: tracing costs nothing before the
answer. What is left of the time to the first token stands in front, as waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvboost.types import ReuseReport

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

STAGES = ("lookup", "load", "shift", "select", "prefill")
TOLD = ("charged_budget", "risk", "escalations", "fallback")


def trace_request(
    report: ReuseReport,
    *,
    request_id: str,
    started_at_s: float,
    ended_at_s: float,
    headers: Mapping[str, str] | None = None,
    tracer: Tracer | None = None,
) -> bool:
    """Emits the spans of a request that ran from `started_at_s` to `ended_at_s` (Unix time).

    `headers` are the client's: a `traceparent` among them makes ours a part of its trace. Returns False without
    opentelemetry.
    """
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return False
    tracer = tracer if tracer is not None else trace.get_tracer("kvboost")
    carrier = {k.lower(): v for k, v in (headers or {}).items()}
    context = propagate.extract(carrier) if carrier else None
    attributes = {"kvboost.request_id": request_id, **_attributes(report)}
    span = tracer.start_span("kvboost.request", context, attributes=attributes, start_time=_ns(started_at_s))
    inside = trace.set_span_in_context(span, context)
    for name, began_s, stopped_s in stages(report, started_at_s, ended_at_s):
        stage = tracer.start_span(f"kvboost.{name}", inside, start_time=_ns(began_s))
        stage.end(_ns(stopped_s))
    span.end(_ns(ended_at_s))
    return True


def stages(report: ReuseReport, started_at_s: float, ended_at_s: float) -> Iterator[tuple[str, float, float]]:
    """Name, beginning and end of each stage that took time, one behind the other."""
    durations = {name: float(getattr(report, f"{name}_s")) for name in STAGES}
    first_token_at_s = min(ended_at_s, started_at_s + report.ttft_s)
    at_s = max(started_at_s, first_token_at_s - sum(durations.values()))
    if at_s > started_at_s:
        yield "wait", started_at_s, at_s
    for name, duration_s in durations.items():
        if duration_s > 0:
            stop_s = min(at_s + duration_s, ended_at_s)
            yield name, at_s, stop_s
            at_s = stop_s
    yield "decode", max(at_s, first_token_at_s), ended_at_s


def _attributes(report: ReuseReport) -> dict[str, str | int | float]:
    counts = {name: value for name, value in asdict(report).items() if name.endswith("_tokens") or name in TOLD}
    return {f"kvboost.{name}": value for name, value in counts.items() if value is not None}


def _ns(at_s: float) -> int:
    return int(at_s * 1e9)
