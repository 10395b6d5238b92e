"""Settings that change under a running engine: what is taken, what is refused, and that nobody is harmed."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from families import build
from kvboost import SettingsError
from kvboost.cli import app
from kvboost.config import FIXED, Settings, env_name, resolve, uses_cache
from kvboost.errors import InputError
from kvboost.live import LiveSettings
from kvboost.settings_file import SETTLE_S, SettingsFile
from scenario import engine, greedy, prompt

ORDER = ("flag", "environment", "file", "admin", "request")  # lowest first
LONG_AGO = 1_700_000_000


def write(path: Path, **values: Any) -> Path:
    """Replaces the file in one step, as tools do."""
    return write_text(path, "".join(f"{env_name(name)}={value}\n" for name, value in values.items()))


def write_text(path: Path, text: str) -> Path:
    write.serial = getattr(write, "serial", 0) + 1  # type: ignore[attr-defined]
    new = path.with_name("new")
    new.write_text(text)
    os.utime(new, (LONG_AGO, LONG_AGO + write.serial))  # type: ignore[attr-defined]
    new.replace(path)
    return path


def config_map(root: Path, version: str, **values: Any) -> Path:
    """What Kubernetes does: a new directory, and the link `..data` swapped to it."""
    (root / f"..{version}").mkdir(parents=True)
    for name, value in values.items():
        (root / f"..{version}" / env_name(name)).write_text(f"{value}\n")
        if not (root / env_name(name)).is_symlink():
            (root / env_name(name)).symlink_to(Path("..data") / env_name(name))
    (root / "..data_tmp").symlink_to(f"..{version}")
    (root / "..data_tmp").replace(root / "..data")
    return root


def live_over(path: Path, **environ: str) -> LiveSettings:
    return LiveSettings({"settings_file": str(path)}, environ)


def now(live: LiveSettings, **request: Any) -> Settings:
    return live.resolve(request).settings


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_changed_file_holds_for_the_next_call_and_is_read_once(tmp_path: Path) -> None:
    live = live_over(write(tmp_path / "s", fidelity="fast"))
    assert now(live).fidelity == "fast"
    write(tmp_path / "s", fidelity="exact", cache_salt='"a b"  # quoted')
    assert [now(live).fidelity for _ in range(5)] == ["exact"] * 5
    assert now(live).cache_salt == "a b"
    assert live.file_reads == 2
    assert live.status().generation == 2


def test_a_config_map_changes_when_its_link_is_swapped(tmp_path: Path) -> None:
    live = live_over(config_map(tmp_path / "map", "1", fidelity="fast", mode="on"))
    assert now(live).fidelity == "fast"
    config_map(tmp_path / "map", "2", fidelity="exact", mode="on")
    assert now(live).fidelity == "exact"
    assert live.resolve().origins["fidelity"] == "file"
    reads = live.file_reads
    now(live)
    assert live.file_reads == reads


def test_a_file_inside_a_config_map_changes_when_the_link_is_swapped(tmp_path: Path) -> None:
    for version, fidelity in (("1", "fast"), ("2", "exact")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "s.env").write_text(f"KVBOOST_FIDELITY={fidelity}\n")
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "s.env").symlink_to("..data/s.env")
    live = live_over(tmp_path / "s.env")
    assert now(live).fidelity == "fast"
    (tmp_path / "tmp").symlink_to("2")
    (tmp_path / "tmp").replace(tmp_path / "..data")
    assert now(live).fidelity == "exact"


def test_a_plain_directory_of_files_is_watched_too(tmp_path: Path) -> None:
    write_text(tmp_path / "KVBOOST_FIDELITY", "fast\n")
    (tmp_path / "README").write_text("no setting")
    os.utime(tmp_path, (LONG_AGO, LONG_AGO))
    live = live_over(tmp_path)
    assert now(live).fidelity == "fast"
    write_text(tmp_path / "KVBOOST_FIDELITY", "exact\n")
    os.utime(tmp_path, (LONG_AGO, LONG_AGO))
    assert now(live).fidelity == "exact"


def test_a_file_that_is_being_written_is_not_read_before_it_rests(tmp_path: Path) -> None:
    path = write(tmp_path / "s", fidelity="fast", shadow_share=0.5)
    clock = [0.0]
    file = SettingsFile(path, clock=lambda: clock[0])
    assert file.look() is not None
    far = 1 << 33  # a clock ahead of ours, so that the age of the file says nothing
    with path.open("w") as half:
        half.write("KVBOOST_FIDE")
        half.flush()
        os.utime(path, (far, far))
        assert file.look() is None
        half.write("LITY=exact\n")
        half.flush()
        os.utime(path, (far, far + 1))
        clock[0] += SETTLE_S
        assert file.look() is None, "it changed a moment ago"
        assert file.reads == 1
    clock[0] += SETTLE_S
    version = file.look()
    assert version is not None
    assert version.values == {"fidelity": "exact"}


def test_a_file_that_was_left_alone_is_taken_at_once(tmp_path: Path) -> None:
    file = SettingsFile(write(tmp_path / "s", fidelity="fast"), clock=lambda: 0.0)
    assert file.look() is not None


BAD = {
    "a value that is none": "KVBOOST_FIDELITY=sometimes\n",
    "a name that is none": "KVBOOST_FIDELTY=fast\n",
    "a line without a value": "KVBOOST_FIDELITY=fast\nKVBOOST_MODE\n",
    "an open quote": 'KVBOOST_CACHE_SALT="abc\nKVBOOST_FIDELITY=fast\n',
    "sizes that do not fit together": "KVBOOST_CHUNK_MIN_TOKENS=5000\n",
    "a value with a hidden end": "KVBOOST_FIDELITY=fast\0\n",
    "too much of it": "#" * (1 << 20) + "\n",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_bad_file_changes_nothing_is_counted_and_logged_once(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = live_over(write(tmp_path / "s", fidelity="exact", hash_secret="s3cret"))
    write_text(tmp_path / "s", "KVBOOST_HASH_SECRET=t0psecret\n" + text)
    assert [now(live).fidelity for _ in range(3)] == ["exact"] * 3
    assert (live.status().rejected, live.status().generation) == (1, 1)
    assert live.status().last_error
    assert sum(r.levelno == logging.ERROR for r in caplog.records) == 1
    assert "t0psecret" not in caplog.text
    write(tmp_path / "s", fidelity="balanced")
    assert now(live).fidelity == "balanced"
    assert live.status().last_error is None


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    live = live_over(write(tmp_path / "s", fidelity="exact"))
    (tmp_path / "new").write_bytes(b"KVBOOST_FIDELITY=\xff\xfe")
    os.utime(tmp_path / "new", (LONG_AGO, LONG_AGO))
    (tmp_path / "new").replace(tmp_path / "s")
    assert now(live).fidelity == "exact"
    assert "UTF-8" in (live.status().last_error or "")


PIECES = st.sampled_from(
    [
        "KVBOOST_FIDELITY=exact",
        "KVBOOST_",
        "=",
        "\n",
        "'",
        '"',
        "\\x",
        "#",
        "export ",
        "${HOME}",
        "\0",
        "\r",
        " ",
        "\ufeff",
        "é",
    ]
)


@given(texts=st.lists(st.lists(PIECES, max_size=10).map("".join), max_size=5))
def test_whatever_a_file_holds_the_settings_stay_valid(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        live = live_over(write(Path(directory) / "s", fidelity="fast"))
        for text in texts:
            former = live.status()
            write_text(Path(directory) / "s", text)
            assert now(live).fidelity in ("exact", "fast", "balanced")
            assert live.status().rejected - former.rejected == (live.status().last_error is not None)


def test_nothing_in_a_file_is_replaced_by_the_environment(tmp_path: Path) -> None:
    live = live_over(write(tmp_path / "s", cache_salt='"${HOME}"'), HOME="/root")
    assert now(live).cache_salt == "${HOME}"


def test_names_that_are_not_ours_are_told_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live = live_over(write_text(tmp_path / "s", "HF_TOKEN=t0psecret\nKVBOOST_FIDELITY=fast\n"))
    assert now(live).fidelity == "fast"
    assert "HF_TOKEN" in caplog.text
    assert "t0psecret" not in caplog.text


def test_with_the_file_its_settings_go(tmp_path: Path) -> None:
    path = write(tmp_path / "s", fidelity="exact")
    live = live_over(path)
    path.unlink()
    os.utime(tmp_path, (LONG_AGO, LONG_AGO))
    assert now(live).fidelity == "balanced"
    assert not live.status().file_present
    assert live.status().rejected == 0


def test_a_file_that_cannot_be_reached_keeps_its_settings(tmp_path: Path) -> None:
    path = write(tmp_path / "s", fidelity="exact")
    live = live_over(path)
    path.unlink()
    path.symlink_to(path)  # a loop: there is something, and it cannot be read, whoever one is
    assert now(live).fidelity == "exact"
    assert live.status().rejected == 1


def test_a_removal_that_would_leave_settings_at_odds_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "s", chunk_min_tokens=10, chunk_avg_tokens=20)
    live = live_over(path)
    live.set({"chunk_max_tokens": 20})
    path.unlink()
    os.utime(tmp_path, (LONG_AGO, LONG_AGO))
    assert now(live).chunk_min_tokens == 10
    assert live.status().rejected == 1


def test_a_file_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    live = live_over(tmp_path / "s")
    assert now(live).fidelity == "balanced"
    write(tmp_path / "s", fidelity="fast")
    assert now(live).fidelity == "fast"


def test_an_invalid_environment_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    live = live_over(write(tmp_path / "s", fidelity="fast"), KVBOOST_MODE="never")
    assert live.status().rejected == 0
    with pytest.raises(SettingsError, match="KVBOOST_MODE"):
        now(live)


def test_a_setting_that_is_read_once_is_reported_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live = live_over(write(tmp_path / "s", cache_bytes="1GiB", fidelity="fast"))
    assert now(live).cache_bytes == 1 << 30
    for _ in range(2):
        write(tmp_path / "s", cache_bytes="2GiB", fidelity="exact", redis_url="redis://user:pass@h/0")
        assert (now(live).cache_bytes, now(live).fidelity) == (1 << 30, "exact")
    assert live.status().needs_restart == ("cache_bytes", "redis_url")
    told = [r for r in caplog.records if "restart" in r.getMessage()]
    assert len(told) == 1
    assert "pass" not in caplog.text
    write(tmp_path / "s", cache_bytes=1 << 30)
    assert now(live).cache_bytes == 1 << 30
    assert live.status().needs_restart == ()


def test_config_show_tells_the_source_and_what_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_SETTINGS_FILE", str(write(tmp_path / "s", fidelity="fast")))
    shown = CliRunner().invoke(app, ["config", "show", "--origin", "--json"])
    assert '"value": "fast",\n    "origin": "file"' in shown.stdout
    write(tmp_path / "s", fidelity="slow")
    shown = CliRunner().invoke(app, ["config", "show", "--origin"])
    assert "is rejected" in shown.output
    assert "'slow'" in shown.output


# --- all sources -----------------------------------------------------------------------------------------------------

VALUES = st.sampled_from([None, "exact", "balanced", "fast"])


@given(given_values=st.tuples(*[VALUES] * len(ORDER)))
def test_the_highest_source_wins_and_is_named(given_values: tuple[str | None, ...]) -> None:
    given_by = {o: {"fidelity": v} for o, v in zip(ORDER, given_values, strict=True) if v is not None}
    environ = {env_name(k): v for k, v in given_by.get("environment", {}).items()}
    found = resolve(
        given_by.get("flag"),
        given_by.get("request"),
        environ,
        file=given_by.get("file"),
        admin=given_by.get("admin"),
    )
    winner = next((o for o in reversed(ORDER) if o in given_by), "default")
    assert found.origins["fidelity"] == winner
    assert found.settings.fidelity == given_by.get(winner, {}).get("fidelity", "balanced")


@given(switches=st.tuples(*[st.sampled_from([None, False, True])] * len(ORDER)), mode=st.sampled_from(["on", "bogus"]))
def test_the_kill_switch_is_the_or_of_all_sources(switches: tuple[bool | None, ...], mode: str) -> None:
    by = {o: {"disable": v} for o, v in zip(ORDER, switches, strict=True) if v is not None}
    environ = {"KVBOOST_DISABLE": str(int(by["environment"]["disable"]))} if "environment" in by else {}
    off = any(switches)
    if off or mode == "on":
        flags = {**by.get("flag", {}), "mode": mode}
        found = resolve(flags, by.get("request"), environ, file=by.get("file"), admin=by.get("admin"))
        assert found.settings.enabled == (not off)


@pytest.mark.parametrize("source", ["environment", "file", "rejected file", "admin", "request"])
def test_the_kill_switch_acts_from_every_source_and_can_be_taken_back(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "s")
    kv = engine(build("llama"), settings_file=str(path))

    def turn(off: bool) -> dict[str, Any]:
        if source == "environment":
            monkeypatch.setenv("KVBOOST_DISABLE", str(int(off)))
        elif source == "file":
            write(path, disable=int(off))
        elif source == "rejected file":
            write(path, **({"disable": 1, "mode": "bogus"} if off else {}))
        elif source == "admin":
            kv.live.set({"disable": off})
        return {"disable": off} if source == "request" else {}

    assert greedy(kv.generate, prompt(), 1).report.fallback is None
    assert greedy(kv.generate, prompt(), 1, **turn(True)).report.fallback == "switched off"
    assert greedy(kv.generate, prompt(), 1, **turn(False)).report.exact_tokens > 0


# --- the administrator -----------------------------------------------------------------------------------------------


def test_what_an_administrator_sets_beats_the_file_until_it_is_cleared(tmp_path: Path) -> None:
    live = live_over(write(tmp_path / "s", fidelity="fast"))
    live.set({"fidelity": "exact", "shadow_share": 0.5})
    assert (now(live).fidelity, now(live, fidelity="balanced").fidelity) == ("exact", "balanced")
    live.clear(["fidelity"])
    assert (now(live).fidelity, now(live).shadow_share) == ("fast", 0.5)
    live.clear()
    assert now(live).shadow_share == 0
    assert live.status().generation == 4


@pytest.mark.parametrize(
    ("values", "setting"),
    [
        ({"fidelity": "exact", "shadow_share": 7}, "shadow_share"),
        ({"fidelity": "exact", "colour": "red"}, "colour"),
        ({"fidelity": "exact", "cache_bytes": 1}, "cache_bytes"),
        ({"fidelity": "exact", "chunk_max_tokens": 1}, None),
    ],
)
@pytest.mark.parametrize("killed", [False, True])
def test_an_override_is_taken_as_a_whole_or_not_at_all(values: Any, setting: str | None, killed: bool) -> None:
    live = LiveSettings({"disable": killed}, {})
    with pytest.raises(SettingsError) as refused:
        live.set(values)
    assert refused.value.setting == setting
    assert live.status().admin == {}
    assert live.status().generation == 0


def test_a_file_that_contradicts_an_override_is_refused(tmp_path: Path) -> None:
    live = live_over(write(tmp_path / "s"))
    live.set({"chunk_max_tokens": 130})
    write(tmp_path / "s", chunk_min_tokens=200, chunk_avg_tokens=200)
    assert now(live).chunk_min_tokens == 32
    assert live.status().rejected == 1


def test_clearing_what_is_no_setting_is_an_error() -> None:
    with pytest.raises(SettingsError, match="fidelty is no setting"):
        LiveSettings({}, {}).clear(["fidelty"])


# --- under load ------------------------------------------------------------------------------------------------------


def test_changes_under_load_hold_for_the_next_request_and_harm_none(tmp_path: Path) -> None:
    path = write(tmp_path / "s", mode="on")
    kv = engine(build("llama"), settings_file=str(path))
    greedy(kv.generate, prompt(), 1)
    version, stop, wrong = [0], threading.Event(), []

    def client() -> None:
        while not stop.is_set():
            before = version[0]
            try:
                fallback = greedy(kv.generate, prompt("3120"), 1).report.fallback
            except Exception as error:
                wrong.append(repr(error))
                return
            if before == version[0] >= 0 and (fallback == "switched off") != bool(before % 2):
                wrong.append(f"version {before} was not in force: {fallback}")

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    for n in range(1, 9):
        version[0] = -1  # nobody is judged while it changes
        write(path, disable=n % 2, recompute_strategy=["epic", "none"][n // 2 % 2])
        assert kv.settings().disable == bool(n % 2)
        version[0] = n
        served = kv.stats.requests
        while kv.stats.requests < served + 4 and not wrong:
            stop.wait(0.005)
    stop.set()
    for thread in clients:
        thread.join(60)
    assert not wrong
    assert (kv.live.status().rejected, kv.live.file_reads) == (0, 9)


# --- shares and units ------------------------------------------------------------------------------------------------


def test_a_share_of_the_requests_is_drawn_by_id_and_grows_with_the_share() -> None:
    ids = [f"req-{i}" for i in range(2000)]
    drawn = {share: {i for i in ids if uses_cache(Settings(enabled_share=share), i)} for share in (0, 0.1, 0.3, 1)}
    assert (len(drawn[0]), len(drawn[1])) == (0, 2000)
    assert drawn[0.1] < drawn[0.3]
    assert 150 < len(drawn[0.1]) < 250


@pytest.mark.parametrize(
    ("settings", "header", "expected"),
    [
        ({"enabled_share": 0}, "true", True),
        ({"enabled_share": 0}, " TRUE ", True),
        ({"enabled_share": 1}, "false", False),
        ({"enabled_share": 1, "disable": True}, "true", False),
        ({"mode": "off"}, "true", False),
        ({"enabled_share": 1}, None, True),
    ],
)
def test_the_header_beats_the_share_and_the_kill_switch_the_header(settings: Any, header: Any, expected: bool) -> None:
    assert uses_cache(Settings(**settings), "r", header) is expected


def test_a_header_that_says_neither_is_refused() -> None:
    with pytest.raises(InputError, match="true or false"):
        uses_cache(Settings(), "r", "maybe")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("cache_bytes", "2GiB", 2 << 30),
        ("cache_bytes", " 1.5 MiB ", 3 << 19),
        ("disk_bytes", "10GB", 10**10),
        ("write_queue_bytes", "4096", 4096),
        ("redis_timeout_s", "250ms", 0.25),
        ("redis_timeout_s", "0.5", 0.5),
        ("redis_ttl_s", "7d", 604800.0),
        ("redis_ttl_s", "90 min", 5400.0),
    ],
)
def test_sizes_and_durations_may_have_units(name: str, text: str, value: float) -> None:
    assert getattr(resolve(environ={env_name(name): text}).settings, name) == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cache_bytes", "2 parsecs"),
        ("cache_bytes", "-1GiB"),
        ("cache_bytes", "1e999"),
        ("redis_ttl_s", "7 fortnights"),
        ("redis_ttl_s", "inf"),
        ("redis_ttl_s", "-3h"),
        ("redis_ttl_s", ""),
    ],
)
def test_other_units_are_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=env_name(name)):
        resolve(environ={env_name(name): text})


def test_a_secret_is_not_told_when_it_is_invalid() -> None:
    with pytest.raises(SettingsError) as refused:
        resolve({"hash_secret": ["t0psecret"]})
    assert "t0psecret" not in str(refused.value)


def test_every_setting_that_is_read_once_exists() -> None:
    assert set(Settings.model_fields) >= FIXED
