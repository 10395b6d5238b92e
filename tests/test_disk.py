"""The disk tier where it differs from memory, or has more to promise: budget, restarts, privacy, sharing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disk_children import LARGE, identity, is_right, limit_for, open_tier, record
from kvboost.errors import SettingsError
from kvboost.keys import KeySpace
from kvboost.store import disk
from kvboost.store.disk import DiskTier
from kvboost.store.records import Seal, unpack
from kvboost.types import ChunkHeader, ChunkKey, ChunkKV, Lineage, Link

WIDE = 4096  # a payload of a MiB


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Any]:
    """Opens tiers on one directory, and closes them at last."""
    opened: list[DiskTier] = []

    def open_one(limit: int = LARGE, **options: Any) -> DiskTier:
        opened.append(open_tier(tmp_path / "cache", limit, **options))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def held(tier: DiskTier, numbers: Any) -> list[int]:
    with tier.get_many([identity(n) for n in numbers]) as lease:
        assert all(map(is_right, lease.records.values()))
        return [int(r.header.tokens[0]) for r in lease.records.values()]


def occupied_bytes(folder: Path) -> int:
    return sum(p.lstat().st_blocks * 512 for p in [folder, *folder.rglob("*")])


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv*"))


# --- budget and eviction --------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first(tiers: Any) -> None:
    tier = tiers(limit_for(3, WIDE))
    for number in (1, 2, 3):
        tier.put_many([record(number, width=WIDE)])
    assert held(tier, [1]) == [1]
    tier.put_many([record(4, width=WIDE)])
    assert held(tier, range(5)) == [1, 3, 4]
    assert tier.stats().evictions == {"importance_low": 1}


def test_of_one_history_the_tail_goes_before_the_head(tiers: Any) -> None:
    tier = tiers(limit_for(3, WIDE))
    tier.put_many([record(n, width=WIDE) for n in (1, 2, 3)])
    tier.put_many([record(4, width=WIDE)])
    assert held(tier, (1, 2, 3)) == [1, 2]
    tier.put_many([record(5, width=WIDE)])
    assert held(tier, (1, 2, 4)) == [1, 2]


def test_what_is_dear_or_often_used_stays_longer(tiers: Any) -> None:
    tier = tiers(limit_for(3, WIDE))
    for number, cost_s in ((1, 50.0), (2, 0.01), (3, 1.0)):
        tier.put_many([record(number, width=WIDE, cost_s=cost_s)])
    tier.put_many([record(4, width=WIDE, cost_s=1.0)])
    assert held(tier, range(5)) == [1, 3, 4]


def test_all_files_together_stay_within_the_limit(tiers: Any, tmp_path: Path) -> None:
    limit = limit_for(5, WIDE)
    tier = tiers(limit)
    for number in range(60):
        tier.put_many([record(number, width=WIDE), *(record(1000 + 10 * number + i, width=1) for i in range(10))])
        assert occupied_bytes(tmp_path) <= tier.stats().bytes_used <= limit
    assert tier.stats().evictions["importance_low"] > 50
    assert len(files(tmp_path)) == tier.stats().entries


def test_a_record_larger_than_the_limit_is_not_kept_and_evicts_nothing(tiers: Any) -> None:
    tier = tiers(limit_for(2, WIDE))
    tier.put_many([record(1, width=WIDE)])
    assert tier.put_many([record(2, width=4 * WIDE)]) == 0
    assert held(tier, [1, 2]) == [1]
    assert tier.stats().evictions == {}


def test_a_lower_limit_is_kept_from_the_start(tiers: Any, tmp_path: Path) -> None:
    tiers(limit_for(6, WIDE)).put_many([record(n, width=WIDE) for n in range(6)])
    tier = tiers(limit_for(2, WIDE))
    assert held(tier, range(6)) == [0, 1]
    assert occupied_bytes(tmp_path) <= tier.bytes_limit


def test_a_limit_that_could_hold_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="at least"):
        DiskTier(tmp_path, 1000, Seal())


def test_leased_records_can_be_read_after_they_were_evicted_and_deleted(tiers: Any) -> None:
    tier = tiers(limit_for(2, WIDE))
    tier.put_many([record(1, width=WIDE)])
    with tier.get_many([identity(1)]) as lease:
        tier.put_many([record(2, width=WIDE)])
        for _ in range(2):
            held(tier, [2])  # used more often than the leased one
        tier.put_many([record(3, width=WIDE)])
        assert held(tier, [1]) == []
        tier.delete()
        assert is_right(lease.records[identity(1)])


def test_deleting_everything_gives_the_space_back(tiers: Any, tmp_path: Path) -> None:
    tier = tiers()
    empty = tier.stats().bytes_used
    tier.put_many([record(n) for n in range(300)])
    assert tier.delete([identity(7)]) == 1
    assert tier.delete() == 299
    assert files(tmp_path) == []
    assert tier.stats().bytes_used == empty
    assert tier.stats().evictions == {"invalidated": 300}
    assert occupied_bytes(tmp_path) < disk.INDEX_BYTES


def test_records_are_served_for_as_long_as_they_may_live(tiers: Any) -> None:
    tiers().put_many([record(1, width=WIDE)])
    name = record(1).header.key.content_hash
    assert tiers(ttl_s=60.0).find([name])
    tier = tiers(limit_for(2, WIDE), ttl_s=0.0)
    assert tier.find([name]) == {}
    assert held(tier, [1]) == []
    assert tier.put_many([record(1, width=WIDE)]) > 0, "an expired record does not keep a new one out"
    tier.put_many([record(n, width=WIDE) for n in (2, 3)])
    assert tier.stats().evictions["ttl"] > 0


# --- restarts and other processes -----------------------------------------------------------------------------------


def test_another_process_or_a_later_one_finds_everything(tiers: Any) -> None:
    first, second = tiers(), tiers()
    first.put_many([record(1)])
    assert held(second, [1]) == [1], "at the same time"
    first.close()
    second.close()
    later = tiers()
    assert [h.record_id for h in later.find(record(1).header.names())[b"anchor" + bytes([0, 0, 0, 1])]] == [identity(1)]
    assert held(later, [1]) == [1]
    assert later.stats().entries == 1
    assert later.stats().errors == {}


def test_uses_survive_a_restart(tiers: Any) -> None:
    tier = tiers()
    tier.put_many([record(n) for n in (1, 2, 3)])
    held(tier, [3, 3, 2])
    held(tier, [3])
    tier.close()
    found = {r.record_id: r for r in tiers().records()}
    assert [found[identity(n)].hits for n in (1, 2, 3)] == [0, 1, 2]
    assert found[identity(3)].used_at_s > found[identity(2)].used_at_s > found[identity(1)].used_at_s
    assert abs(found[identity(3)].used_at_s - time.time()) < 600


def test_find_lists_the_most_recently_used_first(tiers: Any) -> None:
    tier = tiers(max_variants=9)
    for number in (1, 2, 3):
        tier.put_many([record(number, content=7)])
    held(tier, [1])
    name = record(1, content=7).header.key.content_hash
    for at in (tier, tiers()):
        assert [h.tokens[0] for h in at.find([name])[name]] in ([1, 3, 2], [3, 2, 1])
    assert [h.tokens[0] for h in tier.find([name])[name]] == [1, 3, 2]


def test_a_truer_record_replaces_across_processes_and_leaves_no_file(tiers: Any, tmp_path: Path) -> None:
    first, second = tiers(), tiers()
    first.put_many([record(1, lineage=Lineage.LOSSY)])
    assert held(second, [1]) == [1]
    second.put_many([record(1, lineage=Lineage.BIT_EXACT)])
    first.put_many([record(1, lineage=Lineage.APPROXIMATE)])
    for tier in (first, second):
        with tier.get_many([identity(1)]) as lease:
            assert lease.records[identity(1)].header.lineage is Lineage.BIT_EXACT
    assert len(files(tmp_path)) == 1


def test_links_and_their_sources_come_back(tiers: Any) -> None:
    own = record(1)
    link = ChunkHeader(
        ChunkKey(b"content", b"elsewhere"),
        b"somewhere",
        200,
        own.header.tokens,
        Lineage.APPROXIMATE,
        source=Link(identity(1), 0),
        rows=np.array([0, 3], np.int32),
        corrected=True,
    )
    rows = own.payload[0].named()["keys"][:, :, :3]
    tiers().put_many([own, ChunkKV(link, (type(own.payload[0])(rows, rows),))])
    tier = tiers()
    assert b"content" not in tier.find([b"content", b"elsewhereend"]), "a link is not found by its text"
    with tier.get_many([link.record_id]) as lease:
        found = lease.records[link.record_id]
    assert found.header.source == Link(identity(1), 0)
    assert found.header.corrected
    assert found.payload[0].named()["keys"].equal(rows)


def test_a_tier_that_is_closed_only_misses(tiers: Any) -> None:
    tier = tiers()
    tier.put_many([record(1)])
    tier.close()
    tier.close()
    assert held(tier, [1]) == []
    assert tier.put_many([record(2)]) == 0
    assert tier.find([b"x"]) == {}
    assert tier.delete() == 0
    assert tier.stats().errors == {}
    assert held(tiers(), [1, 2]) == [1]


# --- privacy --------------------------------------------------------------------------------------------------------


def test_nobody_else_may_read_files_or_enter_folders(tiers: Any, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        tiers().put_many([record(1)])
    finally:
        os.umask(before)
    modes = {p: stat.S_IMODE(p.lstat().st_mode) for p in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]}
    assert len(modes) >= 8
    assert {p.name: oct(m) for p, m in modes.items() if m != (0o700 if p.is_dir() else 0o600)} == {}


def test_a_directory_that_was_open_to_others_is_closed_but_not_the_folder_around_it(tiers: Any, tmp_path: Path) -> None:
    inner = tmp_path / "cache" / disk.FOLDER
    inner.mkdir(parents=True)
    (tmp_path / "cache").chmod(0o755)
    inner.chmod(0o755)
    tiers()
    assert stat.S_IMODE(inner.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o755


def test_encrypted_records_leave_no_content_in_any_file(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    marked = record(0x0BADCAFE)
    needles = [marked.header.tokens.tobytes(), marked.header.tokens.tobytes().hex().encode(), b"tokens"]
    for encrypt in (False, True):
        folder = tmp_path / str(encrypt)
        tier = DiskTier(folder, LARGE, Seal("a secret", encrypt=encrypt))
        tier.put_many([marked])
        data = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
        assert any(n in data for n in needles) is not encrypt
        with tier.get_many([marked.header.record_id]) as lease:
            assert is_right(lease.records[marked.header.record_id])
        tier.close()


@pytest.mark.parametrize("other", ["namespace", "fingerprint", "secret", "regime"])
def test_equal_text_of_another_namespace_model_secret_or_type_is_never_found(tiers: Any, other: str) -> None:
    base = {"secret": "s", "fingerprint": b"model in float32", "namespace": "a", "regime": ""}
    changed = {**base, other: b"model in bfloat16" if other == "fingerprint" else "b"}
    tokens = np.arange(64, dtype=np.int32)
    tier = tiers()
    named = []
    for settings in (base, changed):
        space = KeySpace(**settings)  # type: ignore[arg-type]
        history = space.history(tokens)
        key = ChunkKey(space.content_hash(tokens), history.prefix_hash(64))
        anchors = {name: at for at, name in space.anchors(tokens)}
        header = ChunkHeader(key, history.prefix_hash(0), 0, tokens, Lineage.BIT_EXACT, anchors=anchors)
        named.append(ChunkKV(header, ()))
        tier.put_many([named[-1]])
    ours, theirs = (set(chunk.header.names()) for chunk in named)
    assert len(ours) >= 5
    assert not ours & theirs
    for chunk in named:
        for found in tier.find(chunk.header.names()).values():
            assert [h.record_id for h in found] == [chunk.header.record_id]


# --- for tools ------------------------------------------------------------------------------------------------------


def test_tools_see_every_record_and_its_sealed_bytes(tiers: Any) -> None:
    tier = tiers()
    tier.put_many([record(n) for n in range(30)])
    listed = list(tier.records())
    assert {int(r.header.tokens[0]) for r in listed if r.header} == set(range(30))
    for entry in listed:
        data = tier.sealed(entry.record_id)
        assert data is not None
        assert len(data) == entry.num_bytes
        assert is_right(unpack(data, Seal("a secret")))
    assert tier.sealed(b"unknown") is None
    assert {r.hits for r in tier.records()} == {0}


def test_looking_with_another_secret_shows_damage_and_removes_nothing(tiers: Any, tmp_path: Path) -> None:
    tiers().put_many([record(1)])
    stranger = DiskTier(tmp_path / "cache", LARGE, Seal("another secret"))
    assert [r.header for r in stranger.records()] == [None]
    stranger.close()
    assert held(tiers(), [1]) == [1]


def test_a_process_that_ends_without_closing_has_noted_what_it_used(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    program = """
import sys
from test_store import record
from kvboost.store import DiskTier
from kvboost.store.records import Seal
tier = DiskTier(sys.argv[1], 1 << 26, Seal())
tier.put_many([record(1)])
with tier.get_many([record(1).header.record_id]) as lease:
    assert lease.records
"""
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    tier = DiskTier(tmp_path, 1 << 26, Seal())
    assert [r.hits for r in tier.records()] == [1]
    tier.close()
