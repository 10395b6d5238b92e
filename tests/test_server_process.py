"""`kvboost serve` as a process of its own, and the examples of its page."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from typer.testing import CliRunner

from kvboost.cli import app
from kvboost.cli.serve import _in_passing
from kvboost.errors import ModelError
from kvboost.server import ServerOptions, make_app
from kvboost.server.process import listen
from server_run import STORY, eventually, get, open_service, post, serving, stories

PAGE = Path(__file__).resolve().parents[1] / "docs" / "server.md"
EXAMPLES = re.findall(r"```(bash|python)\n(.*?)```", PAGE.read_text(), re.DOTALL)
STREAM = {"model": "stories260K-llama", "prompt": STORY, "max_tokens": 350, "ignore_eos": True, "stream": True}


@contextmanager
def process(shared_data: Path, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server and its URL; killed if the block leaves it running."""
    command = [sys.executable, "-m", "kvboost.cli", "serve", "--port", "0", *options]
    command += ["--model", str(shared_data / "models" / "stories260K-llama")]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        assert started.stderr is not None
        heard: list[str] = []
        for line in started.stderr:
            heard.append(line)
            if "listening on" in line:
                break
        else:
            pytest.fail("".join(heard))
        rest = threading.Thread(target=lambda: heard.extend(started.stderr or ()))
        rest.start()
        yield started, heard[-1].split("listening on ")[1].strip().rstrip("/")
        rest.join(30)
    finally:
        started.kill()
        started.wait()
        if started.stderr is not None:
            started.stderr.close()


def test_sigterm_answers_what_was_accepted_and_a_restart_is_warm(shared_data: Path, tmp_path: Path) -> None:
    kept = {"KVBOOST_DISK_DIRECTORY": str(tmp_path)}
    with process(shared_data, **kept) as (server, url), httpx.stream("POST", f"{url}/v1/completions", json=STREAM) as s:
        events = s.iter_lines()
        assert next(events).startswith("data:")
        server.send_signal(signal.SIGTERM)
        assert [line for line in events if line][-1] == "data: [DONE]"
        assert server.wait(60) == 0
    with process(shared_data, **kept) as (server, url):
        answer = post(f"{url}/v1/completions", json={**STREAM, "stream": False, "max_tokens": 2}).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["prompt_tokens"] - 1
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


def test_metrics_and_administrators_have_ports_of_their_own(shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("open sesame\n")
    ports = ["--metrics-port", "0", "--admin-port", "0", "--admin-token-file", str(tmp_path / "token")]
    with process(shared_data, *ports, "--keep-requests", "4", "--log-format", "json") as (server, urls):
        url, metrics, admin = (u.rstrip("/") for u in urls.split(", "))
        headers = {"Authorization": "Bearer open sesame"}
        ask = {"model": "stories260K-llama", "prompt": STORY, "max_tokens": 2}
        assert post(f"{url}/v1/completions", json=ask, headers={"x-request-id": "first"}).status_code == 200
        assert "kvboost_ttft_seconds_count 1.0" in get(f"{metrics}/metrics").text
        assert get(f"{url}/metrics").status_code == get(f"{url}/admin/settings").status_code == 404
        assert get(f"{admin}/admin/settings").status_code == 401
        eventually(lambda: get(f"{admin}/admin/requests", headers=headers).json()["requests"] != [])
        assert get(f"{admin}/admin/requests/first", headers=headers).json()["tokens"]
        post(f"{admin}/admin/settings", json={"disable": True}, headers=headers).raise_for_status()
        assert post(f"{url}/v1/completions", json=ask).json()["usage"]["kvboost"]["fallback"] == "switched off"
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def test_text_behind_one_users_text_is_not_moved_to_another_unless_the_operator_says_so(shared_data: Path) -> None:
    """As `kvboost serve` comes, and with its setting for those who trust one another."""
    document = STORY + "After that they all went home and had some soup. Then Lily went to bed. "
    private = {n: f"{n} was a big boy who had a red car. He did not like to share. " * 2 for n in ("Tom", "Ben", "Sam")}

    def split(url: str, text: str, user: str) -> dict[str, int]:
        body = {"model": "stories260K-llama", "prompt": text + document, "max_tokens": 2, "user": user}
        answer = post(f"{url}/v1/completions", json={**body, "kvboost": {"gate": False}})
        return dict(answer.json()["usage"]["kvboost"])

    for environment, shared in (({}, False), ({"KVBOOST_SHARE_MOVED": "namespace"}, True)):
        with process(shared_data, **environment) as (server, url):
            assert split(url, private["Tom"], "ann")["moved"] == 0, "nobody has sent anything"
            others = split(url, private["Ben"], "bob")
            assert (others["moved"] > 0) is shared
            assert others["continued"] == 0
            assert split(url, private["Sam"], "ann")["moved"] > 0, "her own"
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0


def test_an_admin_port_without_a_token_is_refused(shared_data: Path) -> None:
    model = ["--model", str(shared_data / "models" / "stories260K-llama")]
    told = CliRunner().invoke(app, ["serve", *model, "--port", "0", "--admin-port", "0"])
    assert told.exit_code == 2
    assert "--admin-token-file" in told.stderr


def test_requests_that_take_longer_than_the_drain_are_ended_clearly(shared_data: Path) -> None:
    with process(shared_data, "--drain-s", "0") as (server, url):
        with httpx.stream("POST", f"{url}/v1/completions", json={**STREAM, "n": 8}) as stream:
            events = stream.iter_lines()
            next(events)
            server.send_signal(signal.SIGTERM)
            last = [line for line in events if line][-1]
        assert "shutting down" in last or last == "data: [DONE]"
        assert server.wait(60) == (0 if last == "data: [DONE]" else 1)


def test_port_in_use_and_bad_keys_are_told_in_one_line(shared_data: Path, tmp_path: Path) -> None:
    model = ["--model", str(shared_data / "models" / "stories260K-llama")]
    with serving(lambda *_: None) as url:
        told = CliRunner().invoke(app, ["serve", *model, "--port", url.rpartition(":")[2]])
        assert told.exit_code == 2
        assert "cannot listen" in told.stderr
    (tmp_path / "keys").write_text("nonsense")
    told = CliRunner().invoke(app, ["serve", *model, "--port", "0", "--api-keys", str(tmp_path / "keys")])
    assert told.exit_code == 2
    assert "line 1" in told.stderr


def test_connections_send_at_once() -> None:
    """Else an answer whose head and body are written apart waits for the client's delayed acknowledgement: 40 ms."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e[0]}: {e[1].splitlines()[0][:40]}")
def test_examples_of_the_page_run(
    example: tuple[str, str], documented: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # it may ask this machine
    language, code = example
    code = code.replace("http://127.0.0.1:8080", documented)
    if language == "bash":
        done = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert "[DONE]" in done.stdout
    else:
        names: dict[str, Any] = {}
        exec(compile(code, str(PAGE), "exec"), names)
        assert capsys.readouterr().out.strip()


@pytest.fixture(scope="module")
def documented(shared_data: Path) -> Iterator[str]:
    kv = stories(shared_data)
    options = ServerOptions("SmolLM2-135M-Instruct")
    with open_service(kv) as service, serving(make_app(service, kv, options)) as url:
        yield url


def test_metrics_are_exposed_where_there_are_any(shared_data: Path) -> None:
    heard: list[str] = []
    kv = stories(shared_data)
    with open_service(kv) as service:
        plain = make_app(service, kv, ServerOptions("stories"))
        telling = make_app(
            service, kv, ServerOptions("stories"),
            observe=lambda job, piece: heard.append(f"{job.request_id} {piece.finish_reason}"),
            expose=lambda accept: (b"kvboost_up 1\n", "text/plain; version=0.0.4"),
        )  # fmt: skip
        with serving(plain) as url:
            assert get(f"{url}/metrics").status_code == 404
        with serving(telling) as url:
            assert get(f"{url}/metrics").text == "kvboost_up 1\n"
            post(f"{url}/generate", json={"inputs": "x", "parameters": {"max_new_tokens": 1}},
                 headers={"x-request-id": "me"})  # fmt: skip
    eventually(lambda: heard == ["me length"])


def test_the_thread_that_loads_a_model_is_gone_afterwards_and_its_errors_are_told() -> None:
    thread = _in_passing(threading.current_thread)
    assert thread is not threading.current_thread()
    assert not thread.is_alive()

    def fail() -> None:
        raise ModelError("no such model")

    with pytest.raises(ModelError, match="no such model"):
        _in_passing(fail)
