"""`kvboost cache`: what it shows, what it hides, what it finds damaged, and that caches can be moved."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from disk_children import SECRET, identity, is_right, open_tier, record
from kvboost.cli import app
from kvboost.store.disk import DiskTier
from kvboost.store.records import Seal, is_encrypted
from kvboost.types import ChunkHeader, ChunkKey, ChunkKV, Lineage, Link

LARGE = 1 << 30


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache of ten records of their own and a link."""
    monkeypatch.setenv("KVBOOST_HASH_SECRET", SECRET)
    tier = open_tier(tmp_path / "cache")
    tier.put_many([record(n, lineage=Lineage.LOSSY if n == 3 else Lineage.BIT_EXACT) for n in range(10)])
    own = record(1)
    rows = own.payload[0].named()["keys"][:, :, :1]
    header = ChunkHeader(
        ChunkKey(b"content", b"elsewhere"),
        b"somewhere",
        500,
        own.header.tokens,
        Lineage.APPROXIMATE,
        source=Link(identity(1), 0),
        rows=np.array([0], np.int32),
    )
    tier.put_many([ChunkKV(header, (type(own.payload[0])(rows, rows),))])
    with tier.get_many([identity(4)]):
        pass
    tier.close()
    return str(tmp_path / "cache")


def run(*arguments: str, input: str | None = None) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["cache", *arguments], input=input)


def shown(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def damage(cache: str, count: int) -> None:
    for path in sorted(Path(cache).rglob("*.kv"))[:count]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


# --- ls and stats ---------------------------------------------------------------------------------------------------


def test_chunks_are_listed_without_their_text(cache: str) -> None:
    entries = shown("ls", cache)
    assert len(entries) == 11
    assert entries[0]["hits"] == 1, "the last used one first"
    assert set(entries[0]) == {"id", "position", "tokens", "kind", "lineage", "codec", "bytes", "hits", "used"}
    assert [e["position"] for e in shown("ls", cache, "--sort", "position", "--limit", "0")] == [40] * 10 + [500]
    table = run("ls", cache, "--limit", "3")
    assert len([line for line in table.stdout.splitlines() if "bit_exact" in line or "link" in line]) == 3
    assert "3 of 11 chunks" in table.stderr


@pytest.mark.parametrize(
    ("option", "value", "count"),
    [
        ("--kind", "link", 1),
        ("--kind", "own", 10),
        ("--lineage", "lossy", 1),
        ("--codec", "none", 11),
        ("--codec", "k8v4", 0),
    ],
)
def test_chunks_are_filtered(cache: str, option: str, value: str, count: int) -> None:
    assert len(shown("ls", cache, option, value)) == count


def test_text_is_shown_only_when_asked_for(cache: str, shared_data: Path) -> None:
    stories = str(shared_data / "models" / "stories260K-llama")
    assert "needs --tokenizer" in run("ls", cache, "--show-text").stderr
    assert "text" not in shown("ls", cache, "--tokenizer", stories)[0]
    entries = shown("ls", cache, "--show-text", "--tokenizer", stories)
    assert all(isinstance(e["text"], str) for e in entries)
    assert run("ls", cache, "--show-text", "--tokenizer", stories).exit_code == 0


def test_stats_sum_up(cache: str) -> None:
    stats = shown("stats", cache)
    assert (stats["records"], stats["tokens"], stats["hits"], stats["unreadable"]) == (11, 88, 1, 0)
    groups = {(g["kind"], g["lineage"]): g["records"] for g in stats["groups"]}
    assert groups == {("own", "bit_exact"): 9, ("own", "lossy"): 1, ("link", "approximate"): 1}
    assert run("stats", cache).exit_code == 0


def test_what_another_secret_sealed_is_counted_and_not_removed(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_HASH_SECRET", "another")
    assert shown("stats", cache)["unreadable"] == 11
    assert shown("ls", cache) == []
    result = run("verify", cache, "--delete")
    assert result.exit_code == 1
    assert "nothing was removed" in result.stderr
    monkeypatch.setenv("KVBOOST_HASH_SECRET", SECRET)
    assert run("verify", cache).exit_code == 0


def test_a_directory_without_a_cache_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    for command in ("ls", "stats", "verify", "clear"):
        result = run(command, str(tmp_path))
        assert result.exit_code == 2
        assert "no cache" in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert "--prefix is for Redis" in run("ls", str(tmp_path), "--prefix", "x").stderr


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from kvboost.cli import app; "
        "app(['cache', 'ls', '--help'], standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


# --- clear and verify -----------------------------------------------------------------------------------------------


def test_clear_asks_first(cache: str) -> None:
    assert run("clear", cache, input="n\n").exit_code != 0
    assert len(shown("ls", cache)) == 11
    assert run("clear", cache, input="y\n").exit_code == 0
    assert shown("ls", cache) == []
    assert run("clear", cache, "--yes").exit_code == 0


def test_verify_finds_and_removes_what_is_damaged(cache: str) -> None:
    assert run("verify", cache).exit_code == 0
    damage(cache, 2)
    result = run("verify", cache, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["sound"], len(report["damaged"]), report["removed"]) == (9, 2, 0)
    assert all("digest" in d["damage"] for d in report["damaged"])
    result = run("verify", cache, "--delete")
    assert result.exit_code == 1
    assert "9 records are sound, 2 are damaged, 2 were removed" in result.stdout
    assert run("verify", cache).exit_code == 0
    assert len(shown("ls", cache)) == 9


def test_verify_finds_files_that_are_gone(cache: str) -> None:
    sorted(Path(cache).rglob("*.kv"))[0].unlink()
    result = run("verify", cache, "--delete")
    assert result.exit_code == 1
    assert "gone" in result.stdout
    assert run("verify", cache).exit_code == 0


# --- export and import ----------------------------------------------------------------------------------------------


def test_a_cache_can_be_moved_in_one_file(cache: str, tmp_path: Path) -> None:
    archive, copy = tmp_path / "cache.tar", str(tmp_path / "copy")
    result = run("export", cache, str(archive))
    assert result.exit_code == 0, result.output
    assert "wrote 11 records" in result.stderr
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    result = run("import", str(archive), copy)
    assert result.exit_code == 0, result.output
    assert "read 11 records, 11 of them new" in result.stderr
    assert "11 records, 0 of them new" in run("import", str(archive), copy).stderr
    tier = open_tier(copy)
    with tier.get_many([identity(n) for n in range(10)]) as lease:
        assert len(lease.records) == 10
        assert all(map(is_right, lease.records.values()))
    tier.close()


def test_encrypted_records_stay_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setenv("KVBOOST_HASH_SECRET", SECRET)
    tier = DiskTier(tmp_path / "cache", LARGE, Seal(SECRET, encrypt=True))
    tier.put_many([record(1)])
    tier.close()
    assert run("export", str(tmp_path / "cache"), str(tmp_path / "a.tar")).exit_code == 0
    assert run("import", str(tmp_path / "a.tar"), str(tmp_path / "copy")).exit_code == 0
    (path,) = (tmp_path / "copy").rglob("*.kv")
    assert is_encrypted(path.read_bytes())


def test_damaged_records_are_neither_exported_nor_imported(cache: str, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole.tar", tmp_path / "part.tar"
    run("export", cache, str(whole))
    damage(cache, 3)
    result = run("export", cache, str(part))
    assert result.exit_code == 1
    assert "wrote 8 records" in result.stderr
    assert "left out 3" in result.stderr
    data = bytearray(whole.read_bytes())
    with tarfile.open(whole) as archive:
        first = archive.getmembers()[0]
    data[first.offset_data + first.size - 1] ^= 1
    whole.write_bytes(data)
    result = run("import", str(whole), str(tmp_path / "copy"))
    assert result.exit_code == 1
    assert "read 10 records" in result.stderr
    assert "left out 1" in result.stderr


def test_an_archive_of_another_secret_is_not_taken(cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("export", cache, str(tmp_path / "a.tar"))
    monkeypatch.setenv("KVBOOST_HASH_SECRET", "another")
    result = run("import", str(tmp_path / "a.tar"), str(tmp_path / "copy"))
    assert result.exit_code == 1
    assert "left out 11" in result.stderr
    assert not (tmp_path / "copy").exists()


def test_an_existing_file_is_not_overwritten_and_a_foreign_one_not_read(cache: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("not an archive")
    assert "exists" in run("export", cache, str(other)).stderr
    assert other.read_text() == "not an archive"
    result = run("import", str(other), str(tmp_path / "copy"))
    assert result.exit_code == 2
    assert "cannot read the archive" in result.stderr
    result = run("import", str(tmp_path / "absent"), str(tmp_path / "copy"))
    assert result.exit_code == 2


def test_an_export_writes_through_no_link_and_is_private(cache: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    (tmp_path / "a.tar.part").symlink_to(precious)
    (tmp_path / "b.tar.part").touch(0o644)
    for name in ("a.tar", "b.tar"):
        assert run("export", cache, str(tmp_path / name)).exit_code == 0
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert precious.read_text() == "x"
    assert run("export", cache, str(tmp_path / "b.tar")).exit_code == 2, "it exists"
    assert (tmp_path / "b.tar.part").exists(), "what another export may be writing is left alone"


def header(size: bytes, kind: bytes = b"0") -> bytes:
    """A tar header with a size field as given."""
    field = bytearray(512)
    field[:4], field[100:108], field[124:136], field[156:157] = b"a.kv", b"0000600\0", size, kind
    field[257:265], field[148:156] = b"ustar\x0000", b" " * 8
    field[148:156] = b"%06o\0 " % sum(field)
    return bytes(field)


@pytest.mark.parametrize(
    "archive",
    [
        header(b"\x80" + b"\x7f" * 11) + bytes(2048),  # the tar module would seek to there, for ever
        header(b"\xff" * 12) + bytes(2048),
        header(b"00000000010\0", b"S") + bytes(2048),
        header(b"00000000032\0", b"x") + b"26 GNU.sparse.map=a,b,c,d\n".ljust(512, b"\0") + header(b"00000000010\0"),
    ],
    ids=["huge", "negative", "sparse", "malformed"],
)
def test_an_archive_that_claims_the_impossible_is_an_error(archive: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(archive + bytes(1024))
    result = run("import", str(tmp_path / "a.tar"), str(tmp_path / "new"))
    assert result.exit_code == 2
    assert "cannot read the archive" in result.output


def test_a_place_that_cannot_be_is_an_error() -> None:
    assert run("ls", "x" * 5000).exit_code == 2
    assert run("ls", "redis://[::1").exit_code == 2
