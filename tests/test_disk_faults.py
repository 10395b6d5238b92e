"""What may befall a directory: killed writers, a full disk, other users, damage, other releases, many processes.

The promise is one: every call returns, nothing wrong is served, nothing committed is lost, and the counters tell.
"""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import disk_children as children
from disk_children import LARGE, NOBODY, identity, is_right, limit_for, open_tier, record
from kvboost.errors import SettingsError
from kvboost.store import disk, disk_files, disk_index, records
from kvboost.store.disk import DiskTier
from kvboost.store.records import Seal, pack
from kvboost.types import ChunkKV

processes = mp.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> None:
    """Children are forked from a process that has imported everything and has no threads: they start at once."""
    paths = [str(Path(children.__file__).parent), str(Path(disk.__file__).parents[2])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))  # Python 3.11 does not hand `sys.path` on to its preload
        processes.set_forkserver_preload(["pytest", "disk_children"])
        forkserver.ensure_running()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def start(work: children.Child, *arguments: Any) -> tuple[Any, Any]:
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=work, args=(sender, *arguments))
    process.start()
    sender.close()
    return process, receiver


def outcome(work: children.Child, *arguments: Any) -> Any:
    """What a child reports."""
    process, receiver = start(work, *arguments)
    try:
        return receiver.recv()
    finally:
        process.join(30)


def held(tier: DiskTier, numbers: Any) -> set[int]:
    with tier.get_many([identity(n) for n in numbers]) as lease:
        assert all(map(is_right, lease.records.values()))
        return {int(r.header.tokens[0]) for r in lease.records.values()}


def record_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


def written(folder: Path, count: int) -> None:
    """Leaves a directory with records 0 ... count - 1, and nobody who has it open."""
    tier = open_tier(folder)
    tier.put_many([record(n) for n in range(count)])
    tier.close()


# --- kill -9 --------------------------------------------------------------------------------------------------------


def drained(receiver: Any) -> list[Any]:
    """Every whole message of a killed child."""
    messages = []
    try:
        while receiver.poll():
            messages.append(receiver.recv())
    except EOFError:
        pass
    return messages


def kill_writers(folder: Path, limit: int, rounds: int) -> set[int]:
    """Runs two writers at a time on one directory and kills both, `rounds` times. Returns what they committed."""
    rng = np.random.default_rng(1)
    committed: set[int] = set()
    for i in range(rounds):
        pair = [start(children.write_for_ever, str(folder), limit, 1000 * (2 * i + k + 1)) for k in range(2)]
        assert all(receiver.poll(30) for _, receiver in pair), "both have begun"
        for process, receiver in pair:
            time.sleep(rng.uniform(0, 0.04))
            os.kill(process.pid, signal.SIGKILL)
            process.join(30)
            assert process.exitcode == -signal.SIGKILL
            messages = drained(receiver)
            assert "wrong bytes" not in messages
            assert [m for m in messages if m[2]] == [], "no errors"
            committed |= {number for number, count, _ in messages if count}
    return committed


def test_a_hundred_killed_writers_lose_nothing_that_was_committed(folder: Path) -> None:
    committed = kill_writers(folder, LARGE, 50)
    assert len(committed) > 100
    begin = time.perf_counter()
    tier = open_tier(folder, orphan_grace_s=0.0)
    assert time.perf_counter() - begin < 2
    assert held(tier, committed) == committed
    listed = list(tier.records())
    assert all(r.header is not None for r in listed)
    assert held(tier, [int(r.header.tokens[0]) for r in listed if r.header]) >= committed
    assert len(held(tier, range(20))) == 20, "those that all of them wrote"
    assert tier.stats().errors == {}
    tier.close()


def test_killed_writers_on_a_small_budget_leave_neither_wrong_bytes_nor_litter(folder: Path) -> None:
    limit = limit_for(1, 16)
    kill_writers(folder, limit, 10)
    tier = open_tier(folder, limit, orphan_grace_s=0.0)
    stats = tier.stats()
    assert stats.bytes_used <= limit
    assert len(list(folder.rglob("*.kv*"))) == stats.entries, "files without a row are gone"
    assert sum(p.stat().st_blocks * 512 for p in folder.rglob("*")) <= limit
    found = [int(r.header.tokens[0]) for r in tier.records() if r.header]
    assert held(tier, found) == set(found)
    assert tier.stats().errors == {}
    tier.close()


def test_files_of_killed_writers_are_left_alone_while_their_writer_may_live(folder: Path) -> None:
    written(folder, 3)
    young, old = (record_files(folder)[0].with_name(f"{c * 32}-{c * 8}.kv.tmp") for c in "ab")
    for path in (young, old):
        path.write_bytes(b"half")
    published = record_files(folder)[0].with_name(f"{'c' * 32}-{'c' * 8}.kv")
    published.write_bytes(b"between renaming and commit")
    os.utime(old, (time.time() - 3600,) * 2)
    index = folder / disk.FOLDER / "index.db"
    with sqlite3.connect(index) as connection:
        connection.execute("UPDATE meta SET value = 0 WHERE key = 'swept_ns'")
    connection.close()
    tier = open_tier(folder)
    assert (young.exists(), published.exists(), old.exists()) == (True, True, False)
    assert held(tier, range(3)) == {0, 1, 2}
    tier.close()


# --- two processes --------------------------------------------------------------------------------------------------


def test_two_processes_write_and_read_at_the_same_time(folder: Path) -> None:
    pair = [start(children.write_and_read, str(folder), first, 60) for first in (0, 60)]
    reports = [receiver.recv() for _, receiver in pair]
    for process, _ in pair:
        process.join(30)
    assert max(seen for seen, _ in reports) > 60
    assert [errors for _, errors in reports] == [{}, {}]
    tier = open_tier(folder)
    assert held(tier, range(120)) == set(range(120))
    tier.close()


def test_a_fork_leaves_both_sides_working(folder: Path) -> None:
    assert outcome(children.use_after_fork, str(folder)) == (0, True, 1, {})
    tier = open_tier(folder)
    assert held(tier, range(5)) == {1, 2, 3}
    tier.close()


def test_a_writer_that_is_stopped_makes_nobody_wait_for_reads(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(folder, 3)
    tier = open_tier(folder)
    other = sqlite3.connect(folder / disk.FOLDER / "index.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")  # what a process that was stopped in its transaction holds
    begin = time.perf_counter()
    for _ in range(300):
        assert held(tier, range(3)) == {0, 1, 2}
    assert tier.find([record(1).header.key.content_hash])
    assert time.perf_counter() - begin < 4, "less than one wait for the lock"
    other.execute("ROLLBACK")
    other.close()
    assert tier.put_many([record(4)]) > 0
    assert tier.stats().errors == {}
    tier.close()


# --- the directory cannot be used -----------------------------------------------------------------------------------


def assert_only_misses(report: dict[str, Any], kind: str) -> None:
    assert report["written"] == report["found"] == report["deleted"] == report["entries"] == 0
    assert report["read"] == set()
    assert set(report["errors"]) == {kind}
    assert report["errors"][kind] >= 5


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.may_skip("is covered by the next test where the user is not root")
@pytest.mark.parametrize("which", ["the directory", "what is in it", "open to all", "a single file"])
def test_a_directory_of_another_user_gives_misses(which: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's folders cannot be entered by others at all
        folder = Path(name)
        folder.chmod(0o777)
        if which != "the directory":
            written(folder, 2)
        else:
            folder.chmod(0o755)
        if which == "open to all":  # who owns it could read what others put there
            for path in folder.rglob("*"):
                path.chmod(0o777)
        if which == "a single file":
            for path in [folder, *folder.rglob("*")]:
                os.chown(path, NOBODY, NOBODY)
            for path in record_files(folder):
                os.chown(path, 0, 0)
            report = outcome(children.use_as, name, NOBODY, 5)
            assert (report["written"], report["deleted"]) == (children.ROWS, 1)
            assert (report["read"], report["errors"]) == ({5}, {"permission": 1})
            assert report["entries"] == 2, "they may become readable again"
            return
        assert_only_misses(outcome(children.use_as, name, NOBODY, 5), "permission")


def test_a_directory_that_cannot_be_made_gives_misses_and_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    with caplog.at_level(logging.WARNING, logger="kvboost"):
        tier = DiskTier(tmp_path / "file", LARGE, Seal())
        assert tier.put_many([record(1)]) == 0
        assert held(tier, [1]) == set()
        assert tier.find([b"name"]) == {}
        assert tier.delete() == 0
    assert tier.stats().errors["io"] >= 5
    assert len([r for r in caplog.records if r.name.startswith("kvboost")]) == 1


def test_a_directory_with_a_nul_is_refused() -> None:
    with pytest.raises(SettingsError, match="holds a NUL"):
        DiskTier("cache\0", LARGE, Seal())


@pytest.mark.parametrize("inner", [".", "records"])
@pytest.mark.parametrize("leads", [True, False], ids=["somewhere", "nowhere"])
def test_a_link_in_the_place_of_a_folder_is_not_followed(folder: Path, tmp_path: Path, inner: str, leads: bool) -> None:
    elsewhere, place = tmp_path / "elsewhere", folder / disk.FOLDER / inner
    if leads:
        elsewhere.mkdir(mode=0o755)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(elsewhere)
    tier = open_tier(folder)
    assert tier.put_many([record(1)]) == 0
    assert held(tier, [1]) == set()
    assert set(tier.stats().errors) == {"permission"}
    assert not leads or (elsewhere.stat().st_mode & 0o777, list(elsewhere.iterdir())) == (0o755, [])


def test_the_directory_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    tier = open_tier(folder)
    assert tier.put_many([record(1)]) > 0
    tier.close()


def test_a_directory_is_tried_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "RETRY_S", 0.0)
    (tmp_path / "cache").write_text("no directory")
    tier = open_tier(tmp_path / "cache")
    assert tier.put_many([record(1)]) == 0
    (tmp_path / "cache").unlink()
    assert tier.put_many([record(1)]) > 0
    tier.close()


def test_a_directory_that_is_removed_while_in_use_is_made_again(folder: Path) -> None:
    tier = open_tier(folder)
    tier.put_many([record(1)])
    shutil.rmtree(folder)
    assert held(tier, [1]) == set()
    assert tier.put_many([record(2)]) > 0
    assert held(tier, [1, 2]) == {2}
    tier.close()


def test_files_that_cannot_grow_cost_only_what_does_not_fit(folder: Path) -> None:
    """A limit on file sizes stands for a quota: the writing of a large file fails in its middle."""
    written(folder, 2)
    large, report = outcome(children.use_with_small_files, str(folder), 300_000)
    assert large == 0
    assert set(report["errors"]) == {"full"}
    assert report["read"] == {1}, "what is there is still served"
    assert list(folder.rglob("*.tmp")) == []
    tier = open_tier(folder)
    assert held(tier, range(2)) == {0, 1}
    tier.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    at = tmp_path / "disk"
    at.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(at)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield at
    subprocess.run(["umount", "-l", str(at)], check=True)


@pytest.mark.may_skip("needs the right to mount; a limit on file sizes covers most of it")
def test_a_full_disk_costs_only_what_does_not_fit(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "RETRY_S", 0.0)
    tier = open_tier(small_disk)
    numbers = range(12)
    kept = {n for n in numbers if tier.put_many([record(n, width=4096)])}
    assert 3 <= len(kept) < 12
    assert tier.stats().errors["full"] >= 12 - len(kept)
    assert held(tier, numbers) == kept
    for _ in range(40):  # the index cannot grow either
        tier.put_many([record(n) for n in range(100, 200)])
    small = held(tier, range(100, 200))
    assert held(tier, numbers) == kept
    assert tier.delete([identity(n) for n in kept]) in (0, len(kept)), "a full disk may refuse even this"
    tier.close()
    for path in [p for p in record_files(small_disk) if p.stat().st_size > 100_000]:
        path.unlink()  # somebody makes room
    tier = open_tier(small_disk)
    assert tier.put_many([record(50, width=4096)]) > 0
    assert held(tier, [50, *range(100, 200)]) >= {50, *small}
    tier.close()


# --- damage ---------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_in_a_file_is_a_miss_and_makes_room_for_a_new_record(folder: Path) -> None:
    tier = open_tier(folder)
    tier.put_many([record(1)])
    size = record_files(folder)[0].stat().st_size
    places = sorted({*range(64), *range(64, size, size // 60), size - 1})
    for count, place in enumerate(places, 1):
        (path,) = record_files(folder)
        data = bytearray(path.read_bytes())
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        assert held(tier, [1]) == set(), place
        assert tier.stats().errors == {"damaged": count}
        assert tier.find(record(1).header.names()) == {}
        assert tier.put_many([record(1)]) > 0
        assert held(tier, [1]) == {1}
    tier.close()


def test_truncated_empty_longer_and_missing_files_are_misses(folder: Path) -> None:
    written(folder, 8)
    tier = open_tier(folder)
    paths = record_files(folder)
    for path, size in zip(paths, (0, 1, 63, 64, 500, paths[5].stat().st_size - 1), strict=False):
        os.truncate(path, size)
    with paths[6].open("ab") as file:
        file.write(b"more")
    paths[7].unlink()
    assert held(tier, range(8)) == set()
    assert tier.stats().errors == {"damaged": 7, "missing": 1}
    assert tier.put_many([record(n) for n in range(8)]) == 8 * children.ROWS
    assert held(tier, range(8)) == set(range(8))
    tier.close()
    assert len(record_files(folder)) == 8


def test_a_record_in_the_place_of_another_is_refused(folder: Path) -> None:
    """Each is rightly sealed: who can write to the directory could swap them."""
    written(folder, 2)
    first, second = record_files(folder)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    tier = open_tier(folder)
    assert held(tier, range(2)) == set()
    assert tier.stats().errors == {"damaged": 2}
    tier.close()


def test_forged_names_and_heads_in_the_index_are_refused(folder: Path) -> None:
    written(folder, 2)
    connection = sqlite3.connect(folder / disk.FOLDER / "index.db")
    first, second = (record(n).header.key.content_hash for n in (0, 1))
    (number,) = connection.execute("SELECT id FROM names WHERE name = ?", (second,)).fetchone()
    connection.execute("INSERT INTO names VALUES (?, ?)", (first, number))
    connection.execute("UPDATE records SET file = '../../../../etc/passwd' WHERE id <> ?", (number,))
    connection.commit()
    connection.close()
    tier = open_tier(folder)
    assert [int(h.tokens[0]) for h in tier.find([first])[first]] == [0]
    assert held(tier, [0, 1]) == {1}
    assert tier.stats().errors == {"damaged": 1}
    tier.close()


def test_records_forged_without_the_secret_are_refused(folder: Path) -> None:
    written(folder, 1)
    (path,) = record_files(folder)
    for seal in (Seal(), Seal("a guess")):
        path.write_bytes(pack(record(0), seal))
        tier = open_tier(folder)
        assert held(tier, [0]) == set()
        assert tier.stats().errors == {"damaged": 1}
        tier.put_many([record(0)])
        assert held(tier, [0]) == {0}
        (path,) = record_files(folder)
        tier.close()


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_index_serves_nothing_wrong_and_comes_back(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    written(folder, 40)
    index = folder / disk.FOLDER / "index.db"
    data = bytearray(index.read_bytes())
    if seed % 5 == 0:
        data = data[: int(rng.integers(0, len(data)))]
    for _ in range([1, 30, 1000][seed % 3]):
        at = int(rng.integers(0, max(1, len(data) - 64)))
        data[at : at + 64] = rng.bytes(len(data[at : at + 64]))
    index.write_bytes(data)
    tier = open_tier(folder)
    names = [record(n).header.key.content_hash for n in range(40)]
    for name, headers in tier.find(names).items():
        assert all(name in h.names() for h in headers)
    held(tier, range(40))
    tier.put_many([record(n) for n in range(40, 60)])
    tier.put_many([record(n) for n in range(60)])
    assert held(tier, range(60)) == set(range(60)), "whatever was lost is kept again"
    tier.close()


def test_an_index_that_is_no_database_or_gone_is_made_anew_from_the_files(folder: Path) -> None:
    written(folder, 30)
    index = folder / disk.FOLDER / "index.db"
    for data in (b"this is not a database" * 500, b"", None):
        if data is None:
            index.unlink()
        else:
            index.write_bytes(data)
        tier = open_tier(folder)
        assert held(tier, range(30)) == set(range(30))
        assert tier.find([record(3).header.key.content_hash])
        assert tier.stats().entries == 30
        assert tier.stats().errors == ({"index": 1} if data else {})
        tier.close()


def test_one_process_notices_that_another_made_the_index_anew(folder: Path) -> None:
    first = open_tier(folder)
    first.put_many([record(1)])
    (folder / disk.FOLDER / "index.db").unlink()
    second = open_tier(folder)
    second.put_many([record(2)])
    assert held(first, [1, 2]) == {1, 2}
    first.put_many([record(3)])
    assert held(second, [1, 2, 3]) == {1, 2, 3}
    first.close()
    second.close()


# --- other releases -------------------------------------------------------------------------------------------------


def test_records_of_another_format_version_are_misses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder, 2)
    monkeypatch.setattr(records, "FORMAT_VERSION", 2)
    future = pack(record(0), Seal(children.SECRET))
    monkeypatch.undo()
    path = next(
        p for p in record_files(folder) if p.name.startswith(disk_files.RecordFiles.new_name(identity(0))[3:35])
    )
    path.write_bytes(future)
    tier = open_tier(folder)
    assert held(tier, range(2)) == {1}
    assert tier.stats().errors == {"damaged": 1}
    tier.close()


def test_the_folder_of_another_release_is_not_touched(folder: Path) -> None:
    other = folder / "records-v0"
    other.mkdir(parents=True)
    (other / "index.db").write_bytes(b"of another release")
    written(folder, 2)
    assert (other / "index.db").read_bytes() == b"of another release"
    assert sorted(p.name for p in folder.iterdir()) == ["records-v0", disk.FOLDER]


def test_a_release_with_another_index_has_a_folder_of_its_own(folder: Path) -> None:
    assert folder.joinpath(disk.FOLDER).name == f"records-v{records.FORMAT_VERSION}.{disk_index.INDEX_VERSION}"
    written(folder, 1)
    assert (folder / disk.FOLDER / "index.db").exists()


def test_an_index_of_another_version_in_our_folder_is_damage_and_made_anew(folder: Path) -> None:
    written(folder, 5)
    connection = sqlite3.connect(folder / disk.FOLDER / "index.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    tier = open_tier(folder)
    assert held(tier, range(5)) == set(range(5))
    assert tier.stats().errors == {"index": 1}
    tier.close()


# --- other secrets --------------------------------------------------------------------------------------------------


def by(secret: str, folder: Path, limit: int = LARGE) -> DiskTier:
    """A tier that looks for files without a row at once."""
    return DiskTier(folder, limit, Seal(secret), orphan_grace_s=0.0)


@pytest.mark.parametrize(("ours", "other"), [("ours", "another"), ("ours", ""), ("", "another")])
def test_a_rebuild_under_one_secret_keeps_what_another_sealed(folder: Path, ours: str, other: str) -> None:
    tier = by(ours, folder)
    tier.put_many([record(n) for n in range(5)])
    tier.close()
    (folder / disk.FOLDER / "index.db").unlink()
    for _ in range(2):
        stranger = by(other, folder)
        assert stranger.stats().entries == 5, "they count"
        assert held(stranger, range(5)) == set()
        assert stranger.find([record(1).header.key.content_hash]) == {}
        assert stranger.stats().errors == {}, "they are not called damaged"
        assert len(record_files(folder)) == 5
        stranger.close()
    tier = by(ours, folder)
    assert held(tier, range(5)) == set(range(5)), "their owner finds them again"
    assert tier.find([record(1).header.key.content_hash])
    assert tier.stats().entries == 5
    tier.close()


def test_what_another_secret_sealed_and_no_index_lists_is_not_swept(folder: Path) -> None:
    written(folder, 4)
    with sqlite3.connect(folder / disk.FOLDER / "index.db") as index:
        index.execute("DELETE FROM records WHERE id <= 2")
    index.close()
    record_files(folder)[0].with_name("0" * 32 + "-00000000.kv").write_bytes(b"damaged")
    stranger = by("another", folder)
    assert (len(record_files(folder)), stranger.stats().entries) == (4, 4)
    stranger.close()
    tier = by(children.SECRET, folder)
    assert held(tier, range(4)) == set(range(4))
    tier.close()


def test_what_another_secret_sealed_is_evicted_like_all_else(folder: Path) -> None:
    limit = limit_for(4, 4096)
    tier = open_tier(folder, limit)
    tier.put_many([record(n, width=4096) for n in range(3)])
    tier.close()
    (folder / disk.FOLDER / "index.db").unlink()
    stranger = by("another", folder, limit)
    assert stranger.stats().entries == 3
    assert all(stranger.put_many([record(n, width=4096)]) for n in range(10, 13))
    assert held(stranger, range(10, 13)) == {10, 11, 12}
    assert stranger.stats().bytes_used <= limit
    assert len(record_files(folder)) == stranger.stats().entries <= 5
    stranger.close()


def test_what_is_damaged_under_a_plain_checksum_is_removed_under_every_secret(folder: Path) -> None:
    tier = by("", folder)
    tier.put_many([record(1)])
    tier.close()
    (path,) = record_files(folder)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    (folder / disk.FOLDER / "index.db").unlink()
    tier = by("ours", folder)
    assert record_files(folder) == []
    assert tier.stats().errors == {"damaged": 1}
    tier.close()


# --- many records ---------------------------------------------------------------------------------------------------


def test_ten_thousand_records_start_within_two_seconds(folder: Path, record_property: Any) -> None:
    written(folder, 1)
    files = disk_files.RecordFiles(folder / disk.FOLDER / "records")
    seal = Seal(children.SECRET)
    for number in range(1, 10_000):
        name = files.new_name(identity(number))
        files.write(name, pack(record(number, width=1), seal))
        files.publish(name)
    (folder / disk.FOLDER / "index.db").unlink()
    rebuilding = time.perf_counter()
    tier = open_tier(folder)
    rebuilt_s = time.perf_counter() - rebuilding
    assert tier.stats().entries == 10_000
    tier.close()
    begin = time.perf_counter()
    tier = open_tier(folder, orphan_grace_s=0.0)  # the slow way: every file is looked at
    started_s = time.perf_counter() - begin
    assert held(tier, range(0, 10_000, 1000)) == set(range(0, 10_000, 1000))
    tier.close()
    record_property("started_s", started_s)
    print(f"start-up with 10,000 records {started_s:.3f} s; with a new index {rebuilt_s:.2f} s")  # noqa: T201
    assert started_s < 2


# --- what holds readers up ------------------------------------------------------------------------------------------

MANY = 300  # uses that are noted before they are written: more than `disk.MAX_NOTES`


def test_records_are_served_while_the_index_cannot_be_written(folder: Path) -> None:
    tier = open_tier(folder)
    tier.put_many([record(n) for n in range(MANY)])
    index = tier._index
    assert index is not None
    index._writer.execute("PRAGMA query_only = ON")  # as on a file system that was made read-only or is full
    for _ in range(3):
        assert held(tier, range(MANY)) == set(range(MANY))
    assert set(tier.stats().errors) == {"permission"}
    index._writer.execute("PRAGMA query_only = OFF")
    tier.close()
    tier = open_tier(folder)
    assert max(r.hits for r in tier.records()) >= 3, "the uses were written when that was possible again"
    tier.close()


def test_a_request_does_not_wait_for_a_thread_that_writes(folder: Path) -> None:
    tier = open_tier(folder)
    tier.put_many([record(n) for n in range(MANY)])
    index = tier._index
    assert index is not None
    writing, read = threading.Event(), threading.Event()
    waited = []

    def write() -> None:
        with index.writing():
            writing.set()
            waited.append(not read.wait(10))

    thread = threading.Thread(target=write)
    thread.start()
    writing.wait()
    assert held(tier, range(MANY)) == set(range(MANY))
    read.set()
    thread.join()
    assert waited == [False]
    tier.close()


def test_a_record_that_would_spoil_the_index_does_not(folder: Path) -> None:
    """NaN is no number to SQLite: such a record made the index be thrown away, at every start again."""
    written(folder, 2)
    tier = DiskTier(folder, LARGE, Seal(children.SECRET))
    honest = record(9)
    forged = ChunkKV(replace(honest.header, cost_s=float("nan")), honest.payload)
    record_files(folder)[0].write_bytes(pack(forged, Seal(children.SECRET)))
    tier.close()
    (folder / disk.FOLDER / "index.db").unlink()
    tier = open_tier(folder)
    assert tier.stats().entries == 1
    assert set(tier.stats().errors) == {"damaged"}
    tier.close()


def test_a_pipe_in_the_place_of_a_record_file_is_a_miss(folder: Path) -> None:
    written(folder, 2)
    for path in record_files(folder):
        path.unlink()
        os.mkfifo(path)
    tier = open_tier(folder)
    assert held(tier, range(2)) == set()
    tier.close()


def test_what_a_wrong_clock_dated_ahead_is_not_kept_for_ever(folder: Path) -> None:
    written(folder, 10)
    orphan = record_files(folder)[0].with_name("0" * 32 + "-00000000.kv")
    orphan.touch()
    os.utime(orphan, (0, 0))
    with sqlite3.connect(folder / disk.FOLDER / "index.db") as index:
        ahead = time.time_ns() + 10**18
        index.execute("UPDATE records SET used_ns = ?, written_ns = ? WHERE id <= 5", (ahead, ahead))
        index.execute("UPDATE meta SET value = ? WHERE key = 'swept_ns'", (ahead,))
    index.close()
    tier = open_tier(folder)
    assert not orphan.exists()
    assert all(r.used_at_s <= time.time() for r in tier.records())
    tier.close()


def test_many_records_wait_once_for_a_process_that_holds_the_index(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.store.disk_index.BUSY_S", 0.05)
    tier = open_tier(folder)
    assert tier._index is not None
    tried: list[str] = []
    tier._index._writer.set_trace_callback(lambda text: tried.append(text) if text.startswith("BEGIN") else None)
    other = sqlite3.connect(folder / disk.FOLDER / "index.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert tier.put_many([record(n) for n in range(5)]) == 0
    assert len(tried) <= 1
    assert tier.stats().errors == {"busy": 5}
    other.execute("ROLLBACK")
    other.close()
    monkeypatch.setattr(tier, "_paused_until", 0.0)  # ten seconds later
    assert tier.put_many([record(1)]) > 0
    tier.close()
