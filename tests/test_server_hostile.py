"""What hostile clients do: they flood, they go at any byte, and they send sizes and numbers that nobody counts."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvboost.server import ServerOptions, make_app
from kvboost.server.schemas import ChatRequest, CompletionRequest, Drawing, KVBoostOptions
from kvboost.server.tgi_schemas import Parameters
from kvboost.serving.scheduler import Scheduler
from server_run import (
    STORY,
    RawReply,
    address,
    eventually,
    exchange,
    get,
    head,
    idle,
    open_service,
    post,
    serving,
    stories,
)

SLOTS = 3
MIB = 1 << 20
LARGE = "word " * 2_000_000  # ten megabytes
OWN_MEMORY = Path("/proc/self/status")


@pytest.fixture(scope="module")
def server(shared_data: Path) -> Iterator[tuple[str, Scheduler]]:
    kv = stories(shared_data)
    options = ServerOptions("stories", max_body_bytes=16 * MIB, body_timeout_s=0.5, deadline_s=60.0)
    with (
        open_service(kv, slots=SLOTS, queue=32) as service,
        serving(make_app(service, kv, options)) as url,
    ):
        yield url, service


@pytest.fixture
def client(server: tuple[str, Scheduler]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=60, verify=False) as made:
        yield made


# --- clients that go -------------------------------------------------------------------------------------------------

STREAMS: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "stories", "messages": [{"role": "user", "content": STORY}], "n": 2},
    "/v1/completions": {"model": "stories", "prompt": STORY},
    "/generate_stream": {"inputs": STORY, "parameters": {"max_new_tokens": 300}},
    "/": {"inputs": STORY, "parameters": {"max_new_tokens": 300}, "stream": True},
}


def streaming(path: str) -> bytes:
    """A request for a long stream, as it goes over the wire."""
    openai = {} if "inputs" in STREAMS[path] else {"stream": True, "max_tokens": 300, "ignore_eos": True}
    body = json.dumps({**STREAMS[path], **openai}).encode()
    return head(path, f"content-length: {len(body)}") + body


def read_until(connection: socket.socket, size: int) -> None:
    """Reads so many bytes, or to the end."""
    with suppress(OSError):
        while size > 0 and (part := connection.recv(size)):
            size -= len(part)


def test_clients_that_go_at_any_byte_leave_no_slot(server: tuple[str, Scheduler]) -> None:
    """They go while they ask or while they read, politely or by a reset; some say that nothing more will come first."""
    url, service = server
    chance = random.Random(11)
    for _ in range(60):
        data = streaming(chance.choice(list(STREAMS)))
        cut = chance.choice([chance.randrange(len(data)), len(data)])
        with socket.create_connection(address(url)) as connection:
            connection.settimeout(20)
            if chance.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            connection.sendall(data[:cut])
            if chance.random() < 0.3:
                connection.shutdown(socket.SHUT_WR)
            if cut == len(data):
                read_until(connection, chance.choice([0, 1, chance.randrange(4000)]))
    eventually(lambda: idle(service))
    with ExitStack() as stack:
        for _ in range(SLOTS):
            stack.enter_context(socket.create_connection(address(url))).sendall(streaming("/v1/completions"))
        eventually(lambda: service.stats().decoding == SLOTS)
    eventually(lambda: idle(service))


# --- bodies that are not what they seem ------------------------------------------------------------------------------


def reset_peak() -> None:
    with suppress(OSError):  # not Linux
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory that this process held since the mark was last reset; 0 where the system does not tell."""
    if not OWN_MEMORY.exists():
        return 0
    line = next(line for line in OWN_MEMORY.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def test_a_gibibyte_in_chunks_is_refused_and_never_held(server: tuple[str, Scheduler]) -> None:
    url, service = server
    chunk = b"%x\r\n" % MIB + b"x" * MIB + b"\r\n"
    heard = bytearray()

    def listen(connection: socket.socket) -> None:
        with suppress(OSError):
            while part := connection.recv(65536):
                heard.extend(part)

    reset_peak()
    before = peak_bytes()
    with socket.create_connection(address(url)) as connection:
        connection.settimeout(20)
        listener = threading.Thread(target=listen, args=[connection])
        listener.start()
        connection.sendall(head("/v1/completions", "transfer-encoding: chunked"))
        with suppress(OSError):  # it is cut off
            for sent in range(1024):
                connection.sendall(chunk)
                if sent == 64:
                    assert get(f"{url}/health").status_code == 200, "the others are still answered"
        listener.join(20)
    reply = RawReply(bytes(heard))
    assert reply.status == 413
    assert json.loads(reply.body)["error"]["code"] == "body_too_large"
    assert peak_bytes() - before < 128 * MIB
    assert idle(service)


@pytest.mark.parametrize(
    "lines",
    [
        [b"content-length: -5"],
        [b"content-length: 1e3"],
        [b"content-length: " + b"9" * 40],
        [b"content-length: 5", b"content-length: 7"],
        [b"content-length: 5, 7"],
        [b"transfer-encoding: chunked, nonsense"],
        [b"x-long: " + b"x" * 70_000],
        [b"no colon here"],
        [b"x-nul: a\0b"],
    ],
    ids=lambda lines: lines[0][:30].decode(),
)
def test_framing_that_makes_no_sense_is_a_4xx(server: tuple[str, Scheduler], lines: list[bytes]) -> None:
    start = [b"POST /v1/completions HTTP/1.1", b"host: here", b"content-type: application/json"]
    assert 400 <= exchange(server[0], b"\r\n".join([*start, *lines, b"", b'{"a":1}'])).status < 500


@pytest.mark.parametrize(
    "data",
    [b"zz\r\n{}\r\n0\r\n\r\n", b"-1\r\n{}\r\n0\r\n\r\n", b"f" * 30 + b"\r\n{}", b"ffffffffffffff\r\n{}", b"2\r\n{"],
    ids=["letters", "negative", "longer than a number", "an exbibyte", "unfinished"],
)
def test_chunks_of_absurd_size_are_a_4xx(server: tuple[str, Scheduler], data: bytes) -> None:
    reply = exchange(server[0], head("/v1/completions", "transfer-encoding: chunked") + data)
    assert 400 <= reply.status < 500


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
)
def test_what_is_no_request_is_a_4xx(server: tuple[str, Scheduler], data: bytes) -> None:
    assert 400 <= exchange(server[0], data + b"\r\n\r\n").status < 500


# --- ten megabytes in every place ------------------------------------------------------------------------------------

CHAT = {"model": "stories", "messages": [{"role": "user", "content": "Tom"}], "max_tokens": 1}
COMPLETION = {"model": "stories", "prompt": "Tom", "max_tokens": 1}
GENERATE = {"inputs": "Tom", "parameters": {"max_new_tokens": 1}}
FUNCTION = {"type": "function", "function": {"name": LARGE}}
CALL = {"id": "1", "function": {"name": LARGE, "arguments": "no JSON"}}
HEAVY: Mapping[str, tuple[str, dict[str, Any]]] = {
    "prompt": ("/v1/completions", {**COMPLETION, "prompt": LARGE}),
    "prompts": ("/v1/completions", {**COMPLETION, "prompt": [LARGE]}),
    "ids": ("/v1/completions", {**COMPLETION, "prompt": [7] * 3_000_000}),
    "message": ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": LARGE}]}),
    "messages": ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": LARGE[:2500]}] * 4000}),
    "part": (
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": LARGE}]}]},
    ),
    "tool": ("/v1/chat/completions", {**CHAT, "tools": [FUNCTION]}),
    "call": ("/v1/chat/completions", {**CHAT, "messages": [{"role": "assistant", "tool_calls": [CALL]}]}),
    "format": ("/v1/chat/completions", {**CHAT, "response_format": {"type": LARGE}}),
    "role": ("/v1/chat/completions", {**CHAT, "messages": [{"role": LARGE, "content": "x"}]}),
    "model": ("/v1/completions", {**COMPLETION, "model": LARGE}),
    "field": ("/v1/completions", {**COMPLETION, LARGE: 1}),
    "salt": ("/v1/completions", {**COMPLETION, "cache_salt": LARGE}),
    "user": ("/v1/completions", {**COMPLETION, "user": LARGE}),
    "stop": ("/v1/completions", {**COMPLETION, "stop": [LARGE]}),
    "biases": ("/v1/completions", {**COMPLETION, "logit_bias": {str(i): 1 for i in range(700_000)}}),
    "bias": ("/v1/completions", {**COMPLETION, "logit_bias": {LARGE: "x"}}),
    "option": ("/v1/completions", {**COMPLETION, "kvboost": {LARGE: 1}}),
    "inputs": ("/generate", {**GENERATE, "inputs": LARGE}),
    "parameter": ("/generate", {**GENERATE, "parameters": {LARGE: 1}}),
    "stream": ("/generate_stream", {**GENERATE, "inputs": LARGE}),
}


@pytest.mark.parametrize("case", HEAVY)
def test_ten_megabytes_anywhere_are_refused_in_a_few_words(server: tuple[str, Scheduler], case: str) -> None:
    path, body = HEAVY[case]
    answer = post(server[0] + path, json=body)
    assert 400 <= answer.status_code < 500
    assert 10 < len(answer.content) < 2000
    assert answer.json()["error"]


def test_ten_megabytes_of_which_the_end_is_wanted_are_answered(server: tuple[str, Scheduler]) -> None:
    answer = post(
        f"{server[0]}/generate", json={**GENERATE, "inputs": LARGE, "parameters": {"max_new_tokens": 1, "truncate": 9}}
    )
    assert answer.status_code == 200


MANY = 300_000
SWARMS: Mapping[str, tuple[str, dict[str, Any]]] = {  # of wrong items, each of which would be an error of its own
    "prompt": ("/v1/completions", {**COMPLETION, "prompt": [1.5] * MANY}),
    "prompt, the last": ("/v1/completions", {**COMPLETION, "prompt": [*[7] * MANY, "x"]}),
    "prompts": ("/v1/completions", {**COMPLETION, "prompt": [["x"] * MANY]}),
    "stop": ("/v1/completions", {**COMPLETION, "stop": [1] * MANY}),
    "fields": ("/v1/completions", {**COMPLETION, **{f"f{i}": 1 for i in range(MANY)}}),
    "options": ("/v1/completions", {**COMPLETION, "kvboost": {f"f{i}": 1 for i in range(MANY)}}),
    "biases": ("/v1/completions", {**COMPLETION, "logit_bias": {str(i): "x" for i in range(MANY)}}),
    "messages": ("/v1/chat/completions", {**CHAT, "messages": [1] * MANY}),
    "parts": ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [1] * MANY}]}),
    "calls": ("/v1/chat/completions", {**CHAT, "messages": [{"role": "assistant", "tool_calls": [1] * MANY}]}),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": [1] * MANY}),
    "parameters": ("/generate", {**GENERATE, "parameters": {f"f{i}": 1 for i in range(MANY)}}),
}


@pytest.mark.parametrize("case", SWARMS)
def test_very_many_mistakes_are_told_as_one_and_cost_no_more(server: tuple[str, Scheduler], case: str) -> None:
    path, body = SWARMS[case]
    data = json.dumps(body).encode()
    reset_peak()
    before = peak_bytes()
    answer = post(server[0] + path, content=data, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert 10 < len(answer.content) < 2000
    assert peak_bytes() - before < 256 * MIB


# --- numbers, and what is no text ------------------------------------------------------------------------------------

NUMBERS = (-1, -(2**63), 2**63, 10**40, -1e300, 1e300, 5e-324, 0.5, True)
ABSURD = (10**40, -1e300)  # no field takes them ...
UNBOUNDED = "risk_bound"  # ... but this one


def numeric(model: Any) -> list[str]:
    """The fields that take a number."""
    found = []
    for name, schema in model.model_json_schema()["properties"].items():
        kinds = {schema.get("type"), *(option.get("type") for option in schema.get("anyOf", ()))}
        if kinds & {"integer", "number"}:
            found.append(name)
    return found


def nested(outer: str) -> Any:
    return lambda field, number: {outer: {field: number}}


PLACES: Mapping[str, tuple[str, dict[str, Any], Any, Any]] = {
    "chat": ("/v1/chat/completions", CHAT, ChatRequest, lambda field, number: {field: number}),
    "completion": ("/v1/completions", COMPLETION, CompletionRequest, lambda field, number: {field: number}),
    "options": ("/v1/completions", COMPLETION, KVBoostOptions, nested("kvboost")),
    "parameters": ("/generate", {"inputs": "Tom"}, Parameters, nested("parameters")),
}


@pytest.mark.parametrize("place", PLACES)
def test_negative_and_huge_numbers_are_taken_or_refused_by_name(client: httpx.Client, place: str) -> None:
    path, body, model, asked = PLACES[place]
    fields = [
        f for f in numeric(model) if place != "chat" or f not in numeric(Drawing)
    ]  # the rest are completion's too
    assert len(fields) >= 2
    for field in fields:
        for number in NUMBERS:
            more = asked(field, number)
            if path == "/generate":
                more["parameters"].setdefault("max_new_tokens", 1)
            answer = client.post(
                path, content=json.dumps({**body, **more}), headers={"content-type": "application/json"}
            )
            assert answer.status_code in (200, 400, 422), (field, number, answer.text)
            assert answer.status_code != 200 or number not in ABSURD or field == UNBOUNDED, (field, number)
            assert answer.status_code == 200 or field in answer.text, (field, number, answer.text)


@pytest.mark.parametrize("temperature", [5e-324, 1e-39, 1e-6, 2.0])
def test_the_smallest_temperature_is_greedy_and_none_breaks_drawing(client: httpx.Client, temperature: float) -> None:
    """Over such a number logits are no longer finite."""

    def text(**more: Any) -> str:
        asked = {**COMPLETION, "prompt": STORY, "max_tokens": 8, "seed": 1, "repetition_penalty": 0.01, **more}
        answer = client.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    assert text(temperature=temperature) == text(temperature=0) or temperature > 1


@pytest.mark.parametrize("ids", [[-1], [512], [2**31], [2**63], [10**40], [1.5], [[-1]], [[2**70]]], ids=str)
def test_token_ids_that_are_none_are_refused(client: httpx.Client, ids: list[Any]) -> None:
    answer = client.post("/v1/completions", json={**COMPLETION, "prompt": ids})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prompt")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"x-request-timeout-s: nan", 400),
        (b"x-request-timeout-s: -1", 400),
        (b"x-request-timeout-s: 1e400", 400),
        (b"x-request-timeout-s: \xff", 400),
        (b"x-request-id: \xff\xfe", 400),
        (b"x-request-id: " + b"x" * 200, 400),
        (b"x-kvboost-fidelity: \xff", 400),
        (b"x-kvboost-enabled: \xff", 400),
        (b"x-kvboost-session: " + b"x" * 300, 400),
        (b"x-kvboost-session: \xff\xfe", 200),  # any bytes name a session
        (b"authorization: Bearer \xff\xfe", 200),  # there are no keys here
    ],
)
def test_headers_of_any_bytes_are_taken_or_refused(server: tuple[str, Scheduler], line: bytes, status: int) -> None:
    body = json.dumps(COMPLETION).encode()
    start = head("/v1/completions", f"content-length: {len(body)}").removesuffix(b"\r\n")
    assert exchange(server[0], start + line + b"\r\n\r\n" + body).status == status


@pytest.mark.parametrize(
    "path", ["/v1/models/%ff%fe", "/v1/models/%00", "/%f0%28%8c%28", "/v1/models/..%2f..%2fetc", "/x?%ff=%fe"]
)
def test_paths_of_any_bytes_are_not_found(server: tuple[str, Scheduler], path: str) -> None:
    reply = exchange(server[0], f"GET {path} HTTP/1.1\r\nhost: here\r\n\r\n".encode())
    assert reply.status == 404


# --- the tool that looks for edges -----------------------------------------------------------------------------------

HOOK = '''
import schemathesis

@schemathesis.hook
def before_call(context, case, kwargs):
    """Requests get the model's name, to come further."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "stories"
'''


def test_the_edges_of_the_schema_as_schemathesis_finds_them_are_no_5xx(shared_data: Path, tmp_path: Path) -> None:
    """Its own phase of boundary values; random requests are in `test_server_limits`."""
    (tmp_path / "hooks.py").write_text(HOOK)
    kv = stories(shared_data)
    with (
        open_service(kv, slots=SLOTS) as service,
        serving(make_app(service, kv, ServerOptions("stories", max_new_tokens=2, deadline_s=20.0))) as url,
    ):
        options = ["--phases", "examples,coverage", "--checks", "not_a_server_error", "--seed", "1"]
        options += ["--generation-database", "none", "--continue-on-failure", "--no-color", "--workers", "3"]
        options += ["--exclude-path", "/", "--exclude-path", "/generate_stream"]  # they take what /generate does
        told = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", *options],
            env={**os.environ, "SCHEMATHESIS_HOOKS": str(tmp_path / "hooks.py")},
            cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert told.returncode == 0, told.stdout + told.stderr
        assert "Coverage" in told.stdout
        eventually(lambda: idle(service))
        assert sum(service.stats().finished.values()) > 50, "few of its requests reached the model"
