"""The administrators' app: who may speak to it, what it changes at once, and that its X-ray adds up."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from families import build
from kvboost import KVBoost, SettingsError
from kvboost.hf.loading import load_model
from kvboost.metrics import Metrics
from kvboost.server.admin import MAX_BODY_BYTES, make_admin_app, settings_in_force
from kvboost.server.guard import is_loopback
from kvboost.server.xray import RequestRing
from scenario import SMALL

TOKEN = "a token of some length"
STORY = "Once upon a time there was a little girl named Lily. She loved to play outside in the park with her red ball. "
OTHER = "One day a big dog came and took the ball away. Lily was very sad and wanted her mom to help her get it back. "
EVERYTHING = [
    ("GET", "/admin/settings"),
    ("POST", "/admin/settings"),
    ("DELETE", "/admin/settings"),
    ("GET", "/admin/cache/stats"),
    ("POST", "/admin/cache/clear"),
    ("POST", "/admin/cache/warm"),
    ("POST", "/admin/invalidate"),
    ("POST", "/admin/shadow/resume"),
    ("GET", "/admin/overview"),
    ("GET", "/admin/requests"),
    ("GET", "/admin/requests/r1"),
    ("GET", "/admin/xray?text=x"),
    ("POST", "/admin/xray"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
]


@pytest.fixture
def kv(shared_data: Path) -> Iterator[KVBoost]:
    model, tokenizer = load_model(shared_data / "models" / "stories260K-llama")
    plain = {"min_moved_share": 0.0, "recompute_strategy": "epic", "gate": False}
    with KVBoost(model, tokenizer, **{**SMALL, **plain}) as made:
        yield made


@pytest.fixture
def ring() -> RequestRing:
    return RequestRing(2)


@pytest.fixture
def admin(kv: KVBoost, ring: RequestRing) -> Iterator[TestClient]:
    app = make_admin_app(kv, Metrics(kv, model="stories"), token=TOKEN, ring=ring)
    with TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client


def answer(kv: KVBoost, text: str, **settings: Any) -> Any:
    return kv.generate(text, max_new_tokens=2, do_sample=False, **settings)


def post(admin: TestClient, path: str, **body: Any) -> Any:
    response = admin.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


# --- who may speak ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"])
def test_nothing_is_told_without_the_token(admin: TestClient, header: str | None) -> None:
    admin.headers.pop("Authorization")
    for method, path in EVERYTHING:
        response = admin.request(method, path, headers={} if header is None else {"Authorization": header})
        assert response.status_code == 401, path
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert set(response.json()) == {"error"}


@pytest.mark.parametrize(("host", "without"), [("0.0.0.0", True), ("127.0.0.1", False), ("example.org", True)])
@pytest.mark.parametrize("token", [None, ""])
def test_a_port_without_a_token_is_refused(kv: KVBoost, host: str, without: bool, token: str | None) -> None:
    with pytest.raises(SettingsError, match="--admin-token-file"):
        make_admin_app(kv, Metrics(kv, model="m"), token=token, host=host, without_token=without)


def test_on_loopback_it_may_be_left_open_but_not_for_web_pages(kv: KVBoost) -> None:
    app = make_admin_app(kv, Metrics(kv, model="m"), token=None, without_token=True)
    client = TestClient(app)
    for host, status in (("localhost:8081", 200), ("127.0.0.1", 200), ("[::1]:8081", 200), ("evil.example:8081", 401)):
        assert client.get("/admin/settings", headers={"Host": host}).status_code == status, host


def test_loopback_is_known_by_its_address() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "")))


def test_a_body_without_end_is_refused_before_it_is_read(admin: TestClient) -> None:
    large = admin.post("/admin/cache/warm", content=b"{}", headers={"Content-Length": str(MAX_BODY_BYTES + 1)})
    assert large.status_code == 413
    assert admin.post("/admin/cache/warm", content=iter([b"{}"])).status_code == 411


# --- settings --------------------------------------------------------------------------------------------------------


def test_an_override_holds_for_the_next_request_until_it_is_taken_back(kv: KVBoost, admin: TestClient) -> None:
    answer(kv, STORY)
    shown = post(admin, "/admin/settings", disable=True)
    assert shown["settings"]["disable"] == {"value": True, "origin": "admin"}
    assert answer(kv, STORY).report.fallback == "switched off"
    assert admin.delete("/admin/settings", params={"name": "disable"}).json()["overrides"] == []
    assert answer(kv, STORY).report.exact_tokens > 0


def test_overrides_are_taken_together_or_not_at_all(kv: KVBoost, admin: TestClient) -> None:
    for values, param in (
        ({"fidelity": "fast", "shadow_share": 2}, "shadow_share"),
        ({"fidelity": "fast", "shadow_share": [1]}, "shadow_share"),
        ({"fidelity": "fast", "colour": "red"}, "colour"),
        ({"fidelity": "fast", "cache_bytes": "1GiB"}, "cache_bytes"),
        ({"fidelity": "fast", "chunk_max_tokens": 1}, None),
    ):
        response = admin.post("/admin/settings", json=values)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert (param or "chunk_max_tokens") in error["message"]
    assert kv.settings().fidelity == "balanced"
    assert kv.live.status().generation == 0


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"{", b'"disable"', b"\xff\xfe"])
def test_a_body_that_is_no_object_is_refused(admin: TestClient, content: bytes) -> None:
    response = admin.post("/admin/settings", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_a_body_of_unknown_type_is_told_the_header_that_it_lacks(admin: TestClient) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl sends with -d
    response = admin.post("/admin/settings", content=b'{"fidelity": "exact"}', headers=form)
    assert response.status_code == 400
    assert "content-type: application/json" in response.json()["error"]["message"]


def test_numbers_that_are_none_are_refused(kv: KVBoost, admin: TestClient) -> None:
    for value in ("NaN", "1e999", "-1"):
        body = f'{{"risk_bound": {value}, "shadow_share": {value}}}'
        response = admin.post("/admin/settings", content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, value
        assert response.json()["error"]["param"] in ("risk_bound", "shadow_share")
    assert kv.live.status().admin == {}


def test_secrets_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_HASH_SECRET", "t0psecret")
    with KVBoost(build("llama")) as kv:
        shown = settings_in_force(kv)
        assert shown["settings"]["hash_secret"]["origin"] == "environment"
        assert "t0psecret" not in json.dumps(shown)
        with pytest.raises(SettingsError, match="hash_secret is read when the engine is made") as raised:
            kv.live.set({"hash_secret": "an0ther"})
        assert "an0ther" not in str(raised.value)


def test_an_unknown_override_cannot_be_taken_back(admin: TestClient) -> None:
    response = admin.delete("/admin/settings", params={"name": "colour"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "colour")


# --- cache -----------------------------------------------------------------------------------------------------------


def test_what_is_warmed_is_found_and_pinned(kv: KVBoost, admin: TestClient) -> None:
    report = post(admin, "/admin/cache/warm", text=OTHER, pin=True)
    assert report["written_tokens"] > 0
    assert admin.get("/admin/cache/stats").json()["tiers"]["memory"]["pinned_entries"] > 0
    assert answer(kv, STORY + OTHER).report.moved_tokens > 0


def test_an_empty_text_cannot_be_warmed(admin: TestClient) -> None:
    response = admin.post("/admin/cache/warm", json={"text": " "})
    assert response.status_code == 400
    assert "no text to warm" in response.json()["error"]["message"]


def test_one_namespace_is_cleared_and_the_others_stay(kv: KVBoost, admin: TestClient) -> None:
    for salt in ("", "a", "b"):
        answer(kv, STORY, cache_salt=salt)
    assert post(admin, "/admin/cache/clear", namespace="a")["removed"] > 0
    hits = {salt: answer(kv, STORY, cache_salt=salt, mode="observe").report.exact_tokens for salt in ("", "a", "b")}
    assert hits["a"] == 0 < min(hits[""], hits["b"])
    assert post(admin, "/admin/cache/clear", namespace="")["removed"] > 0
    assert answer(kv, STORY, cache_salt="b").report.exact_tokens > 0
    assert answer(kv, STORY).report.exact_tokens == 0


def test_what_was_not_used_for_long_is_cleared(kv: KVBoost, admin: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(kv, STORY)
    whole, now = kv.plan(STORY).prefix_tokens, time.time
    assert post(admin, "/admin/cache/clear", unused_for="1h")["removed"] == 0
    with monkeypatch.context() as later:
        later.setattr("kvboost.store.memory.time.time", lambda: now() + 7200)
        answer(kv, OTHER)
    entries = kv.store.stats().entries
    later_now = now() + 7200
    monkeypatch.setattr("kvboost.engine.time.time", lambda: later_now)
    removed = post(admin, "/admin/cache/clear", unused_for=3600)["removed"]
    assert 0 < removed < entries
    assert kv.plan(STORY).prefix_tokens < whole, "but for the tokens that both begin with"
    assert kv.plan(OTHER).prefix_tokens > whole / 2


def test_everything_is_cleared_only_if_that_is_said(kv: KVBoost, admin: TestClient) -> None:
    answer(kv, STORY)
    for body in ({}, {"all": False}, {"all": True, "namespace": "a"}, {"everything": True}, {"unused_for": "soon"}):
        assert admin.post("/admin/cache/clear", json=body).status_code == 400, body
    assert kv.store.stats().entries > 0
    assert post(admin, "/admin/cache/clear", all=True)["removed"] > 0
    assert kv.store.stats().entries == 0


def test_all_tiers_are_cleared(kv: KVBoost, tmp_path: Path) -> None:
    with KVBoost(kv.model, kv.tokenizer, disk_directory=str(tmp_path), **SMALL) as lasting:
        admin = TestClient(make_admin_app(lasting, Metrics(lasting, model="m"), token=TOKEN))
        admin.headers["Authorization"] = f"Bearer {TOKEN}"
        for salt in ("a", "b"):
            answer(lasting, STORY, cache_salt=salt)
        assert post(admin, "/admin/cache/clear", namespace="a")["removed"] > 0
        assert (
            lasting.plan(STORY, cache_salt="a").prefix_tokens == 0 < lasting.plan(STORY, cache_salt="b").prefix_tokens
        )
        assert lasting.flush()
        tiers = lasting.store.stats_by_tier()
        assert tiers["disk"].entries == tiers["memory"].entries > 0


def test_the_engine_forgets_what_older_weights_computed(kv: KVBoost, admin: TestClient) -> None:
    answer(kv, STORY)
    assert post(admin, "/admin/invalidate")["removed"] > 0
    assert answer(kv, STORY).report.exact_tokens == 0


def test_suspended_reuse_goes_on_when_told(kv: KVBoost, admin: TestClient) -> None:
    kv.shadow._suspended = "measured too far off"
    assert admin.get("/admin/cache/stats").json()["shadow"]["suspended"] == "measured too far off"
    assert post(admin, "/admin/shadow/resume")["suspended"] is None
    assert kv.shadow.suspended is None


def test_metrics_stand_here_too(admin: TestClient) -> None:
    response = admin.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain")
    assert "kvboost_cache_entries" in {f.name for f in text_string_to_metric_families(response.text)}


# --- X-ray -----------------------------------------------------------------------------------------------------------


def assert_adds_up(shown: Any, text: str | None = None) -> None:
    counts, n = shown["counts"], shown["num_tokens"]
    assert sum(counts.values()) == n == len(shown["tokens"]) == shown["cost"]["full_tokens"]
    for kind, count in counts.items():
        assert sum(t["kind"] == kind for t in shown["tokens"]) == count
    assert [s["start"] for s in shown["segments"]] == [0, *(s["stop"] for s in shown["segments"][:-1])]
    assert shown["segments"][-1]["stop"] == n
    if text is not None:
        assert "".join(t["text"] for t in shown["tokens"]).removeprefix("<s>").strip() == text.strip()


def test_an_xray_tells_of_every_token_where_it_came_from(kv: KVBoost, admin: TestClient) -> None:
    answer(kv, STORY + OTHER)
    text = STORY[:90] + "And then. " + OTHER
    before = kv.store.stats()
    shown = admin.get("/admin/xray", params={"text": text}).json()
    assert_adds_up(shown, text)
    assert shown["counts"]["exact"] > 0 < shown["counts"]["moved"]
    moved = next(s for s in shown["segments"] if s["kind"] == "moved")
    assert moved["shift"] == moved["start"] - moved["source_position"] != 0
    assert (moved["tier"], moved["hits"], moved["lineage"]) == ("memory", 0, "bit_exact")
    assert 0 <= moved["age_s"] < 600
    assert shown["cost"]["computed_tokens"] < shown["num_tokens"]
    assert 0 < shown["cost"]["computed_s"] < shown["cost"]["full_prefill_s"]
    assert kv.store.stats() == before, "looking changes nothing"
    answer(kv, text)
    again = admin.post("/admin/xray", json={"text": text}).json()
    assert max(s["hits"] for s in again["segments"] if "hits" in s) > 0


def test_an_xray_looks_into_one_namespace(kv: KVBoost, admin: TestClient) -> None:
    answer(kv, STORY, cache_salt="a")
    shown = {n: admin.post("/admin/xray", json={"text": STORY, "namespace": n}).json() for n in ("a", "b")}
    assert shown["a"]["counts"]["exact"] > 0 == shown["b"]["counts"]["exact"]
    assert shown["b"]["cost"]["full_prefill_s"] is None, "nothing is known of it there"


@pytest.mark.parametrize("body", [{}, {"text": "a", "messages": []}, {"text": ""}, {"messages": [{"role": "user"}]}])
def test_a_prompt_that_is_none_has_no_xray(admin: TestClient, body: Any) -> None:
    response = admin.post("/admin/xray", json=body)
    assert response.status_code == (200 if body == {"text": ""} else 400)  # the tokenizer adds its first token


def test_the_last_requests_can_be_looked_at_where_the_ring_is_on(
    kv: KVBoost, admin: TestClient, ring: RequestRing
) -> None:
    last = STORY[:90] + "And then. " + OTHER
    for i, text in enumerate((OTHER, STORY + OTHER, last)):
        out = answer(kv, text)
        ring.add(f"r{i}", kv.encode(text), out.plan, out.report)
    listed = admin.get("/admin/requests").json()
    assert [r["request_id"] for r in listed["requests"]] == ["r2", "r1"]
    assert "Lily" not in json.dumps(listed)
    shown = admin.get("/admin/requests/r2").json()
    assert_adds_up(shown, last)
    assert shown["counts"]["repaired"] == shown["repaired_tokens"] == out.report.repaired_tokens > 0
    assert not shown["cost"]["repaired_is_estimated"]
    assert admin.get("/admin/requests/r0").status_code == 404


def test_no_prompt_is_kept_unless_that_is_asked_for(kv: KVBoost) -> None:
    ring = RequestRing()
    out = answer(kv, STORY)
    ring.add("r", kv.encode(STORY), out.plan, out.report)
    assert ring.latest() == []
    admin = TestClient(make_admin_app(kv, Metrics(kv, model="m"), token=TOKEN))
    response = admin.get("/admin/requests/r", headers={"Authorization": f"Bearer {TOKEN}"})
    assert response.status_code == 404
    assert "is off" in response.json()["error"]["message"]


def test_a_request_that_was_not_answered_is_left_out(ring: RequestRing) -> None:
    ring.add("r", [1, 2], None, None)
    assert ring.latest() == []
