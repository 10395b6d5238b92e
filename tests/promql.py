"""What a PromQL expression names, and what the server may be asked for. Whether it parses, promtool says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

SCRAPED = frozenset({"namespace", "job", "instance", "pod"})  # labels that Prometheus sets, not the server
HISTOGRAM_SUFFIX = re.compile(r"_(bucket|sum|count)$")

METRICS: Mapping[str, frozenset[str]] = {  # the server's metrics and their labels, beside `model`
    name: frozenset(labels)
    for name, labels in {
        "kvboost_build_info": {"version", "transformers", "torch"},
        "kvboost_cache_bytes": {"tier"},
        "kvboost_cache_entries": {"tier"},
        "kvboost_cache_evictions_total": {"reason"},
        "kvboost_cache_hits_total": {"strategy"},
        "kvboost_cache_limit_bytes": {"tier"},
        "kvboost_configured_recompute_ratio": set(),
        "kvboost_disabled": set(),
        "kvboost_fallbacks_total": {"reason"},
        "kvboost_moved_suspended": set(),
        "kvboost_prefill_seconds": {"le"},
        "kvboost_prompt_tokens_total": {"source"},
        "kvboost_quant_error_psnr": {"kind"},
        "kvboost_quant_error_psnr_at_load": {"kind"},
        "kvboost_queue_length": set(),
        "kvboost_recompute_tokens_total": {"strategy"},
        "kvboost_requests_running": set(),
        "kvboost_requests_total": {"outcome"},
        "kvboost_settings_generation": set(),
        "kvboost_settings_rejected_total": set(),
        "kvboost_shadow_bound": set(),
        "kvboost_shadow_checks_total": set(),
        "kvboost_shadow_kl": {"quantile"},
        "kvboost_tier_errors_total": {"tier", "kind"},
        "kvboost_ttft_seconds": {"le"},
    }.items()
}
HISTOGRAMS = frozenset({"kvboost_prefill_seconds", "kvboost_ttft_seconds"})
VALUES: Mapping[tuple[str, str], frozenset[str]] = {  # what closed labels can say
    ("kvboost_prompt_tokens_total", "source"): frozenset({"exact", "continued", "moved", "repaired", "fresh"}),
    ("kvboost_shadow_kl", "quantile"): frozenset({"0.95"}),
    ("kvboost_requests_total", "outcome"): frozenset(
        {"stop", "length", "eos", "deadline", "cancelled", "failed", "refused"}
    ),
}

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'')
_MATCHERS = re.compile(r'(?P<name>[a-zA-Z_:][\w:]*)?\s*\{(?P<inner>(?:[^{}"]|"(?:[^"\\]|\\.)*")*)\}')
_MATCHER = re.compile(r'(?P<label>\w+)\s*(?:=~|!~|!=|=)\s*"(?P<value>(?:[^"\\]|\\.)*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\((?P<labels>[^()]*)\)")
_NAME = re.compile(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\s*\()(?![\w:])")
_KEYWORDS = frozenset({"and", "or", "unless", "offset", "bool", "inf", "nan"})


@dataclass(frozen=True, slots=True)
class Names:
    """Metrics of an expression, labels it groups or matches by, and values that it matches per metric and label."""

    metrics: frozenset[str]
    labels: frozenset[str]
    values: frozenset[tuple[str, str, str]]


def names_in(expression: str) -> Names:
    labels: set[str] = set()
    values: set[tuple[str, str, str]] = set()
    for block in _MATCHERS.finditer(expression):
        for matcher in _MATCHER.finditer(block["inner"]):
            labels.add(matcher["label"])
            for value in matcher["value"].split("|"):
                values.add((block["name"] or "", matcher["label"], value))
    rest = _STRING.sub("", re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", _STRING.sub("", expression)))
    for grouping in _GROUPING.finditer(rest):
        labels.update(label.strip() for label in grouping["labels"].split(",") if label.strip())
    rest = _GROUPING.sub("", rest)
    metrics = {m for m in _NAME.findall(rest) if m.lower() not in _KEYWORDS}
    return Names(frozenset(metrics), frozenset(labels), frozenset(values))


def complaints(expression: str, recorded: Mapping[str, frozenset[str]]) -> list[str]:
    """What the expression asks for and nobody serves. `recorded`: recording rules and their labels."""
    names = names_in(expression)
    found: list[str] = []
    known: set[str] = set(SCRAPED) | {"model"}
    for metric in names.metrics:
        base = HISTOGRAM_SUFFIX.sub("", metric)
        base = base if base in HISTOGRAMS else metric
        if base in recorded:
            known |= recorded[base]
        elif base not in METRICS or (base in HISTOGRAMS) != (base != metric):
            found.append(f"no metric {metric}")
        else:
            known |= METRICS[base]
    found += [f"no label {label}" for label in names.labels - known]
    for metric, label, value in names.values:
        if value not in VALUES.get((metric, label), {value}):
            found.append(f"{metric} has no {label}={value}")
    return found
