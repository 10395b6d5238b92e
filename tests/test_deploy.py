"""The chart renders valid, locked-down objects and refuses what cannot work; kustomize and the image agree with it."""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from kvboost.config import FIXED, Settings, resolve
from promql import METRICS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kvboost"
VALUE_FILES = {
    path.stem: yaml.safe_load(path.read_text()) for path in sorted((DEPLOY / "helm" / "values").glob("*.yaml"))
}
CASES: Mapping[str, dict[str, Any]] = {"defaults": {}, **VALUE_FILES}
KUBERNETES = ("1.27", "1.34")
GIB = 2**30
SETTINGS_PATH = "/etc/kvboost/settings"
CUSTOM = {  # kinds of other people's operators: what they cannot do without
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {"selector", "endpoints"},
    ("monitoring.coreos.com/v1", "PrometheusRule"): {"groups"},
    ("networking.istio.io/v1", "VirtualService"): {"hosts", "http"},
}


@pytest.fixture(scope="module")
def chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def rendered(chart: helm_python.Chart, values: Mapping[str, Any], name: str = "kvboost") -> list[dict[str, Any]]:
    texts = chart.render(dict(values), name=name, namespace="llm")
    return [d for path, text in texts.items() if path.endswith(".yaml") for d in yaml.safe_load_all(text) if d]


def one(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    (found,) = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    return found


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(one(objects, "Deployment")["spec"]["template"]["spec"])


def environment_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (container,) = pod_of(objects)["containers"]
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def settings_of(objects: list[dict[str, Any]]) -> dict[str, str]:
    return dict(one(objects, "ConfigMap", "kvboost-settings")["data"])


# --- what it renders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_chart_lints(case: str) -> None:
    report = helm_python.lint(CHART, CASES[case], strict=True)
    assert report["total_charts_linted"] == 1
    assert report["errors"] == []


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("case", CASES)
def test_rendered_objects_are_valid(chart: helm_python.Chart, case: str, version: str) -> None:
    objects = rendered(chart, CASES[case])
    assert len({(o["kind"], o["metadata"]["name"]) for o in objects}) == len(objects)
    for document in objects:
        needs = CUSTOM.get((document["apiVersion"], document["kind"]))
        if needs is None:
            kubernetes_validate.validate(document, version, strict=True)
        else:
            assert needs <= document["spec"].keys(), document["kind"]


def test_three_value_files_are_among_the_cases() -> None:
    assert len(VALUE_FILES) >= 3, "deploy/helm/values has moved"


def test_every_template_is_rendered_by_some_case(chart: helm_python.Chart) -> None:
    templates = {t["name"] for t in chart.templates if t["name"].endswith(".yaml")}
    used = {
        path.removeprefix("kvboost/")
        for values in CASES.values()
        for path, text in chart.render(values, name="kvboost").items()
        if text.strip()
    }
    assert templates <= used


@pytest.mark.parametrize("case", CASES)
def test_pod_is_locked_down(chart: helm_python.Chart, case: str) -> None:
    pod = pod_of(rendered(chart, CASES[case]))
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
    assert not any("hostPath" in volume for volume in pod["volumes"])


@pytest.mark.parametrize("case", CASES)
def test_everything_that_is_written_to_is_mounted(chart: helm_python.Chart, case: str) -> None:
    objects = rendered(chart, CASES[case])
    (container,) = pod_of(objects)["containers"]
    mounts = container["volumeMounts"]
    writable = [m["mountPath"] for m in mounts if not m.get("readOnly")]
    environment = environment_of(objects)
    written = ["/tmp", *(environment[n] for n in ("HOME", "HF_HOME", "KVBOOST_DISK_DIRECTORY") if n in environment)]
    assert all(any(Path(w).is_relative_to(path) for path in writable) for w in written)
    assert {m["name"] for m in mounts} == {v["name"] for v in pod_of(objects)["volumes"]}


@pytest.mark.parametrize("case", CASES)
def test_settings_are_mounted_so_that_a_change_is_seen(chart: helm_python.Chart, case: str) -> None:
    objects = rendered(chart, CASES[case])
    pod = pod_of(objects)
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["mountPath"] == SETTINGS_PATH]
    (volume,) = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert environment_of(objects)["KVBOOST_SETTINGS_FILE"] == SETTINGS_PATH
    assert volume == {"name": mount["name"], "configMap": {"name": "kvboost-settings"}}
    assert not any("subPath" in m for m in pod["containers"][0]["volumeMounts"])
    annotations = one(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    changed = rendered(chart, {**CASES[case], "settings": {"KVBOOST_DISABLE": "1"}})
    assert settings_of(changed)["KVBOOST_DISABLE"] == "1"
    assert one(changed, "Deployment")["spec"]["template"]["metadata"]["annotations"] == annotations


@pytest.mark.parametrize("case", CASES)
def test_the_server_takes_the_settings(chart: helm_python.Chart, case: str) -> None:
    objects = rendered(chart, CASES[case])
    plain = {n: v for n, v in environment_of(objects).items() if isinstance(v, str) and n.startswith("KVBOOST_")}
    plain.pop("KVBOOST_SETTINGS_FILE")
    assert {n.removeprefix("KVBOOST_").lower() for n in plain} <= FIXED
    settings = resolve(environ={**plain, **settings_of(objects)}).settings
    wanted = CASES[case].get("settings", {})
    for name, value in {"KVBOOST_FIDELITY": "balanced", **wanted}.items():
        assert getattr(settings, name.removeprefix("KVBOOST_").lower()) == value


def test_numbers_reach_the_server_as_numbers(chart: helm_python.Chart) -> None:
    values = {
        "settings": {"KVBOOST_PREFILL_BLOCK_TOKENS": 4000000, "KVBOOST_SHADOW_SHARE": 0.05, "KVBOOST_GATE": False},
        "cache": {"sizeGiB": 1.5},
        "disk": {"enabled": True, "sizeGiB": 100000},
        "redis": {"enabled": True, "ttlS": 31536000},
        "secrets": {"redisUrl": "redis://redis:6379/0"},
    }
    objects = rendered(chart, values)
    environment = environment_of(objects)
    plain = {n: v for n, v in environment.items() if isinstance(v, str) and n != "KVBOOST_SETTINGS_FILE"}
    settings = resolve(environ={**plain, **settings_of(objects)}).settings
    assert settings.prefill_block_tokens == 4000000
    assert (settings.shadow_share, settings.gate) == (0.05, False)
    assert settings.cache_bytes == 3 * GIB // 2
    assert 0.89 * 100000 * GIB < settings.disk_bytes <= 0.9 * 100000 * GIB
    assert settings.redis_ttl_s == 31536000


@pytest.mark.parametrize(
    ("values", "expected_gib"),
    [
        ({"model": {"weightsGiB": 10}, "cache": {"sizeGiB": 6}, "memory": {"limitGiB": 32}}, 1.15 * 16),
        ({"model": {"weightsGiB": 10}, "cache": {"ratio": 0.5}, "memory": {"limitGiB": 30}}, 1.15 * (10 + 0.5 * 20)),
        ({"model": {"weightsGiB": 0.3}, "cache": {"sizeGiB": 0.2}, "memory": {"limitGiB": None}}, 1.15 * 0.5),
        ({"model": {"weightsGiB": 14}, "gpu": {"enabled": True}, "memory": {"limitGiB": 24}}, 1.15 * 14),
    ],
    ids=["size", "ratio", "no limit", "gpu"],
)
def test_memory_request(chart: helm_python.Chart, values: dict[str, Any], expected_gib: float) -> None:
    resources = pod_of(rendered(chart, values))["containers"][0]["resources"]
    request_mib = int(resources["requests"]["memory"].removesuffix("Mi"))
    assert expected_gib * 1024 <= request_mib < expected_gib * 1024 + 1
    limit_gib = values["memory"]["limitGiB"]
    assert resources["limits"].get("memory") == (None if limit_gib is None else f"{limit_gib * 1024}Mi")


def test_grace_period_outlasts_the_drain(chart: helm_python.Chart) -> None:
    pod = pod_of(rendered(chart, {"server": {"drainS": 300, "preStopS": 7}}))
    arguments = pod["containers"][0]["args"]
    assert arguments[arguments.index("--drain-s") + 1] == "300"
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
    assert pod["terminationGracePeriodSeconds"] > 307 + 60, "what is cached is written after the drain"


@pytest.mark.parametrize("case", CASES)
def test_ports_agree(chart: helm_python.Chart, case: str) -> None:
    objects = rendered(chart, CASES[case])
    (container,) = pod_of(objects)["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    arguments = container["args"]
    assert ports == {
        name: int(arguments[arguments.index(flag) + 1])
        for name, flag in {"http": "--port", "admin": "--admin-port", "metrics": "--metrics-port"}.items()
    }
    service = one(objects, "Service")["spec"]["ports"]
    assert {p["targetPort"] for p in service} == {"http", "metrics"}, "the admin port is in no Service"
    assert {container[p]["httpGet"]["port"] for p in ("startupProbe", "livenessProbe", "readinessProbe")} == {"http"}
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_selectors_meet_the_pods_whatever_the_release_is_called(chart: helm_python.Chart) -> None:
    values = {
        "serviceMonitor": {"enabled": True},
        "networkPolicy": {"enabled": True},
        "podLabels": {"team": "search"},
    }
    objects = rendered(chart, values, name="a-release-with-a-name-of-its-own-that-is-rather-long")
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        one(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        one(objects, "Service")["spec"]["selector"],
        one(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    monitored = one(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= one(objects, "Service")["metadata"]["labels"].items()
    assert labels["team"] == "search"
    assert all(len(o["metadata"]["name"]) <= 63 for o in objects)


def test_the_server_knows_every_flag_of_the_chart(chart: helm_python.Chart) -> None:
    from typer.main import get_command

    from kvboost.cli import app

    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    known = {flag for parameter in command.params for flag in parameter.opts}
    for values in CASES.values():
        given = {a for a in pod_of(rendered(chart, values))["containers"][0]["args"] if a.startswith("--")}
        assert given <= known


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_secrets_reach_the_server_and_stay_out_of_everything_else(chart: helm_python.Chart) -> None:
    given = {
        "hashSecret": "hash-secret-of-the-test",
        "adminToken": "admin-token-of-the-test",
        "apiKeys": "search sha256:00\n",
        "redisUrl": "rediss://:password-of-the-test@redis:6379/0",
        "hfToken": "hf-token-of-the-test",
    }
    values = {"secrets": given, "auth": {"enabled": True}, "redis": {"enabled": True}}
    objects = rendered(chart, values)
    secret = one(objects, "Secret")
    assert len(secret["data"]) == len(given)
    elsewhere = json.dumps([o for o in objects if o["kind"] != "Secret"])
    assert not [value for value in given.values() if value.strip() in elsewhere]
    environment = environment_of(objects)
    for name, key in {"KVBOOST_HASH_SECRET": "hash-secret", "KVBOOST_REDIS_URL": "redis-url"}.items():
        assert environment[name] == {"secretKeyRef": {"name": "kvboost", "key": key}}
    (volume,) = [v["secret"] for v in pod_of(objects)["volumes"] if v["name"] == "secrets"]
    assert {item["key"] for item in volume["items"]} == {"admin-token", "api-keys"}
    assert volume["defaultMode"] == 0o440
    before = one(objects, "Deployment")["spec"]["template"]["metadata"]["annotations"]
    other = rendered(chart, {**values, "secrets": {**given, "hashSecret": "another-secret-of-the-test"}})
    assert one(other, "Deployment")["spec"]["template"]["metadata"]["annotations"] != before


def test_existing_secret_is_used_and_none_is_made(chart: helm_python.Chart) -> None:
    objects = rendered(
        chart, {"secrets": {"existingSecret": "mine"}, "auth": {"enabled": True}, "redis": {"enabled": True}}
    )
    assert not [o for o in objects if o["kind"] == "Secret"]
    references = [v["secretKeyRef"] for v in environment_of(objects).values() if isinstance(v, dict)]
    assert {r["name"] for r in references} == {"mine"}
    assert [v["secret"]["secretName"] for v in pod_of(objects)["volumes"] if "secret" in v] == ["mine"]


def test_tokens_are_drawn_where_none_is_given(chart: helm_python.Chart) -> None:
    first, second = (one(rendered(chart, {}), "Secret")["data"] for _ in range(2))
    assert first.keys() == {"hash-secret", "admin-token"}
    assert all(len(value) >= 48 for value in first.values())
    assert first["admin-token"] != second["admin-token"]


# --- what it refuses -------------------------------------------------------------------------------------------------

REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {  # values, and what the message names
    "unknown value": ({"replica": 2}, "replica"),
    "unknown nested value": ({"disk": {"sizeGB": 3}}, "sizeGB"),
    "text for a number": ({"replicas": "2"}, "/replicas"),
    "half a replica": ({"replicas": 1.5}, "/replicas"),
    "no weights": ({"model": {"weightsGiB": 0}}, "/model/weightsGiB"),
    "no model": ({"model": {"name": ""}}, "/model/name"),
    "privileged port": ({"ports": {"http": 80}}, "/ports/http"),
    "port out of range": ({"ports": {"http": 99999}}, "/ports/http"),
    "unknown setting": ({"settings": {"KVBOOST_FIDELTY": "exact"}}, "KVBOOST_FIDELTY"),
    "setting that needs a restart": ({"settings": {"KVBOOST_CACHE_BYTES": 1}}, "KVBOOST_CACHE_BYTES"),
    "secret in the settings": ({"settings": {"KVBOOST_HASH_SECRET": "x"}}, "KVBOOST_HASH_SECRET"),
    "unknown fidelity": ({"settings": {"KVBOOST_FIDELITY": "best"}}, "/settings/KVBOOST_FIDELITY"),
    "share above one": ({"settings": {"KVBOOST_SHADOW_SHARE": 5}}, "/settings/KVBOOST_SHADOW_SHARE"),
    "ratio that leaves no reserve": ({"cache": {"ratio": 0.9}}, "/cache/ratio"),
    "negative ratio": ({"cache": {"ratio": -0.1}}, "/cache/ratio"),
    "memory by hand": ({"resources": {"requests": {"memory": "1Gi"}}}, "/resources/requests"),
    "unknown disk": ({"disk": {"enabled": True, "type": "hostPath"}}, "/disk/type"),
    "one claim for many": ({"disk": {"enabled": True, "type": "persistentVolumeClaim"}, "replicas": 2}, "/replicas"),
    "one claim, scaled": (
        {"disk": {"enabled": True, "type": "persistentVolumeClaim"}, "autoscaling": {"enabled": True}},
        "/autoscaling",
    ),
    "claim that is not mounted": ({"disk": {"enabled": True, "existingClaim": "mine"}}, "/disk/type"),
    "Redis without URL": ({"redis": {"enabled": True}}, "/secrets/redisUrl"),
    "keys asked for and not given": ({"auth": {"enabled": True}}, "/secrets/apiKeys"),
    "short token": ({"secrets": {"adminToken": "secret"}}, "/secrets/adminToken"),
    "values beside a Secret": ({"secrets": {"existingSecret": "mine", "adminToken": "x" * 20}}, "/secrets/adminToken"),
    "autoscaler without metric": (
        {"autoscaling": {"enabled": True, "queueLength": None, "ttftP95S": None}},
        "/autoscaling",
    ),
    "VirtualService without host": ({"istio": {"enabled": True}}, "/istio/hosts"),
    "share above 100": ({"istio": {"share": 110}}, "/istio/share"),
    "GPU memory without GPU": ({"gpu": {"memoryGiB": 80}}, "/gpu/memoryGiB"),
    "bad duration": ({"prometheusRule": {"alerts": {"KVBoostTierErrors": {"for": "soon"}}}}, "/KVBoostTierErrors/for"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_schema_refuses_and_names_the_value(chart: helm_python.Chart, case: str) -> None:
    values, named = REFUSED[case]
    with pytest.raises(helm_python.HelmValuesError, match=re.escape(named)):
        chart.validate_schema(values)


def test_refusals_do_not_show_secrets(chart: helm_python.Chart) -> None:
    given = {
        "hashSecret": "hush-1",
        "adminToken": "hush-2",
        "apiKeys": "hush-3",
        "redisUrl": "hush-4",
        "hfToken": "hush-5",
    }
    for secrets in (given, {**given, "existingSecret": "mine"}):
        with pytest.raises(helm_python.HelmValuesError) as raised:
            chart.validate_schema({"secrets": secrets})
        assert "hush" not in str(raised.value)


@pytest.mark.parametrize("case", CASES)
def test_schema_accepts_the_value_files(chart: helm_python.Chart, case: str) -> None:
    chart.validate_schema(CASES[case])


REFUSED_BY_TEMPLATES: Mapping[str, tuple[dict[str, Any], str]] = {
    "gpu: weights 50 %, cache 40 %": (
        {"model": {"weightsGiB": 40}, "gpu": {"enabled": True, "memoryGiB": 80}, "cache": {"ratio": 0.4}},
        "does not fit: of gpu.memoryGiB=80",
    ),
    "gpu: size instead of ratio": (
        {"model": {"weightsGiB": 40}, "gpu": {"enabled": True, "memoryGiB": 80}, "cache": {"sizeGiB": 30}},
        "does not fit: of gpu.memoryGiB=80",
    ),
    "cpu: weights 80 %, cache 35 % of the rest": (
        {"model": {"weightsGiB": 16}, "memory": {"limitGiB": 20}},
        "cache.ratio=0.35 does not fit",
    ),
    "cpu: size above the limit": (
        {"model": {"weightsGiB": 10}, "memory": {"limitGiB": 16}, "cache": {"sizeGiB": 5}},
        "memory.limitGiB=16 is below the request of 17.25 GiB",
    ),
    "Redis URL of another kind": ({"secrets": {"redisUrl": "http://:secret@redis"}}, "secrets.redisUrl has to begin"),
    "cpu: ratio of nothing": ({"memory": {"limitGiB": None}}, "memory.limitGiB is not set"),
}


@pytest.mark.parametrize("case", REFUSED_BY_TEMPLATES)
def test_templates_refuse_what_a_schema_cannot_compute(chart: helm_python.Chart, case: str) -> None:
    values, message = REFUSED_BY_TEMPLATES[case]
    with pytest.raises(helm_python.HelmRenderError, match=re.escape(message)) as raised:
        chart.render(values, name="kvboost")
    assert "secret@" not in str(raised.value)


@pytest.mark.parametrize("ratio", [0.1, 0.35, 0.5, 0.7, 0.84])
@pytest.mark.parametrize("weights_gib", [2, 8, 12, 15])
@pytest.mark.parametrize("gpu", [False, True])
def test_chart_and_server_agree_on_what_fits(
    chart: helm_python.Chart, ratio: float, weights_gib: int, gpu: bool
) -> None:
    from kvboost.errors import SettingsError
    from kvboost.hf.budget import DeviceMemory, cache_budget

    total, weights = 20 * GIB, weights_gib * GIB
    try:
        cache_budget(
            Settings(kv_cache_size_ratio=ratio), DeviceMemory(total, weights, total if gpu else total - weights)
        )
        fits = True
    except SettingsError:
        fits = False
    values = {"model": {"weightsGiB": weights_gib}, "cache": {"ratio": ratio}, "memory": {"limitGiB": 20}}
    if gpu:
        values |= {"gpu": {"enabled": True, "memoryGiB": 20}}
    try:
        chart.render(values, name="kvboost")
        renders = True
    except helm_python.HelmRenderError:
        renders = False
    assert renders == fits


def test_schema_knows_the_settings_that_a_running_server_can_change(chart: helm_python.Chart) -> None:
    schema = chart.schema
    assert schema is not None
    named = set(schema["properties"]["settings"]["propertyNames"]["enum"])
    per_request = {"cache_salt", "chunk_boundaries", "session"}
    live = set(Settings.model_fields) - FIXED - per_request
    planned = {"enabled_share", "share_moved"}  # of the server
    assert named == {f"KVBOOST_{name.upper()}" for name in live | planned}


# --- monitoring and routing ------------------------------------------------------------------------------------------


def test_rules_of_the_chart_are_the_rules(chart: helm_python.Chart) -> None:
    source = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    plain = one(rendered(chart, {"prometheusRule": {"enabled": True}}), "PrometheusRule")["spec"]
    assert plain == source


def test_alerts_can_be_changed_and_left_out(chart: helm_python.Chart) -> None:
    alerts = {
        "KVBoostTierErrors": {"for": "1m", "severity": "critical", "expr": "vector(1)"},
        "KVBoostDisabledLong": {"enabled": False},
    }
    values = {"prometheusRule": {"enabled": True, "runbookBaseUrl": "https://example.com/", "alerts": alerts}}
    groups = one(rendered(chart, values), "PrometheusRule")["spec"]["groups"]
    rules = {r["alert"]: r for g in groups for r in g["rules"] if "alert" in r}
    changed = rules["KVBoostTierErrors"]
    assert (changed["for"], changed["labels"]["severity"], changed["expr"]) == ("1m", "critical", "vector(1)")
    assert "KVBoostDisabledLong" not in rules
    assert rules["KVBoostMovedSuspended"]["annotations"]["runbook_url"].startswith("https://example.com/docs/runbooks/")
    with pytest.raises(helm_python.HelmRenderError, match="KVBoostNothing is no alert"):
        chart.render({"prometheusRule": {"enabled": True, "alerts": {"KVBoostNothing": {"for": "1m"}}}})


def test_dashboard_of_the_chart_is_the_dashboard(chart: helm_python.Chart) -> None:
    config = one(rendered(chart, {"grafana": {"enabled": True}}), "ConfigMap", "kvboost-dashboard")
    assert json.loads(config["data"]["kvboost.json"]) == json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_autoscaler_asks_for_what_the_adapter_serves(chart: helm_python.Chart) -> None:
    metrics = one(rendered(chart, {"autoscaling": {"enabled": True}}), "HorizontalPodAutoscaler")["spec"]["metrics"]
    adapter = yaml.safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())["rules"]
    (pods,) = [m["pods"] for m in metrics if m["type"] == "Pods"]
    (external,) = [m["external"] for m in metrics if m["type"] == "External"]
    assert adapter["custom"][0]["seriesQuery"].split("{")[0] == pods["metric"]["name"]
    assert adapter["external"][0]["seriesQuery"].split("{")[0] == external["metric"]["name"]
    assert pods["metric"]["name"] in METRICS
    assert external["target"]["value"] == "2000m"
    only = rendered(chart, {"autoscaling": {"enabled": True, "ttftP95S": None}})
    assert [m["type"] for m in one(only, "HorizontalPodAutoscaler")["spec"]["metrics"]] == ["Pods"]
    assert "replicas" not in one(only, "Deployment")["spec"]


@pytest.mark.parametrize(("share", "weights"), [(0, [100]), (10, [10, 90]), (100, [100])])
@pytest.mark.parametrize("baseline", ["", "plain"])
def test_virtual_service_routes_by_the_header(
    chart: helm_python.Chart, share: int, weights: list[int], baseline: str
) -> None:
    values = {"istio": {"enabled": True, "hosts": ["llm"], "share": share, "baseline": {"host": baseline}}}
    asked, declined, drawn = one(rendered(chart, values), "VirtualService")["spec"]["http"]
    assert asked["match"] == [{"headers": {"x-kvboost-enabled": {"exact": "true"}}}]
    assert declined["match"] == [{"headers": {"x-kvboost-enabled": {"exact": "false"}}}]
    assert "match" not in drawn
    assert asked["route"][0]["destination"] == {"host": "kvboost", "port": {"number": 8080}}
    other = {"host": "plain", "port": {"number": 80}} if baseline else asked["route"][0]["destination"]
    assert declined["route"][0]["destination"] == other
    assert [route["weight"] for route in drawn["route"]] == weights
    told = [route["headers"]["request"]["set"]["x-kvboost-enabled"] for route in drawn["route"]]
    assert told == [*["true"] * (share > 0), *["false"] * (share < 100)]
    assert all(route["timeout"] == "0s" and route["retries"] == {"attempts": 0} for route in (asked, declined, drawn))


def test_admin_port_is_closed_unless_peers_are_named(chart: helm_python.Chart) -> None:
    peer = {"podSelector": {"matchLabels": {"role": "operator"}}}
    closed = one(rendered(chart, {"networkPolicy": {"enabled": True}}), "NetworkPolicy")["spec"]
    opened = one(rendered(chart, {"networkPolicy": {"enabled": True, "adminFrom": [peer]}}), "NetworkPolicy")["spec"]
    assert [rule["ports"][0]["port"] for rule in closed["ingress"]] == ["http", "metrics"]
    assert opened["ingress"][-1] == {"ports": [{"port": "admin"}], "from": [peer]}
    assert closed["policyTypes"] == ["Ingress"]


# --- kustomize and the image -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def render_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", DEPLOY / "kustomize" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kustomize_base_is_what_the_chart_makes(render_script: ModuleType) -> None:
    committed = (DEPLOY / "kustomize" / "base" / "kvboost.yaml").read_text()
    assert committed == render_script.render_base(), "run deploy/kustomize/render.py as it says"
    for document in yaml.safe_load_all(committed):
        kubernetes_validate.validate(document, KUBERNETES[-1], strict=True)


def test_kustomizations_name_files_and_patch_objects_that_exist(chart: helm_python.Chart) -> None:
    base = list(yaml.safe_load_all((DEPLOY / "kustomize" / "base" / "kvboost.yaml").read_text()))
    known = {(o["apiVersion"], o["kind"], o["metadata"]["name"]) for o in base}
    for path in sorted((DEPLOY / "kustomize").rglob("kustomization.yaml")):
        kustomization = yaml.safe_load(path.read_text())
        assert all((path.parent / resource).exists() for resource in kustomization["resources"])
        for patch in kustomization.get("patches", []):
            document = yaml.safe_load((path.parent / patch["path"]).read_text())
            assert (document["apiVersion"], document["kind"], document["metadata"]["name"]) in known
        for image in kustomization.get("images", []):
            assert image["name"] == chart.values["image"]["repository"]


@pytest.mark.may_skip("kubectl is on few machines; the base is compared with the chart above")
def test_overlay_builds_with_the_real_kustomize() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    overlay = DEPLOY / "kustomize" / "overlays" / "gpu"
    built = subprocess.run(
        ["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, timeout=60, check=False
    )
    assert built.returncode == 0, built.stderr
    objects = list(yaml.safe_load_all(built.stdout))
    for document in objects:
        kubernetes_validate.validate(document, KUBERNETES[-1], strict=True)
    (container,) = pod_of(objects)["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"].startswith("kvboost-cuda:")
    assert settings_of(objects)["KVBOOST_SHADOW_SHARE"] == "0.01"


DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
COPIED = [
    source
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
    for source in shlex.split(line)[:-1]
]


def test_image_agrees_with_the_chart(chart: helm_python.Chart) -> None:
    pod = pod_of(rendered(chart, {}))
    context = pod["securityContext"]
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == [f"{context['runAsUser']}:{context['runAsGroup']}"]
    (exposed,) = re.findall(r"^EXPOSE (.*)$", DOCKERFILE, re.MULTILINE)
    assert set(map(int, exposed.split())) == {p["containerPort"] for p in pod["containers"][0]["ports"]}
    assert re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE) == ['["kvboost"]']
    assert pod["containers"][0]["args"][0] == "serve"


def test_image_is_built_from_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {path.split("/")[0] for path in (*wheel["packages"], *wheel["force-include"])}
    assert set(COPIED) == needed
    assert all((ROOT / source).exists() for source in COPIED)
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    assert set(extras.split(",")) <= project["project"]["optional-dependencies"].keys()


def test_build_context_holds_what_is_copied_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    dropped = [line for line in lines if not line.startswith("!")]
    assert dropped[0] == "*"
    assert set(kept) == set(COPIED)
    assert not [source for source in COPIED for pattern in dropped[1:] if fnmatch.fnmatch(source, pattern)]


def test_chart_has_the_version_of_the_package(chart: helm_python.Chart) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart.version == chart.metadata["appVersion"] == project["version"]
