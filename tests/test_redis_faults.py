"""Redis killed, paused, slow, full, restarted, misconfigured, tampered with: a miss each time, and counted."""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from families import build_fresh
from kvboost.store import Lease, MemoryTier, TieredStore
from kvboost.store.breaker import Breaker
from kvboost.store.records import FORMAT_VERSION, Seal
from kvboost.store.redis import RedisTier
from redis_server import RedisServer, SlowProxy
from scenario import engine, greedy, logits, prompt
from test_breaker import Clock
from test_store import holds, record

PATIENT_S = 20.0
SHORT_S = 0.3
LONG_S = 10.0  # no request takes this; far above any timeout here, for busy machines
BACKOFF_S = 100.0  # passes only when a test moves the clock


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may harm."""
    own = RedisServer(tmp_path)
    yield own
    own.stop()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def tier_on(url: str, clock: Clock | None = None, secret: str = "secret", **settings: Any) -> RedisTier:
    breaker = Breaker(backoff_s=BACKOFF_S, clock=clock or time.monotonic, jitter=lambda: 1.0)
    return RedisTier(url, Seal(secret), breaker=breaker, **{"timeout_s": PATIENT_S, "touch_s": 0.0, **settings})


def record_id(number: int) -> bytes:
    return record(number).header.record_id


def errors_of(tier: RedisTier) -> dict[str, int]:
    """Counted so far; asking the server for its books may add one more."""
    return dict(tier._line.errors)


def everything_is_a_miss(tier: RedisTier) -> None:
    assert tier.find(record(1).header.names()) == {}
    assert not holds(tier, 1)
    assert tier.put_many([record(2)]) == 0
    assert tier.stats().entries == 0


# --- the server --------------------------------------------------------------------------------------------------


def test_a_killed_server_costs_one_failure_and_is_used_again_when_it_is_back(
    server: RedisServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    tier = tier_on(server.url, clock)
    tier.put_many([record(1)])
    server.stop()
    everything_is_a_miss(tier)
    assert errors_of(tier) == {"unreachable": 1, "open": 3}
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 2, "one line per kind"
    server.start()
    everything_is_a_miss(tier)
    clock.now_s += BACKOFF_S
    assert tier.find(record(1).header.names()) == {}, "it came back empty"
    assert tier.put_many([record(1)]) == 8
    assert holds(tier, 1)
    assert errors_of(tier) == {"unreachable": 1, "open": 7}


def test_a_server_restarted_empty_between_two_calls_is_no_failure(server: RedisServer, clock: Clock) -> None:
    tier = tier_on(server.url, clock)
    tier.put_many([record(1), record(2)])
    assert tier.find(record(1).header.names())
    server.stop()
    server.start()
    assert not holds(tier, 1)
    assert tier.find(record(1).header.names()) == {}
    assert tier.put_many([record(1)]) == 8
    assert holds(tier, 1)
    assert tier.stats().entries == 1
    assert errors_of(tier) == {}


def test_a_paused_server_costs_a_request_one_timeout_and_the_next_nothing(server: RedisServer, clock: Clock) -> None:
    tier = tier_on(server.url, clock, timeout_s=SHORT_S)
    tier.put_many([record(1)])
    with server.paused():
        began = time.monotonic()
        everything_is_a_miss(tier)
        assert time.monotonic() - began < LONG_S
        assert errors_of(tier) == {"timeout": 1, "open": 3}
    clock.now_s += BACKOFF_S
    assert holds(tier, 1), "what it held is still right"


@pytest.mark.parametrize("piece_bytes", [1 << 16, 1])
def test_a_slow_server_costs_one_timeout_also_if_it_is_never_quite_silent(
    server: RedisServer, clock: Clock, piece_bytes: int
) -> None:
    proxy = SlowProxy(server.port)
    tier = tier_on(proxy.url, clock, timeout_s=SHORT_S)
    tier.put_many([record(1)])
    assert holds(tier, 1)
    proxy.piece_bytes, proxy.delay_s = piece_bytes, SHORT_S / 3 if piece_bytes == 1 else 2 * SHORT_S
    began = time.monotonic()
    with tier.get_many([record_id(1)]) as lease:
        assert not lease.records
    assert time.monotonic() - began < LONG_S
    assert errors_of(tier)["timeout"] == 1
    assert errors_of(tier).get("open", 0) == 0, "records of this request that did arrive need no second call"
    proxy.delay_s = 0.0
    assert not holds(tier, 1)
    clock.now_s += BACKOFF_S
    assert holds(tier, 1)
    proxy.close()


def test_many_requests_at_a_paused_server_all_end(server: RedisServer, clock: Clock) -> None:
    tier = tier_on(server.url, clock, timeout_s=SHORT_S)
    tier.put_many([record(1)])
    found: list[object] = []
    with server.paused():
        threads = [threading.Thread(target=lambda: found.append(tier.find([b"a"]))) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(LONG_S)
    assert found == [{}] * 8
    clock.now_s += BACKOFF_S
    assert holds(tier, 1)


def test_a_full_server_refuses_whole_records_and_serves_what_it_has(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, ["--maxmemory", "4mb", "--maxmemory-policy", "noeviction"])
    try:
        tier = tier_on(server.url)
        written = [tier.put_many([record(n, size=4000, fill=float(n))]) for n in range(40)]
        kept = [n for n in range(40) if written[n]]
        assert 0 < len(kept) < 40
        assert errors_of(tier) == {"full": 40 - len(kept)}
        for n in range(40):
            found = tier.find(record(n).header.names())
            assert bool(found) == (n in kept), "no name without its record"
            with tier.get_many([record_id(n)]) as lease:
                assert [int(r.payload[0].keys.max()) for r in lease.records.values()] == [n] * (n in kept)
        assert tier.delete() == len(kept), "deleting needs no memory"
        assert tier.put_many([record(1)]) == 8
    finally:
        server.stop()


def test_a_server_that_evicts_by_itself_keeps_whole_records(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, ["--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru"])
    try:
        tier = tier_on(server.url)
        for n in range(40):
            assert tier.put_many([record(n, size=4000, fill=float(n))]) == 4000
        kept = 0
        for n in range(40):
            with tier.get_many([record_id(n)]) as lease:
                assert [int(r.payload[0].keys.max()) for r in lease.records.values()] in ([n], [])
                kept += bool(lease.records)
        assert 0 < kept < 40
        assert errors_of(tier) == {}
    finally:
        server.stop()


def test_a_read_only_replica_serves_and_refuses_to_store(server: RedisServer) -> None:
    tier = tier_on(server.url)
    tier.put_many([record(1)])
    server.client().replicaof("127.0.0.1", "1")
    assert holds(tier, 1)
    assert tier.put_many([record(2)]) == 0
    assert errors_of(tier)["read_only"] > 0
    assert holds(tier, 1)
    assert "open" not in errors_of(tier)


def test_what_was_deleted_while_the_server_was_away_is_not_served_when_it_is_back(
    server: RedisServer, clock: Clock
) -> None:
    tier = tier_on(server.url, clock, timeout_s=SHORT_S)
    tier.put_many([record(1), record(2), record(3)])
    with server.paused():
        assert tier.delete([record_id(1)]) == 0
        assert tier.delete([record_id(2)]) == 0
    clock.now_s += BACKOFF_S
    assert [holds(tier, n) for n in (1, 2, 3)] == [False, False, True]
    with server.paused():
        assert tier.delete() == 0
    clock.now_s += 4 * BACKOFF_S
    assert not holds(tier, 3)
    assert server.client().keys() == []


def test_deletions_that_a_server_owes_are_bounded_and_what_is_given_up_is_counted(
    server: RedisServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.store.redis.MAX_OWED", 3)
    tier = tier_on(server.url, clock, timeout_s=SHORT_S)
    tier.put_many([record(n) for n in range(7)])
    with server.paused():
        tier.delete([record_id(n) for n in range(4)])
        tier.delete([record_id(4)])
        assert len(tier._owed) == 3
    assert errors_of(tier)["undeleted"] == 2
    clock.now_s += 4 * BACKOFF_S
    assert [n for n in range(7) if holds(tier, n)] == [0, 1, 5, 6], "the latest are deleted"
    assert tier._owed == []


def test_that_everything_is_to_go_is_owed_whatever_else_is(
    server: RedisServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.store.redis.MAX_OWED", 3)
    tier = tier_on(server.url, clock, timeout_s=SHORT_S)
    tier.put_many([record(n) for n in range(3)])
    with server.paused():
        tier.delete()
        for n in range(9):
            tier.delete([record_id(n)])
        assert tier._owed == [(None,)]
    assert "undeleted" not in errors_of(tier)
    clock.now_s += 16 * BACKOFF_S
    assert not any(holds(tier, n) for n in range(3))


# --- who may, and how ----------------------------------------------------------------------------------------------


def user(name: str, password: str, *rights: str) -> list[str]:
    return ["--user", name, "on", f">{password}", "~*", "&*", *rights]


def test_a_wrong_password_is_refused_and_never_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvboost")
    server = RedisServer(tmp_path, ["--requirepass", "right-word", *user("ours", "our-word", "+@all")])
    host = server.url.removeprefix("redis://")
    try:
        for url, given in (
            (server.url, {}),
            (f"redis://:wrong-word@{host}", {}),
            (server.url, {"username": "ours", "password": "wrong-word"}),
        ):
            tier = tier_on(url, **given)
            everything_is_a_miss(tier)
            assert errors_of(tier) == {"refused": 1, "open": 3}
        for url, given in (
            (f"redis://:right-word@{host}", {}),
            (f"redis://ours:our-word@{host}", {}),
            (server.url, {"username": "ours", "password": "our-word"}),
        ):
            tier = tier_on(url, prefix="p", **given)
            tier.put_many([record(1)])
            assert holds(tier, 1)
        assert "-word" not in caplog.text
    finally:
        server.stop()


def test_a_user_who_may_not_write_reads(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, user("reader", "word", "+@read", "+@connection"))
    try:
        tier_on(server.url).put_many([record(1)])
        reader = tier_on(server.url, username="reader", password="word")
        with reader.get_many([record_id(1)]) as lease:
            assert len(lease.records) == 1, "that its use cannot be noted does not matter"
        assert reader.put_many([record(2)]) == 0
        assert errors_of(reader).keys() == {"permission"}
    finally:
        server.stop()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A self-made authority `ca.crt`, another that signed nothing, and a certificate for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    for name in ("ca", "other"):
        keys = ["-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}"]
        subprocess.run([*openssl, *keys], cwd=tmp_path, check=True, capture_output=True)
    signed = ["-keyout", "server.key", "-out", "server.crt", "-subj", "/CN=server", "-CA", "ca.crt", "-CAkey", "ca.key"]
    extensions = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*openssl, *signed, *extensions], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def test_tls_trusts_the_given_authority_only(certificates: Path) -> None:
    options = ["--tls-cert-file", "server.crt", "--tls-key-file", "server.key", "--tls-ca-cert-file", "ca.crt"]
    server = RedisServer(certificates, ["--tls-auth-clients", "no", *options], tls=True)
    try:
        tier = tier_on(server.url, ca_file=str(certificates / "ca.crt"))
        tier.put_many([record(1)])
        assert holds(tier, 1)
        assert errors_of(tier) == {}
        for settings in ({"ca_file": str(certificates / "other.crt")}, {}):
            tier = tier_on(server.url, **settings)
            everything_is_a_miss(tier)
            assert errors_of(tier)["unreachable"] == 1
        tier = tier_on(server.url.replace("127.0.0.1", "localhost"), ca_file=str(certificates / "ca.crt"))
        everything_is_a_miss(tier)
        plain = tier_on(server.url.replace("rediss", "redis"), timeout_s=SHORT_S)
        everything_is_a_miss(plain)
    finally:
        server.stop()


# --- what the server holds ---------------------------------------------------------------------------------------


def key_of(prefix: str, number: int) -> bytes:
    return f"{prefix}/r/".encode() + record_id(number)


def test_records_of_another_secret_are_refused_and_left_alone(redis_server: RedisServer) -> None:
    owner = tier_on(redis_server.url, prefix="secret", secret="ours")
    owner.put_many([record(1)])
    for secret in ("theirs", ""):
        stranger = tier_on(redis_server.url, prefix="secret", secret=secret)
        assert stranger.find(record(1).header.names()) == {}
        assert not holds(stranger, 1)
        assert errors_of(stranger) == {"damaged": 2}
    assert holds(owner, 1)


def test_a_forged_record_is_detected(redis_server: RedisServer) -> None:
    forger = tier_on(redis_server.url, prefix="forger", secret="a guess")
    forger.put_many([record(1, fill=666.0)])
    ours = tier_on(redis_server.url, prefix="forged")
    ours.put_many([record(1, fill=1.0)])
    server = redis_server.client()
    server.copy(key_of("forger", 1), key_of("forged", 1), replace=True)
    fresh = tier_on(redis_server.url, prefix="forged")
    assert fresh.find(record(1).header.names()) == {}
    assert not holds(fresh, 1)
    assert errors_of(fresh) == {"damaged": 2}
    assert fresh.put_many([record(1, fill=1.0)]) == 8, "the forged one is not taken as known"
    assert holds(fresh, 1)


def test_a_true_record_in_a_false_place_is_not_served(redis_server: RedisServer) -> None:
    tier = tier_on(redis_server.url, prefix="places")
    tier.put_many([record(1, fill=1.0), record(2, fill=2.0)])
    server = redis_server.client()
    foreign_name = record(2).header.key.content_hash
    server.zadd(b"places/n/" + foreign_name, {record_id(1): time.time() + 100})
    server.copy(key_of("places", 1), key_of("places", 3), replace=True)
    fresh = tier_on(redis_server.url, prefix="places")
    assert [h.record_id for h in fresh.find([foreign_name])[foreign_name]] == [record_id(2)]
    assert not holds(fresh, 3)
    server.hset(key_of("places", 1), "p", server.hget(key_of("places", 2), "p"))
    assert not holds(fresh, 1), "the head of one, the payload of another"


def test_a_damaged_payload_of_ours_is_removed_so_that_it_is_stored_again(redis_server: RedisServer) -> None:
    tier = tier_on(redis_server.url, prefix="removed")
    tier.put_many([record(1, fill=1.0)])
    redis_server.client().hset(key_of("removed", 1), "p", b"short")
    assert tier.find(record(1).header.names()), "its head is sound"
    assert not holds(tier, 1)
    assert errors_of(tier) == {"damaged": 1}
    assert tier.find(record(1).header.names()) == {}
    assert tier.put_many([record(1, fill=1.0)]) == 8
    assert holds(tier, 1)


def test_a_record_of_another_format_version_is_refused(redis_server: RedisServer) -> None:
    tier = tier_on(redis_server.url, prefix="version")
    tier.put_many([record(1)])
    server = redis_server.client()
    head = bytearray(server.hget(key_of("version", 1), "h"))
    assert head[4] == FORMAT_VERSION
    head[4] += 1
    server.hset(key_of("version", 1), "h", bytes(head))
    fresh = tier_on(redis_server.url, prefix="version")
    assert fresh.find(record(1).header.names()) == {}
    assert not holds(fresh, 1)
    assert errors_of(fresh) == {"damaged": 2}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["h", "p"]), st.integers(0, 1 << 20), st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_a_miss(redis_server: RedisServer, field: str, at: int, bit: int) -> None:
    tier = tier_on(redis_server.url, prefix="bits")
    tier.delete()
    tier.put_many([record(1, fill=1.0)])
    server = redis_server.client()
    data = bytearray(server.hget(key_of("bits", 1), field))
    data[at % len(data)] ^= 1 << bit
    server.hset(key_of("bits", 1), field, bytes(data))
    fresh = tier_on(redis_server.url, prefix="bits")
    for headers in fresh.find(record(1).header.names()).values():
        assert [h.record_id for h in headers] == [record_id(1)]
    assert not holds(fresh, 1)
    assert errors_of(fresh)["damaged"] >= 1
    for used in (tier, fresh):
        used.close()


def test_keys_of_another_type_are_a_miss_and_are_replaced(redis_server: RedisServer) -> None:
    tier = tier_on(redis_server.url, prefix="types")
    server = redis_server.client()
    server.set(key_of("types", 1), "a text")
    server.set(b"types/n/" + record(2).header.key.content_hash, "a text")
    assert tier.find(record(2).header.names()) == {}
    assert not holds(tier, 1)
    assert errors_of(tier)["damaged"] == 2
    assert tier.put_many([record(1)]) == 8
    assert holds(tier, 1)


# --- whole requests ------------------------------------------------------------------------------------------------


def test_memory_serves_on_and_what_was_put_is_answered_while_redis_is_dead(server: RedisServer, clock: Clock) -> None:
    redis_tier = tier_on(server.url, clock, timeout_s=SHORT_S)
    store = TieredStore([MemoryTier(1 << 24), redis_tier])
    store.put_many([record(1)])
    assert store.flush(LONG_S)
    server.stop()
    assert store.put_many([record(2)]) == 8
    assert store.flush(LONG_S)
    for number in (1, 2):
        assert store.find(record(number).header.names())
        assert holds(store, number)
    assert store.stats().errors == {}
    assert store.stats_by_tier()["redis"].errors["unreachable"] == 1
    assert store.close(LONG_S)


def test_a_second_engine_reuses_through_redis_what_the_first_computed(redis_server: RedisServer) -> None:
    model = build_fresh("llama")
    truth = logits(greedy(model.generate, prompt()))
    stores = [
        TieredStore([MemoryTier(1 << 26), tier_on(redis_server.url, prefix="engines")]),
        TieredStore([MemoryTier(1 << 26), tier_on(redis_server.url, prefix="engines")]),
    ]
    first, second = (engine(model, store=store) for store in stores)
    first.generate(prompt()[0].tolist(), max_new_tokens=4, do_sample=False)
    assert stores[0].flush(LONG_S)
    answer = second.generate(
        prompt()[0].tolist(), max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert answer.report.exact_tokens == prompt().shape[1] - 1
    assert torch.allclose(logits(answer.output), truth, atol=1e-5)
    assert all(store.close(LONG_S) for store in stores)


@pytest.mark.parametrize("fault", ["killed", "paused", "damaged"])
def test_requests_are_answered_rightly_whatever_redis_does(
    server: RedisServer, clock: Clock, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_fresh("llama")
    orders = ["0123", "2031", "0123"]
    truths = [model.generate(prompt(o), max_new_tokens=6, do_sample=False)[0].tolist() for o in orders]
    tiers = [tier_on(server.url, clock, timeout_s=SHORT_S) for _ in range(2)]
    stores = [TieredStore([MemoryTier(1 << 26), tier]) for tier in tiers]
    first, second = (engine(model, store=store, fidelity="exact") for store in stores)
    first.generate(prompt("0123")[0].tolist(), max_new_tokens=4, do_sample=False)
    assert stores[0].flush(LONG_S)
    if fault == "damaged":
        client = server.client()
        for key in client.keys("kvboost/r/*"):
            client.hset(key, "p", b"\0" + client.hget(key, "p")[1:] + b"\0")
    if fault == "killed":
        server.stop()
    pause = server.paused() if fault == "paused" else Lease({})
    with pause:
        for order, truth in zip(orders, truths, strict=True):
            answer = second.generate(prompt(order)[0].tolist(), max_new_tokens=6, do_sample=False)
            assert prompt(order)[0].tolist() + answer.token_ids == truth
        stores[1].flush(LONG_S)
    kind = {"killed": "unreachable", "paused": "timeout", "damaged": "damaged"}[fault]
    assert errors_of(tiers[1])[kind] >= 1
    assert answer.report.exact_tokens > 0, "memory goes on"
    assert "Traceback" not in caplog.text
    assert all(store.close(LONG_S) for store in stores)
