"""The rules and the dashboard ask for what the server serves; every alert fires, is tested, and has a runbook."""

from __future__ import annotations

import copy
import json
import math
import re
import string
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvboost.config import Settings
from prometheus_server import PrometheusServer, promtool, quickened
from promql import METRICS, complaints, names_in
from redis_server import free_port

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
RUNBOOKS = ROOT / "docs" / "runbooks"
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
TESTS = yaml.safe_load((DEPLOY / "prometheus" / "tests.yaml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in ALL_RULES if "alert" in rule}
RECORDED = {rule["record"]: rule for rule in ALL_RULES if "record" in rule}
KEPT = {name: frozenset({"model"}) for name in RECORDED}  # labels of recorded series, beside those of the scrape
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


def test_promtool_accepts_the_rules() -> None:
    checked = promtool("check", "rules", DEPLOY / "prometheus" / "rules.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_promtool_unit_tests_pass() -> None:
    tested = promtool("test", "rules", DEPLOY / "prometheus" / "tests.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_is_tested_both_ways(alert: str) -> None:
    cases = [c for test in TESTS["tests"] for c in test.get("alert_rule_test", []) if c["alertname"] == alert]
    assert any(case["exp_alerts"] for case in cases), "no unit test in which it fires"
    assert any(not case["exp_alerts"] for case in cases), "no unit test in which it does not fire"


def test_recording_rules_are_tested() -> None:
    asked = "".join(case["expr"] for test in TESTS["tests"] for case in test.get("promql_expr_test", []))
    assert [name for name in RECORDED if name not in asked] == []


@pytest.mark.parametrize("expression", ["vector(1) < 0", "vector(1)"], ids=["never", "always"])
def test_unit_tests_notice_alerts_that_never_or_always_fire(expression: str, tmp_path: Path) -> None:
    changed = copy.deepcopy(RULES)
    for rule in (rule for group in changed["groups"] for rule in group["rules"] if "alert" in rule):
        rule["expr"] = expression
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(changed))
    (tmp_path / "tests.yaml").write_text((DEPLOY / "prometheus" / "tests.yaml").read_text())
    tested = promtool("test", "rules", tmp_path / "tests.yaml")
    assert set(re.findall(r"alertname: *(\w+)", tested.stdout + tested.stderr)) == ALERTS.keys()


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda r: r.get("alert") or r["record"])
def test_rule_asks_for_what_the_server_serves(rule: dict[str, Any]) -> None:
    assert complaints(rule["expr"], KEPT) == []


def test_the_list_of_metrics_is_the_servers() -> None:
    from kvboost.metrics import METRICS as SERVED

    of_kind = {"kvboost_prefill_seconds": {"le"}, "kvboost_ttft_seconds": {"le"}}
    served = {name: {*d.labels, *of_kind.get(name, set())} - {"model"} for name, d in SERVED.items()}
    assert served == METRICS


def test_recorded_series_are_those_agreed() -> None:
    assert {"kvboost_cache_hit_rate", "kvboost_recompute_ratio"} <= RECORDED.keys()
    assert not RECORDED.keys() & METRICS.keys()


def test_complaints_name_what_nobody_serves() -> None:
    assert complaints("sum(rate(kvboost_prompt_tokens[5m]))", KEPT) == ["no metric kvboost_prompt_tokens"]
    assert complaints('kvboost_prompt_tokens_total{source="copied"}', KEPT) == [
        "kvboost_prompt_tokens_total has no source=copied"
    ]
    assert complaints("sum by (user) (kvboost_queue_length)", KEPT) == ["no label user"]
    assert complaints("rate(kvboost_ttft_seconds[5m])", KEPT) == ["no metric kvboost_ttft_seconds"]
    assert names_in('a{b="c} d"} unless on (e) f offset 5m').metrics == {"a", "f"}


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_says_what_and_where_to_read_on(alert: str) -> None:
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{alert}.md"
    named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["description"]))
    if "by (" in rule["expr"] and rule["expr"].startswith("sum by"):
        kept = re.match(r"sum by \(([^)]*)\)", rule["expr"])
        assert kept is not None
        assert named <= set(kept[1].split(", ")), "the description names a label that the sum drops"


@pytest.mark.parametrize("alert", ALERTS)
def test_runbook_has_its_parts(alert: str) -> None:
    text = (RUNBOOKS / f"{alert}.md").read_text()
    parts = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert text.startswith(f"# {alert}\n")
    assert parts == ["Meaning", "First look", "Causes", "What to do"]
    assert ALERTS[alert]["labels"]["severity"] in text.splitlines()[2].lower()


def test_no_runbook_without_an_alert() -> None:
    pages = {page.stem for page in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == ALERTS.keys()


def test_runbooks_name_metrics_settings_values_and_pages_that_exist() -> None:
    pages = {page: page.read_text() for page in RUNBOOKS.glob("*.md")}
    text = "".join(pages.values())
    metrics = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bkvboost_[a-z_0-9]+", text)}
    assert metrics <= METRICS.keys() | RECORDED.keys()
    assert len(metrics) > 8
    settings = {name.lower() for name in re.findall(r"\bKVBOOST_([A-Z_]+)", text)}
    assert settings <= Settings.model_fields.keys()
    chart = yaml.safe_load((DEPLOY / "helm" / "kvboost" / "values.yaml").read_text())
    values = re.findall(r"`(" + "|".join(chart) + r")\.(\w+)", text)
    assert not [f"{group}.{name}" for group, name in values if name not in chart[group]]
    links = [(page, link) for page, t in pages.items() for link in re.findall(r"\]\(([^)]+)\)", t)]
    assert not [(page.name, link) for page, link in links if not (page.parent / link).exists()]
    panels = set(re.findall(r"[Pp]anel \*([^*]+)\*", text))
    assert panels
    assert panels <= {panel["title"] for panel in PANELS}


def test_the_page_on_kubernetes_lists_the_alerts() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    listed = dict(re.findall(r"^\| \[(\w+)\]\([^)]*\) \| (\w+) \|", text, re.MULTILINE))
    assert listed == {name: rule["labels"]["severity"] for name, rule in ALERTS.items()}


# --- the dashboard ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS, ids=[f"{t}-{i}" for i, (t, _) in enumerate(EXPRESSIONS)])
def test_panel_asks_for_what_the_server_serves(title: str, expression: str) -> None:
    assert complaints(expression.replace("$__rate_interval", "5m"), KEPT) == []


def test_expressions_of_the_dashboard_parse(tmp_path: Path) -> None:
    plain = [
        e.replace("$__rate_interval", "5m").replace("$namespace", ".*").replace("$job", ".*") for _, e in EXPRESSIONS
    ]
    assert not [e for e in plain if "$" in e]
    rules = [{"record": f"panel_{i}", "expr": e} for i, e in enumerate(plain)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    checked = promtool("check", "rules", tmp_path / "panels.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_dashboard_shows_every_metric_of_the_server() -> None:
    shown = {re.sub(r"_bucket$", "", name) for _, e in EXPRESSIONS for name in names_in(e).metrics}
    assert METRICS.keys() - shown == set()
    assert RECORDED.keys() - shown == {"kvboost_ttft_p95_seconds"}  # the panel has the quantiles of all replicas


def test_panels_have_a_place_a_source_and_a_legend() -> None:
    cells: set[tuple[int, int]] = set()
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        mine = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & mine, f"{panel['title']} covers another panel"
        assert place["x"] + place["w"] <= 24
        cells |= mine
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["legendFormat"] for target in panel["targets"])
    alerts = set(re.findall(r"Alert (\w+)", json.dumps(DASHBOARD)))
    assert alerts <= ALERTS.keys()


# --- a real Prometheus -----------------------------------------------------------------------------------------------


PAGE = string.Template("""
kvboost_build_info{version="0"} 1
kvboost_prompt_tokens_total{source="exact"} ${exact}
kvboost_prompt_tokens_total{source="repaired"} ${repaired}
kvboost_prompt_tokens_total{source="fresh"} ${fresh}
kvboost_configured_recompute_ratio 0.15
kvboost_ttft_seconds_bucket{le="1"} ${quick}
kvboost_ttft_seconds_bucket{le="30"} ${quick}
kvboost_ttft_seconds_bucket{le="+Inf"} ${age}
kvboost_requests_total{outcome="stop"} ${age}
kvboost_requests_total{outcome="failed"} ${bad}
kvboost_tier_errors_total{tier="redis",kind="timeout"} ${bad}
kvboost_settings_rejected_total ${bad}
kvboost_queue_length ${queue}
kvboost_quant_error_psnr{kind="key"} ${psnr}
kvboost_quant_error_psnr_at_load{kind="key"} 40
kvboost_shadow_kl{quantile="0.95"} ${kl}
kvboost_shadow_bound 0.08
kvboost_shadow_checks_total 64
kvboost_moved_suspended ${suspended}
kvboost_disabled ${disabled}
""")
HEALTHY = {"exact": 70, "repaired": 5, "fresh": 25, "quick": 1, "age": 1, "bad": 0}  # counters, per second
IN_TROUBLE = {"exact": 5, "repaired": 30, "fresh": 65, "quick": 0, "age": 1, "bad": 3}
CALM = {"queue": 0, "psnr": 40, "kl": 0.05, "suspended": 0, "disabled": 0}
ALARMED = {"queue": 3, "psnr": 31, "kl": 1.0, "suspended": 1, "disabled": 0}


@contextmanager
def exposed(port: int, rates: dict[str, float], gauges: dict[str, float]) -> Iterator[None]:
    """What a server in some state exposes, on `port`: counters that grow since now, and gauges, which may change."""
    begun_s = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            age_s = time.monotonic() - begun_s
            body = PAGE.substitute({name: math.floor(rate * age_s) for name, rate in rates.items()} | gauges).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_every_alert_fires_in_a_real_prometheus_when_a_target_is_in_trouble(tmp_path: Path) -> None:
    port = free_port()
    absent = {"KVBoostMetricsAbsent"}
    off = {"KVBoostDisabledLong"}  # silences KVBoostHitRateLow, so it comes last
    with PrometheusServer(tmp_path, f"127.0.0.1:{port}", quickened(RULES)) as prometheus:
        assert prometheus.wait_until_firing(absent, 30) == absent
        gauges = dict(ALARMED)
        with exposed(port, IN_TROUBLE, gauges):
            trouble = set(ALERTS) - absent - off
            assert prometheus.wait_until_firing(trouble, 60) == trouble
            assert not prometheus.firing() & absent
            gauges["disabled"] = 1
            assert prometheus.wait_until_firing(off, 30) == off


def test_no_alert_fires_in_a_real_prometheus_on_a_healthy_target(tmp_path: Path) -> None:
    port = free_port()
    quick = quickened(RULES)
    with exposed(port, HEALTHY, CALM), PrometheusServer(tmp_path, f"127.0.0.1:{port}", quick) as prometheus:
        deadline = time.monotonic() + 60
        while len(prometheus.query("count_over_time(kvboost_cache_hit_rate[1m]) > 4")) == 0:  # longer than every `for`
            assert time.monotonic() < deadline, "no hit rate was recorded"
            time.sleep(0.2)
        (rate,) = prometheus.query("kvboost_cache_hit_rate")
        (ratio,) = prometheus.query("kvboost_recompute_ratio")
        assert float(rate["value"][1]) == pytest.approx(0.7, abs=0.05)
        assert float(ratio["value"][1]) == pytest.approx(0.05, abs=0.02)
        assert prometheus.query('ALERTS{alertstate="firing", alertname!="KVBoostMetricsAbsent"}') == []
