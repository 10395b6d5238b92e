"""An engine over lasting tiers: a restart is warm, and a tier that fails costs only what it would have given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from families import build, build_fresh
from kvboost import KVBoost
from kvboost.errors import SettingsError
from kvboost.types import Kind
from redis_server import RedisServer
from scenario import engine, greedy, logits, plain_logits, prompt, relative_error

pytestmark = pytest.mark.smoke


def on_disk(directory: Path, **flags: Any) -> KVBoost:
    return engine(build("llama"), disk_directory=str(directory), disk_bytes=1 << 28, **flags)


def test_a_restart_is_warm_and_exact_at_once(tmp_path: Path) -> None:
    with on_disk(tmp_path) as first:
        greedy(first.generate, prompt("0123"), 1)
    with on_disk(tmp_path) as second:
        assert second.store.stats().entries == 0
        out = greedy(second.generate, prompt("0123"))
        assert out.report.exact_tokens == prompt().shape[1] - 1
        assert set(out.report.bytes_by_tier) == {"disk"}
        assert relative_error(logits(out.output), plain_logits(second.model, prompt("0123"))) <= 1e-5
        again = greedy(second.generate, prompt("0123"), 1)
        assert set(again.report.bytes_by_tier) == {"memory"}, "what came from disk is kept in memory"


def test_a_restart_moves_and_continues_as_before(tmp_path: Path) -> None:
    with on_disk(tmp_path) as first:
        greedy(first.generate, prompt("0123"), 1)
        moved = greedy(first.generate, prompt("3120"))
    with on_disk(tmp_path) as second:
        out = greedy(second.generate, prompt("3120"))
        assert out.report.continued_tokens > 100
        assert relative_error(logits(out.output), logits(moved.output)) <= 1e-5
        assert greedy(second.generate, prompt("2301"), 1).report.moved_tokens > 100


def test_another_model_and_another_secret_find_nothing(tmp_path: Path) -> None:
    with on_disk(tmp_path) as first:
        greedy(first.generate, prompt("0123"), 1)
    others = (
        engine(build("qwen2"), disk_directory=str(tmp_path), disk_bytes=1 << 28),
        on_disk(tmp_path, hash_secret="another"),
    )
    for other in others:
        with other:
            assert other.plan(prompt("0123")).count(Kind.FRESH) == prompt().shape[1]
            assert greedy(other.generate, prompt("0123"), 1).report.fresh_tokens == prompt().shape[1]


def test_after_invalidate_nothing_older_is_found_in_any_tier(tmp_path: Path) -> None:
    with on_disk(tmp_path) as kv:
        greedy(kv.generate, prompt("0123"), 1)
        assert kv.flush()
        assert kv.invalidate() > 0
        assert greedy(kv.generate, prompt("0123"), 1).report.fresh_tokens == prompt().shape[1]


def test_changed_weights_find_nothing_on_disk(tmp_path: Path) -> None:
    model = build_fresh("llama")
    with engine(model, disk_directory=str(tmp_path), disk_bytes=1 << 28) as kv:
        greedy(kv.generate, prompt("0123"), 1)
        assert kv.flush()
        next(model.parameters()).data.mul_(1.5)
        kv.invalidate()
        out = greedy(kv.generate, prompt("0123"))
        assert out.report.fresh_tokens == prompt().shape[1]
        assert relative_error(logits(out.output), plain_logits(model, prompt("0123"))) <= 1e-5


def test_a_directory_that_cannot_be_used_costs_nothing_but_its_hits(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with on_disk(tmp_path / "file") as kv:
        greedy(kv.generate, prompt("0123"), 1)
        out = greedy(kv.generate, prompt("0123"))
        assert out.report.exact_tokens == prompt().shape[1] - 1
        assert sum(kv.store.stats_by_tier()["disk"].errors.values()) > 0


def test_without_memory_chunks_still_reach_the_disk(tmp_path: Path) -> None:
    for cache_bytes in (0, 1000):
        with on_disk(tmp_path / str(cache_bytes), cache_bytes=cache_bytes) as kv:
            greedy(kv.generate, prompt("0123"), 1)
            assert kv.flush()
            out = greedy(kv.generate, prompt("0123"), 1)
            assert set(out.report.bytes_by_tier) == {"disk"}
            assert out.report.exact_tokens == prompt().shape[1] - 1
            assert kv.store.tiers[0].stats().bytes_limit <= cache_bytes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"encrypt": True}, "without a secret"),
        ({"disk_bytes": 10}, "could hold nothing"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(tmp_path: Path, flags: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        engine(build("llama"), **{"disk_directory": str(tmp_path), "disk_bytes": 1 << 28, **flags})


def test_encrypted_records_hold_no_token_and_are_read_back(tmp_path: Path) -> None:
    flags = {"encrypt": True, "hash_secret": "a secret"}
    with on_disk(tmp_path, **flags) as first:
        greedy(first.generate, prompt("0123"), 1)
    chunk = prompt("0123")[0, 40:60].numpy().astype("<i4").tobytes()
    assert not any(chunk in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    with on_disk(tmp_path, **flags) as second:
        assert greedy(second.generate, prompt("0123"), 1).report.exact_tokens == prompt().shape[1] - 1


@pytest.mark.parametrize("codec", ["int8", "k8v4"])
def test_packed_chunks_are_served_inexact_and_never_called_exact(tmp_path: Path, codec: str) -> None:
    with on_disk(tmp_path, codec=codec) as kv:
        before = greedy(kv.generate, prompt("0123"))
        assert kv.flush()
        assert {r.codec for r in headers(kv)} == {codec}
        out = greedy(kv.generate, prompt("0123"))
        assert out.report.exact_tokens == 0
        assert out.report.continued_tokens == prompt().shape[1] - 1
        assert 0 < relative_error(logits(out.output)[:1], logits(before.output)[:1]) < 0.1
        exact = greedy(kv.generate, prompt("0123"), fidelity="exact")
        assert exact.report.fresh_tokens == prompt().shape[1]
        assert relative_error(logits(exact.output), logits(before.output)) <= 1e-5
    with on_disk(tmp_path) as second:
        restarted = greedy(second.generate, prompt("0123"))
        assert restarted.report.exact_tokens + restarted.report.continued_tokens == prompt().shape[1] - 1
        assert relative_error(logits(restarted.output)[:1], logits(before.output)[:1]) < 0.1


def test_the_codec_of_one_request_holds_for_what_it_writes() -> None:
    kv = engine(build("llama"))
    greedy(kv.generate, prompt("0123"), 1, codec="k8v4")
    greedy(kv.generate, prompt("0123"), 1, cache_salt="other")
    assert kv.flush()
    assert {h.codec for h in headers(kv)} == {"k8v4", "none"}
    assert greedy(kv.generate, prompt("0123"), 1, cache_salt="other").report.exact_tokens == prompt().shape[1] - 1


def on_redis(server: RedisServer, **flags: Any) -> KVBoost:
    return engine(build("llama"), redis_url=server.url, hash_secret="secret", redis_timeout_s=0.5, **flags)


def test_a_second_machine_is_warm_through_redis(redis_server: RedisServer) -> None:
    with (
        on_redis(redis_server, cache_salt="machines") as first,
        on_redis(redis_server, cache_salt="machines") as second,
    ):
        greedy(first.generate, prompt("0123"), 1)
        assert first.flush()
        out = greedy(second.generate, prompt("0123"))
        assert out.report.exact_tokens == prompt().shape[1] - 1
        assert set(out.report.bytes_by_tier) == {"redis"}
        assert relative_error(logits(out.output), plain_logits(second.model, prompt("0123"))) <= 1e-5
        stranger = greedy(second.generate, prompt("0123"), 1, cache_salt="stranger")
        assert stranger.report.fresh_tokens == prompt().shape[1]


def test_every_request_is_answered_rightly_whatever_redis_does(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    truth = {order: plain_logits(build("llama"), prompt(order)) for order in ("0123", "31", "20", "13")}
    try:
        with on_redis(server, recompute_head_tokens=10_000) as kv:

            def answer(order: str) -> None:
                kv.store.tiers[0].delete()  # so that Redis is asked
                assert relative_error(logits(greedy(kv.generate, prompt(order)).output), truth[order]) <= 1e-4

            answer("0123")
            assert kv.flush()
            answer("31")
            with server.paused():
                answer("20")
            server.stop()
            answer("13")
            answer("0123")
            server.start()  # empty
            answer("31")
            errors = kv.store.stats_by_tier()["redis"].errors
            assert errors.get("timeout", 0) >= 1
            assert errors.get("unreachable", 0) + errors.get("open", 0) >= 1
            assert kv.stats.fallbacks == {}
    finally:
        server.stop()


def headers(kv: KVBoost) -> list[Any]:
    memory = kv.store.tiers[0]
    with memory.get_many(list(memory._records)) as lease:  # type: ignore[attr-defined]
        return [r.header for r in lease.records.values()]
