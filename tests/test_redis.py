"""What the Redis tier promises beyond the contract: lifetimes, bounds, names, books, settings."""

from __future__ import annotations

import builtins
import math
import os
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from kvboost.errors import SettingsError
from kvboost.store.records import Seal, unpack
from kvboost.store.redis import RedisTier
from kvboost.types import Lineage
from redis_server import RedisServer
from test_store import holds, record

PATIENT_S = 20.0
prefixes = count()


class Tiers:
    """Makes tiers on the shared server; each is closed at the end."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.made: list[RedisTier] = []

    def __call__(self, prefix: str | None = None, secret: str = "secret", **settings: Any) -> RedisTier:
        prefix = prefix or f"redis{next(prefixes)}"
        settings = {"timeout_s": PATIENT_S, "touch_s": 0.0, **settings}
        self.made.append(RedisTier(self.server.url, Seal(secret), prefix=prefix, **settings))
        return self.made[-1]


@pytest.fixture
def tiers(redis_server: RedisServer) -> Iterator[Tiers]:
    made = Tiers(redis_server)
    yield made
    for tier in made.made:
        tier.close()


def ids_of(tier: RedisTier, name: bytes) -> list[bytes]:
    return [h.record_id for h in tier.find([name]).get(name, ())]


def record_id(number: int) -> bytes:
    return record(number).header.record_id


def size_of(tiers: Tiers) -> int:
    """Bytes that one record of the tests is booked with."""
    tier = tiers()
    tier.put_many([record(0)])
    return tier.stats().bytes_used


def test_two_processes_share_records(tiers: Tiers) -> None:
    tiers("shared").put_many([record(1, fill=0.5)])
    other = tiers("shared")
    assert ids_of(other, record(1).header.key.content_hash) == [record_id(1)]
    with other.get_many([record_id(1), record_id(2)]) as lease:
        assert list(lease.records) == [record_id(1)]
        assert torch.equal(lease.records[record_id(1)].payload[0].keys, record(1, fill=0.5).payload[0].keys)
    assert other.stats().errors == {}


def test_many_records_of_many_batches_come_back_complete(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.store.redis.BATCH_BYTES", 3000)
    tier = tiers()
    tier.put_many([record(n, fill=float(n), size=1 + n % 40) for n in range(30)])
    with tier.get_many([record_id(n) for n in (7, 7, *range(30))]) as lease:
        assert len(lease.records) == 30
        for n in range(30):
            assert lease.records[record_id(n)].payload[0].keys.max() == n


def test_a_record_lives_on_when_it_is_used_and_expires_when_not(tiers: Tiers) -> None:
    tier, server = tiers("living", ttl_s=1000.0), tiers.server.client()
    tier.put_many([record(1)])
    keys = server.keys("living/[rn]/*")
    assert len(keys) == 5
    assert all(999_000 < server.pttl(key) <= 1_000_000 for key in keys)
    for key in keys:
        server.pexpire(key, 5_000)
    assert holds(tier, 1)
    assert all(server.pttl(key) > 999_000 for key in keys)
    short = tiers(ttl_s=0.05)
    short.put_many([record(1)])
    time.sleep(0.1)
    assert not holds(short, 1)
    assert short.find(record(1).header.names()) == {}
    assert short.put_many([record(2)]) == 8
    assert short.stats().entries == 1, "what expired leaves the books"
    assert short.stats().evictions == {"ttl": 1}


def test_the_last_used_is_listed_first_and_the_least_used_goes_first(tiers: Tiers) -> None:
    limit = 3 * size_of(tiers)
    tier = tiers(bytes_limit=limit)
    for number in (1, 2, 3):
        tier.put_many([record(number, content=7)])
    assert holds(tier, 1)
    name = record(1, content=7).header.key.content_hash
    assert ids_of(tier, name) == [record_id(n) for n in (1, 3, 2)]
    tier.put_many([record(4, content=7)])
    assert [holds(tier, n) for n in (1, 2, 3, 4)] == [True, False, True, True]
    stats = tier.stats()
    assert (stats.bytes_used, stats.bytes_limit, stats.evictions) == (limit, limit, {"importance_low": 1})


def test_of_one_history_the_tail_goes_before_the_head(tiers: Tiers) -> None:
    tier = tiers(bytes_limit=3 * size_of(tiers))
    chain = [record(1), record(2), record(3)]
    tier.put_many(chain)
    with tier.get_many([c.header.record_id for c in chain]):
        pass
    tier.put_many([record(4)])
    assert [holds(tier, n) for n in (1, 2, 3, 4)] == [True, True, False, True]


def test_a_record_larger_than_the_limit_is_not_kept_and_evicts_nothing(tiers: Tiers) -> None:
    tier = tiers(bytes_limit=2 * size_of(tiers))
    tier.put_many([record(1)])
    assert tier.put_many([record(2, size=500)]) == 0
    assert holds(tier, 1)
    assert tier.stats().errors == {"unfit": 1}


def test_replaced_records_are_booked_once(tiers: Tiers) -> None:
    tier = tiers()
    assert tier.put_many([record(1, lineage=Lineage.APPROXIMATE), record(1), record(1)]) == 16
    once = tier.stats()
    assert (once.entries, once.bytes_used) == (1, pytest.approx(size_of(tiers), abs=128))
    assert tier.delete([record_id(1)]) == 1
    assert tier.stats().bytes_used == 0


def test_books_that_are_off_are_set_right(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, server = tiers("books"), tiers.server.client()
    tier.put_many([record(1)])
    true = tier.stats().bytes_used
    server.set("books/bytes", 10**9)
    again = tiers("books")  # a process audits first
    again.put_many([record(2)])
    assert again.stats().bytes_used == 2 * true


def test_names_of_evicted_records_are_cleaned_up_by_who_meets_them(tiers: Tiers) -> None:
    tier, server = tiers("stale"), tiers.server.client()
    tier.put_many([record(1, content=7), record(2, content=7)])
    name = record(1, content=7).header.key.content_hash
    server.delete(b"stale/r/" + record_id(1))
    fresh = tiers("stale")
    assert ids_of(fresh, name) == [record_id(2)]
    assert server.zrange(b"stale/n/" + name, 0, -1) == [record_id(2)]
    assert set(ids_of(tier, name)) == {record_id(2)}
    server.delete(b"stale/r/" + record_id(2))
    assert ids_of(tier, name) == [record_id(2)], "seen within a minute, so believed"
    assert not holds(tier, 2)
    assert ids_of(tier, name) == [], "until it was missed"
    assert tier.put_many([record(2, content=7)]) == 8
    assert holds(tier, 2)


def test_a_prefix_is_a_world_of_its_own(tiers: Tiers) -> None:
    worlds = [tiers(prefix) for prefix in ("w", "w:r", "w.", "W")]
    for number, tier in enumerate(worlds):
        tier.put_many([record(number, content=9)])
    name = record(0, content=9).header.key.content_hash
    assert [ids_of(tier, name) for tier in worlds] == [[record_id(n)] for n in range(4)]
    assert worlds[0].delete() == 1
    assert [tier.stats().entries for tier in worlds] == [0, 1, 1, 1]
    assert [holds(tier, n) for n, tier in enumerate(worlds)] == [False, True, True, True]
    assert tiers.server.client().keys("w/*") == []


def test_tools_see_every_record_and_its_sealed_bytes(tiers: Tiers) -> None:
    tier = tiers("tools")
    tier.put_many([record(n) for n in range(3)])
    tiers.server.client().hset(b"tools/r/" + record_id(2), "h", b"nonsense")
    seen = {r.record_id: r for r in tier.records()}
    assert set(seen) == {record_id(n) for n in range(3)}
    assert seen[record_id(2)].header is None
    assert seen[record_id(1)].header is not None
    assert sum(r.num_bytes for r in seen.values()) == tier.stats().bytes_used
    assert abs(seen[record_id(1)].used_at_s - time.time()) < 600
    data = tier.sealed(record_id(1))
    assert data is not None
    assert unpack(data, Seal("secret")).header.record_id == record_id(1)
    assert tier.sealed(b"nothing") is None


def test_encrypted_records_show_no_tokens_to_the_server(tiers: Tiers) -> None:
    server = tiers.server.client()
    for prefix, seal in (("plain", Seal("secret")), ("hidden", Seal("secret", encrypt=True))):
        tier = RedisTier(tiers.server.url, seal, prefix=prefix, timeout_s=PATIENT_S)
        tier.put_many([record(7, fill=0.5)])
        head = server.hget(prefix.encode() + b"/r/" + record_id(7), "h")
        assert (record(7).header.tokens.tobytes().hex().encode() in head) == (prefix == "plain")
        assert holds(tier, 7)
        tier.close()


def test_a_closed_tier_is_a_miss(tiers: Tiers) -> None:
    tier = tiers()
    tier.put_many([record(1)])
    tier.close()
    assert not holds(tier, 1)
    assert tier.put_many([record(2)]) == 0
    assert tier.stats().errors["closed"] > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own(tiers: Tiers) -> None:
    tier = tiers()
    tier.put_many([record(1)])
    child = os.fork()
    if child == 0:
        os._exit(0 if holds(tier, 1) and tier.put_many([record(2)]) == 8 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert holds(tier, 1)
    assert holds(tier, 2)


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("http://:hush@127.0.0.1", {}),
        ("redis://:hush@127.0.0.1:port", {}),
        ("redis://:hu#sh@127.0.0.1:1", {}),
        ("redis://127.0.0.1", {"prefix": "a/b"}),
        ("redis://127.0.0.1", {"prefix": ""}),
        ("redis://127.0.0.1", {"ttl_s": 0}),
        ("redis://127.0.0.1", {"timeout_s": -1.0}),
    ],
)
def test_bad_settings_are_named_and_no_password_is_shown(url: str, settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as raised:
        RedisTier(url, Seal(), **settings)
    assert "hu" not in str(raised.value)
    assert any(word in str(raised.value) for word in ("redis://", "prefix", "ttl_s"))


def test_a_missing_package_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_redis(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".", maxsplit=1)[0] == "redis":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_redis)
    with pytest.raises(SettingsError, match=r"pip install '.\[redis\]'"):
        RedisTier("redis://127.0.0.1", Seal())


@pytest.mark.parametrize("url", ["redis://[::1", "redis://:pa\u2100ss@host/0", "rediss://:pa\u2100ss@host/0"])
def test_a_url_that_cannot_be_split_is_refused_without_telling_it(url: str) -> None:
    with pytest.raises(SettingsError) as raised:
        RedisTier(url, Seal())
    assert "ss@" not in str(raised.value)


@pytest.mark.parametrize("settings", [{"ttl_s": math.inf}, {"ttl_s": 1e300}, {"timeout_s": math.inf}])
def test_a_time_that_nobody_can_count_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(SettingsError, match="ttl_s and timeout_s"):
        RedisTier("redis://localhost", Seal(), **settings)
