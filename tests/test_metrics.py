"""Metrics: every agreed name, sums that add up, counters that never go back, and nothing that a user wrote."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from families import build, build_fresh
from kvboost import KVBoost
from kvboost.metrics import METRICS, RECENT, Metrics, configured_recompute_ratio
from kvboost.serving import ServiceStats
from kvboost.types import ReuseReport
from scenario import DOCUMENTS, engine, greedy, join, prompt

PROMTOOL = shutil.which("promtool")


@pytest.fixture
def kv() -> Iterator[KVBoost]:
    with engine(build("llama")) as made:
        yield made


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name and label values; every series once."""
    found: dict[tuple[str, tuple[str, ...]], float] = {}
    for family in text_string_to_metric_families(metrics.expose()[0].decode()):
        for s in family.samples:
            key = (s.name, tuple(s.labels.values()))
            assert key not in found, f"{key} is told twice"
            found[key] = s.value
    return found


def of(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    return {labels: value for (n, labels), value in samples(metrics).items() if n == name}


def test_every_metric_is_exposed_with_its_type_and_help(kv: KVBoost) -> None:
    text = Metrics(kv, model="m", process=False).expose()[0].decode()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    for name, definition in METRICS.items():
        family = families[name.removesuffix("_total") if definition.kind == "counter" else name]
        assert (family.type, family.documentation) == (definition.kind, definition.help)
    named = {f"{n}_total" if f.type == "counter" else n for n, f in families.items()}
    assert {n for n in named if not n.endswith("_created")} == set(METRICS)  # the library adds those to histograms


AGREED = {  # with the labels that rules and dashboards use
    "kvboost_cache_hits_total": ("model", "strategy"),
    "kvboost_cache_evictions_total": ("reason",),
    "kvboost_recompute_tokens_total": ("strategy",),
    "kvboost_quant_error_psnr": ("kind",),
    "kvboost_quant_error_psnr_at_load": ("kind",),
    "kvboost_prompt_tokens_total": ("source",),
    "kvboost_ttft_seconds": (),
    "kvboost_prefill_seconds": (),
    "kvboost_queue_length": (),
    "kvboost_requests_running": (),
    "kvboost_requests_total": ("outcome",),
    "kvboost_cache_bytes": ("tier",),
    "kvboost_cache_limit_bytes": ("tier",),
    "kvboost_cache_entries": ("tier",),
    "kvboost_fallbacks_total": ("reason",),
    "kvboost_tier_errors_total": ("tier", "kind"),
    "kvboost_shadow_kl": ("quantile",),
    "kvboost_shadow_bound": (),
    "kvboost_shadow_checks_total": (),
    "kvboost_moved_suspended": (),
    "kvboost_settings_generation": (),
    "kvboost_settings_rejected_total": (),
    "kvboost_disabled": (),
    "kvboost_configured_recompute_ratio": (),
    "kvboost_build_info": ("version", "transformers", "torch"),
}


def test_names_and_labels_are_those_that_rules_and_dashboards_use() -> None:
    assert {name: definition.labels for name, definition in METRICS.items()} == AGREED


def test_prompt_tokens_by_source_sum_to_all_prompt_tokens(kv: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(kv, model="m")
    reports = [greedy(kv.generate, prompt(order), 1).report for order in ("0123", "0123", "3120", "31")]
    reports.append(greedy(kv.generate, join(prompt("3120"), DOCUMENTS[1]), 1).report)
    monkeypatch.setenv("KVBOOST_DISABLE", "1")
    reports.append(greedy(kv.generate, prompt("0123"), 1).report)
    tokens = of(metrics, "kvboost_prompt_tokens_total")
    assert sum(tokens.values()) == sum(r.prompt_tokens for r in reports)
    assert tokens["exact",] == sum(r.exact_tokens for r in reports) > 0
    assert tokens["continued",] == sum(r.continued_tokens for r in reports) > 0
    assert tokens["repaired",] == sum(r.repaired_tokens for r in reports) > 0
    assert tokens["moved",] == sum(r.moved_tokens - r.repaired_tokens for r in reports) > 0
    assert of(metrics, "kvboost_recompute_tokens_total") == {("epic",): tokens["repaired",]}
    assert of(metrics, "kvboost_fallbacks_total")["switched_off",] == 1
    assert of(metrics, "kvboost_disabled") == {(): 1}


def test_chunk_hits_tell_how_moved_chunks_were_repaired(kv: KVBoost) -> None:
    metrics = Metrics(kv, model="served name")
    assert of(metrics, "kvboost_cache_hits_total") == {("served name", "exact"): 0, ("served name", "continued"): 0}
    greedy(kv.generate, prompt("0123"), 1)
    moved = greedy(kv.generate, prompt("3120"), 1, recompute_strategy="none")
    exact = greedy(kv.generate, prompt("0123"), 1)
    hits = of(metrics, "kvboost_cache_hits_total")
    of_exact = [len(list(g.plan)) - 1 for g in (exact,)]  # all but the fresh end
    assert hits["served name", "none"] == sum(s.kind.value == "moved" for s in moved.plan) > 0
    assert hits["served name", "exact"] >= sum(of_exact)


def test_counters_go_on_when_the_engine_behind_them_begins_anew(kv: KVBoost) -> None:
    metrics = Metrics(kv, model="m", service_stats=lambda: ServiceStats(0, 0, 0, 4, False, {"eos": 7}))
    greedy(kv.generate, prompt("0123"), 1)
    greedy(kv.generate, prompt("3120"), 1)
    kv.live.set({"shadow_share": 0.0, "fidelity": "fast"})
    before = samples(metrics)
    with engine(build_fresh("llama"), recompute_strategy="none") as other:
        for order in ("0", "0123", "3120", "0123", "321", "2031"):  # more than the first has counted
            greedy(other.generate, prompt(order), 1)
        metrics.rebind(other)
        after = samples(metrics)
        counters = {k for k in before if METRICS.get(k[0]) and METRICS[k[0]].kind == "counter"}
        assert all(after[k] >= before[k] for k in counters)
        assert after["kvboost_requests_total", ("eos",)] == 7
        key = ("kvboost_prompt_tokens_total", ("fresh",))
        assert after[key] == kv.stats.tokens["fresh"] + other.stats.tokens["fresh"]
        assert after["kvboost_recompute_tokens_total", ("epic",)] == kv.stats.repaired["epic"] > 0


def test_a_source_that_counts_from_zero_again_is_noticed(kv: KVBoost) -> None:
    counts = {"eos": 5}
    metrics = Metrics(kv, model="m", service_stats=lambda: ServiceStats(3, 1, 2, 4, False, dict(counts)))
    seen = []
    for counts["eos"] in (5, 2, 2, 9):
        seen.append(of(metrics, "kvboost_requests_total")["eos",])
    assert seen == [5, 7, 7, 14]
    assert (of(metrics, "kvboost_queue_length")[()], of(metrics, "kvboost_requests_running")[()]) == (3, 3)


def test_what_a_tier_evicts_and_holds_is_told() -> None:
    with engine(build("llama"), cache_bytes=1_000_000) as kv:
        metrics = Metrics(kv, model="m")
        for order in ("0123", "1032", "0", "3210"):
            greedy(kv.generate, prompt(order), 1)
        stats, found = kv.store.stats(), samples(metrics)
        assert found["kvboost_cache_bytes", ("memory",)] == stats.bytes_used > 0
        assert found["kvboost_cache_limit_bytes", ("memory",)] == stats.bytes_limit
        assert found["kvboost_cache_entries", ("memory",)] == stats.entries
        removed = kv.invalidate()
        assert of(metrics, "kvboost_cache_evictions_total")["invalidated",] == removed > 0
        assert found["kvboost_tier_errors_total", ("raised", "memory")] == 0  # labels by name


def test_disk_is_a_tier_of_its_own(tmp_path: Path) -> None:
    with engine(build("llama"), disk_directory=str(tmp_path)) as kv:
        greedy(kv.generate, prompt("0123"), 1)
        assert kv.flush()
        tiers = of(Metrics(kv, model="m"), "kvboost_cache_entries")
        assert tiers["disk",] > 0
        assert set(tiers) == {("memory",), ("disk",)}


def test_the_noise_of_packed_rows_is_told_now_and_at_load() -> None:
    model = build_fresh("llama")
    with engine(model, codec="k8v4") as kv:
        metrics = Metrics(kv, model="m")
        assert of(metrics, "kvboost_quant_error_psnr") == {}
        kv.quantization.measure("k8v4")
        first = of(metrics, "kvboost_quant_error_psnr")
        assert set(first) == {("key",), ("value",)}
        assert first["key",] > first["value",] > 30
        model.model.layers[0].self_attn.k_proj.weight.data[0].mul_(300)
        kv.invalidate()
        kv.quantization.measure("k8v4")
        assert of(metrics, "kvboost_quant_error_psnr_at_load") == first
        assert of(metrics, "kvboost_quant_error_psnr") != first


def test_shadow_checks_and_what_they_suspend_are_told() -> None:
    with engine(build("llama"), shadow_share=1.0, risk_bound=0.25) as kv:
        metrics = Metrics(kv, model="m")
        assert of(metrics, "kvboost_shadow_kl") == {}
        greedy(kv.generate, prompt("0123"), 1)
        checked = greedy(kv.generate, prompt("3120"), 1).shadow
        assert checked is not None
        checked.result(60)
        assert of(metrics, "kvboost_shadow_kl")["0.95",] == pytest.approx(kv.shadow.stats().kl_p95)
        assert of(metrics, "kvboost_shadow_bound")[()] == 0.25
        assert of(metrics, "kvboost_shadow_checks_total")[()] == 1
        assert of(metrics, "kvboost_moved_suspended")[()] == 0


def test_settings_are_told(kv: KVBoost) -> None:
    metrics = Metrics(kv, model="m")
    kv.live.set({"recompute_ratio": 0.3})
    assert of(metrics, "kvboost_settings_generation")[()] == 1
    assert of(metrics, "kvboost_settings_rejected_total")[()] == 0
    assert of(metrics, "kvboost_configured_recompute_ratio")[()] == 0.3


@pytest.mark.parametrize(
    ("values", "ratio"),
    [
        ({}, 0.15),
        ({"fidelity": "fast"}, 0.05),
        ({"fidelity": "exact"}, 0),
        ({"mode": "exact"}, 0),
        ({"recompute_strategy": "none", "recompute_ratio": 0.5}, 0),
        ({"recompute_ratio": 0.0}, 0),
    ],
)
def test_the_configured_ratio_is_the_first_budget(values: Mapping[str, Any], ratio: float, kv: KVBoost) -> None:
    plain = kv.settings().model_copy(update={"recompute_strategy": "guided"})
    assert configured_recompute_ratio(plain.model_copy(update=dict(values))) == ratio


def test_an_invalid_environment_does_not_fail_a_scrape(kv: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_MODE", "bogus")
    found = samples(Metrics(kv, model="m"))
    assert ("kvboost_disabled", ()) not in found
    assert found["kvboost_cache_entries", ("memory",)] == 0


def test_no_label_comes_from_what_a_user_sent(kv: KVBoost) -> None:
    marked = "m4rked"
    kv.generate_like_transformers((prompt(),), {"max_new_tokens": 1, "fidelity": marked})
    greedy(kv.generate, prompt(), 1, cache_salt=marked)
    metrics = Metrics(kv, model="m")
    assert any(marked in reason for reason in kv.stats.fallbacks)
    assert of(metrics, "kvboost_fallbacks_total")["other",] == 1
    assert marked not in metrics.expose()[0].decode()


def test_times_go_into_histograms_in_seconds(kv: KVBoost) -> None:
    metrics = Metrics(kv, model="m")
    for ttft_s in (0.02, 0.3, 100.0):
        metrics.observe(ReuseReport(5, fresh_tokens=5, ttft_s=ttft_s, prefill_s=ttft_s / 2))
    found = samples(metrics)
    assert found["kvboost_ttft_seconds_count", ()] == 3
    assert found["kvboost_ttft_seconds_sum", ()] == pytest.approx(100.32)
    assert found["kvboost_ttft_seconds_bucket", ("0.025",)] == 1
    assert found["kvboost_prefill_seconds_sum", ()] == pytest.approx(50.16)


def test_the_latest_requests_are_known_one_by_one(kv: KVBoost) -> None:
    metrics = Metrics(kv, model="m")
    for number in range(1, RECENT + 11):
        metrics.observe(ReuseReport(10, fresh_tokens=10, ttft_s=number))
    metrics.observe(ReuseReport(10, fresh_tokens=10))  # given up before its first token
    assert [report.ttft_s for _, report in metrics.recent(60)] == list(range(11, RECENT + 11))
    assert metrics.recent(-1) == []


def test_the_registry_is_our_own_and_the_scraper_may_choose_a_format(kv: KVBoost) -> None:
    metrics = Metrics(kv, model="m")
    assert not any(f.name.startswith("kvboost") for f in REGISTRY.collect())
    assert metrics.expose()[1].startswith("text/plain")
    body, content_type = metrics.expose("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_promtool_has_nothing_to_say() -> None:
    if PROMTOOL is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    with engine(build("llama"), shadow_share=1.0, codec="k8v4") as kv:
        greedy(kv.generate, prompt("0123"), 1)
        checked = greedy(kv.generate, prompt("3120"), 1).shadow
        assert checked is not None
        checked.result(60)
        assert kv.flush()
        kv.quantization.measure("k8v4")
        body = Metrics(kv, model="m").expose()[0]
    assert b"kvboost_shadow_kl{" in body
    assert b"kvboost_quant_error_psnr{" in body
    told = subprocess.run([PROMTOOL, "check", "metrics"], input=body, capture_output=True, check=False, timeout=60)
    assert (told.returncode, told.stdout + told.stderr) == (0, b"")
