"""What a server on the open net meets: bodies of any size and kind, strangers, crowds, clients that go."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from blake3 import blake3

from kvboost import KVBoost
from kvboost.errors import SettingsError
from kvboost.hf.prefill import model_lock
from kvboost.server import ServerOptions, make_app
from kvboost.server.running import Run
from kvboost.server.tenants import Caller, Namespaces, read_keys
from kvboost.serving import Job, Piece, Sampling
from kvboost.serving.job import FinishReason
from kvboost.serving.scheduler import Scheduler
from server_run import STORY, address, eventually, exchange, get, head, idle, open_service, post, serving, stories

KEYS = {"ann": "key-of-ann", "bob": "key-of-bob"}
JSON = {"content-type": "application/json"}


@contextmanager
def running(shared_data: Path, *, slots: int = 4, queue: int = 16, **options: Any) -> Iterator[tuple[str, Scheduler]]:
    kv = stories(shared_data)
    with (
        open_service(kv, slots=slots, queue=queue) as service,
        serving(make_app(service, kv, ServerOptions("stories", **options))) as url,
    ):
        yield url, service


@pytest.fixture(scope="module")
def server(shared_data: Path) -> Iterator[tuple[str, Scheduler]]:
    with running(shared_data, max_body_bytes=1 << 20, body_timeout_s=0.5) as started:
        yield started


def ask(url: str, text: str = STORY, *, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    body = {"model": "stories", "prompt": text, "max_tokens": 2, "temperature": 0, **more}
    return post(f"{url}/v1/completions", json=body, headers=headers)


def bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_huge_body_is_refused_before_it_is_sent(server: tuple[str, Scheduler]) -> None:
    for path in ("/v1/chat/completions", "/generate"):
        reply = exchange(server[0], head(path, f"content-length: {1 << 30}"))
        assert reply.status == 413
        assert b"1048576" in reply.body
        assert reply.headers["connection"] == "close"


def test_client_that_sends_all_of_a_huge_body_still_reads_why(server: tuple[str, Scheduler]) -> None:
    body = b"x" * (48 << 20)
    assert exchange(server[0], head("/v1/completions", f"content-length: {len(body)}") + body).status == 413


def test_body_of_unknown_length_is_read_up_to_the_limit(server: tuple[str, Scheduler]) -> None:
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    reply = exchange(server[0], head("/v1/completions", "transfer-encoding: chunked") + chunk * 17)
    assert reply.status == 413


def test_body_that_does_not_come_is_not_waited_for(server: tuple[str, Scheduler]) -> None:
    assert exchange(server[0], head("/v1/completions", "content-length: 100") + b"{").status == 408


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"model": "stories", "prompt": "\xff\xfe"}',
        b'{"model": "stories", "prompt": "\\ud800"}',
        b'{"model": "stories", "prompt": "x", "\\udfff": 1}',
        b'{"model": "stories", "prompt": "x", "user": "\\ud800"}',
        b'{"model": "stories", "prompt": "x", "temperature": NaN}',
        b'{"model": "stories", "prompt": "x", "temperature": -Infinity}',
        b'{"model": "stories", "prompt": "x", "max_tokens": -1}',
        b'{"model": "stories", "prompt": "x", "max_tokens": 1e400}',
        b'{"model": "stories", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "stories", "prompt": [' + b"9" * 4000 + b"]}",
        b'{"model": "stories", "prompt": ' + b"[" * 50000 + b"]" * 50000 + b"}",
        b'{"model": "stories", "prompt": "x", "logit_bias": {"-1": 1}}',
    ],
    ids=lambda body: body[:60].decode("latin-1"),
)
def test_malformed_body_is_a_clear_error_in_either_shape(server: tuple[str, Scheduler], body: bytes) -> None:
    answer = post(f"{server[0]}/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    body = body.replace(b'"prompt"', b'"inputs"').replace(b'"model": "stories", ', b"")
    answer = post(f"{server[0]}/generate", content=body, headers=JSON)
    assert answer.status_code == 422
    assert answer.json()["error_type"] == "validation"


def test_wrong_content_type_path_and_method(server: tuple[str, Scheduler]) -> None:
    answer = post(f"{server[0]}/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert "content-type: application/json" in answer.json()["error"]["message"]
    assert get(f"{server[0]}/v1/nothing").json()["error"]["message"]
    assert get(f"{server[0]}/v1/completions").status_code == 405


def test_prompt_of_ten_megabytes_is_refused_with_the_numbers(shared_data: Path) -> None:
    with running(shared_data, max_body_bytes=16 << 20) as (url, _):
        answer = ask(url, "word " * 2_000_000)
        assert answer.status_code == 400
        assert "10000000 characters" in answer.json()["error"]["message"]
        assert "512" in answer.json()["error"]["message"]


# --- tenants ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    lines = ["# tenant  hash", f"ann sha256:{hashlib.sha256(KEYS['ann'].encode()).hexdigest()}"]
    path = tmp_path / "keys"
    path.write_text("\n".join([*lines, f"bob blake3:{blake3(KEYS['bob'].encode()).hexdigest()}", ""]))
    return path


def test_strangers_are_refused_before_their_body_is_looked_at(shared_data: Path, keys_file: Path) -> None:
    with running(shared_data, api_keys=keys_file) as (url, _):
        assert exchange(url, head("/v1/completions", f"content-length: {1 << 30}")).status == 401
        for wrong in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": KEYS["ann"]},
            {"authorization": "Bearer"},
        ):
            answer = ask(url, headers=wrong)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert get(f"{url}/v1/models", headers=wrong).status_code == 401
            assert post(f"{url}/generate", headers=wrong, json={}).json()["error_type"] == "authentication"
        assert get(f"{url}/health").status_code == get(f"{url}/ready").status_code == 200
        assert ask(url, headers=bearer("ann")).status_code == ask(url, headers=bearer("bob")).status_code == 200


def test_tenants_never_see_each_others_cache(shared_data: Path, keys_file: Path) -> None:
    """Random traffic over a few texts: what a tenant is told to be cached is what that tenant sent before."""
    chance = random.Random(5)
    texts = [f"{name} had a {thing}. " + STORY for name in ("Tom", "Sue") for thing in ("dog", "hat")]
    with running(shared_data, api_keys=keys_file) as (url, _):
        sent: set[tuple[str, str, str]] = set()
        for _ in range(40):
            who, salt, text = chance.choice(list(KEYS)), chance.choice(["", "a", "b"]), chance.choice(texts)
            more = {"cache_salt": salt} if salt else {}
            answer = ask(url, text, headers=bearer(who), **more)
            if (who, salt, text) in sent:
                assert cached(answer) == answer.json()["usage"]["prompt_tokens"] - 1
            elif not any((w, s) == (who, salt) for w, s, _ in sent):
                assert cached(answer) == 0
                assert answer.json()["usage"]["kvboost"]["fresh"] == answer.json()["usage"]["prompt_tokens"]
            sent.add((who, salt, text))


def test_keys_are_read_again_when_their_file_changes(shared_data: Path, keys_file: Path) -> None:
    with running(shared_data, api_keys=keys_file) as (url, _):
        assert ask(url, headers=bearer("bob")).status_code == 200
        swap(keys_file, keys_file.read_text().split("bob")[0])
        assert ask(url, headers=bearer("bob")).status_code == 401
        swap(keys_file, "no key at all\n")
        assert ask(url, headers=bearer("ann")).status_code == 200  # a bad file changes nothing
        keys_file.unlink()
        assert ask(url, headers=bearer("ann")).status_code == 200


def swap(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_bad_keys_file_stops_the_start_and_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# fine\nann md5:1234\n")
    with pytest.raises(SettingsError, match="line 2"):
        read_keys(path)
    with pytest.raises(SettingsError, match="absent"):
        read_keys(tmp_path / "absent")


def test_namespaces_cannot_be_made_to_meet() -> None:
    names = Namespaces("secret", "")
    salts = [names.salt(Caller(t), s) for t in ("", "a", "ab") for s in ("", "b", "bc", "a")]
    assert len(set(salts)) == len(salts)
    assert Namespaces("secret", "base").salt(Caller(), None) == "base"  # as the library's own
    assert Namespaces("other", "").salt(Caller("a"), "b") != names.salt(Caller("a"), "b")
    one = [names.session(Caller("a", "k"), s, u) for s, u in ((None, None), ("x", None), (None, "x"), ("k", None))]
    assert len(set(one)) == 4
    assert names.session(Caller("b", "k"), "x", None) != names.session(Caller("a", "k"), "x", None)
    assert names.session(Caller(), None, None)  # nobody in particular is one session too, not a new one each time


def test_text_behind_one_users_text_is_not_moved_to_another(shared_data: Path) -> None:
    """One namespace, two users: what stood behind the first one's own words does not reach the second."""
    document = STORY + "After that they all went home and had some soup. Then Lily went to bed. "
    heads = [
        f"{name} was a big boy who had a red car. He did not like to share. " * 2 for name in ("Tom", "Ben", "Sam")
    ]
    kv = stories(shared_data, share_moved="session", gate=False)
    with open_service(kv) as service, serving(make_app(service, kv, ServerOptions("stories"))) as url:

        def moved(text: str, **more: Any) -> int:
            return int(ask(url, text, **more).json()["usage"]["kvboost"]["moved"])

        for told in ({"user": "{}"}, {"headers": {"x-kvboost-session": "{}"}}):
            kv.invalidate()
            one, two = (json.loads(json.dumps(told).replace("{}", name)) for name in ("ann", "bob"))
            assert moved(heads[0] + document, **one) == 0
            assert moved(heads[1] + document, **two) == 0
            assert moved(heads[2] + document, **one) > 0


# --- crowds -----------------------------------------------------------------------------------------------------------


def test_full_queue_is_a_429_and_draining_a_503(shared_data: Path) -> None:
    with running(shared_data, slots=1, queue=1) as (url, service), ThreadPoolExecutor(2) as crowd:
        with model_lock(service.engine.model):  # nothing moves
            first = crowd.submit(ask, url)
            eventually(lambda: service.stats().prefilling == 1)
            second = crowd.submit(ask, url)
            eventually(lambda: service.stats().queued == 1)
            refused = ask(url)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert post(f"{url}/generate", json={"inputs": "x"}).json()["error_type"] == "overloaded"
        assert first.result().status_code == second.result().status_code == 200
        service.close()
        assert get(f"{url}/ready").status_code == 503
        assert get(f"{url}/health").status_code == 200
        late = ask(url)
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "draining"
        assert int(late.headers["retry-after"]) >= 1


def test_a_request_that_waited_tells_the_settings_that_served_it(shared_data: Path) -> None:
    document = STORY + "After that they all went home and had some soup. Then Lily went to bed. "
    heads = [f"{name} was a big boy who had a red car. He did not like to share. " * 2 for name in ("Tom", "Ben")]
    kv = stories(shared_data, gate=False)
    with (
        open_service(kv, slots=1) as service,
        serving(make_app(service, kv, ServerOptions("stories"))) as url,
        ThreadPoolExecutor(2) as crowd,
    ):
        ask(url, heads[0] + document)
        with model_lock(kv.model):
            crowd.submit(ask, url)
            eventually(lambda: service.stats().prefilling == 1)
            waiting = crowd.submit(ask, url, heads[1] + document)
            eventually(lambda: service.stats().queued == 1)
            kv.live.set({"recompute_strategy": "none"})
        told = waiting.result().json()["usage"]["kvboost"]
    assert told["moved"] > 0
    assert told["strategy"] == "none"
    assert told["repaired"] == 0


def test_choices_of_a_refused_request_do_not_stay_in_the_queue(shared_data: Path) -> None:
    with running(shared_data, slots=1, queue=2) as (url, service):
        with model_lock(service.engine.model):
            assert ask(url, n=8).status_code == 429
        eventually(lambda: idle(service))
        assert ask(url, n=2).status_code == 200


def test_deadline_is_a_504_and_frees_the_slot(server: tuple[str, Scheduler]) -> None:
    url, service = server
    for more in ({}, {"stream": True}):
        late = ask(url, headers={"x-request-timeout-s": "0.00001"}, **more)
        assert late.status_code == 504
        assert late.headers["x-should-retry"] == "false"
        assert late.json()["error"]["code"] == "deadline"
    eventually(lambda: idle(service))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_client_that_goes_while_it_waits_leaves_nothing(server: tuple[str, Scheduler], stream: bool, n: int) -> None:
    url, service = server
    before = service.stats().finished.get("cancelled", 0)
    body = json.dumps({"model": "stories", "prompt": STORY, "max_tokens": 300, "n": n, "stream": stream}).encode()
    with model_lock(service.engine.model), socket.create_connection(address(url)) as connection:
        connection.sendall(head("/v1/completions", f"content-length: {len(body)}") + body)
        eventually(lambda: not idle(service))
    eventually(lambda: idle(service))
    assert service.stats().finished["cancelled"] - before == n


def test_every_job_of_a_request_is_closed_by_hand() -> None:
    """The service also notices streams that are dropped; the server does not count on that."""
    closed: list[int] = []

    async def says(number: int) -> AsyncIterator[Piece]:
        try:
            yield Piece("a")
            await asyncio.sleep(60)
        finally:
            closed.append(number)

    async def cut() -> None:
        run = Run(2)
        streams = [says(n) for n in range(3)]  # held, so that nothing is dropped
        for n, stream in enumerate(streams):
            run.add(Job(str(n), (1, 2), Sampling(1)), stream)
        pieces = run.pieces()
        await anext(pieces)
        await asyncio.sleep(0.01)
        await pieces.aclose()
        assert sorted(closed) == [0, 1, 2]

    asyncio.run(cut())


def test_a_client_that_goes_is_told_of() -> None:
    """Otherwise a request that was begun would have no line in the log."""
    ended: list[tuple[str, str | None]] = []

    async def says(text: str, reason: FinishReason | None = None) -> AsyncIterator[Piece]:
        yield Piece(text, finish_reason=reason)
        await asyncio.sleep(60)

    async def cut(how: str) -> None:
        run = Run(2, lambda job, piece: ended.append((job.request_id, piece.finish_reason)))
        run.add(Job(f"{how} done", (1, 2), Sampling(1)), says("a", "eos"))
        run.add(Job(f"{how} begun", (1, 2), Sampling(1)), says("b"))
        if how == "stream":
            pieces = run.pieces()
            await anext(pieces)
            await anext(pieces)
            await pieces.aclose()
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(run.finish(), 0.05)

    for how in ("stream", "whole"):
        ended.clear()
        asyncio.run(cut(how))
        assert sorted(ended) == [(f"{how} begun", "cancelled"), (f"{how} done", "eos")]


def test_streams_cut_anywhere_leave_nothing(server: tuple[str, Scheduler]) -> None:
    url, service = server
    chance = random.Random(3)
    for path, asked in (
        ("/v1/chat/completions", {"model": "stories", "messages": [{"role": "user", "content": STORY}], "n": 2}),
        ("/v1/completions", {"model": "stories", "prompt": STORY}),
        ("/generate_stream", {"inputs": STORY, "parameters": {"max_new_tokens": 300}}),
    ):
        own = {} if "parameters" in asked else {"stream": True, "max_tokens": 300, "ignore_eos": True}
        body = json.dumps({**asked, **own}).encode()
        for _ in range(8):
            with ExitStack() as stack:
                for _ in range(2):
                    connection = stack.enter_context(socket.create_connection(address(url)))
                    connection.sendall(head(path, f"content-length: {len(body)}") + body)
                    connection.settimeout(20)
                    assert connection.recv(chance.randrange(1, 4000))
    eventually(lambda: idle(service))
    assert ask(url).status_code == 200


# --- anything ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of schemathesis' own dependencies
def test_no_request_that_the_schema_allows_or_forbids_is_a_5xx(shared_data: Path) -> None:
    with running(shared_data, max_new_tokens=4, deadline_s=20.0) as (url, service):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        assert {op.path for op in operations} >= {"/v1/chat/completions", "/v1/completions", "/generate", "/"}
        for operation in operations:
            probe(operation, url)
        eventually(lambda: idle(service))
        assert get(f"{url}/ready").status_code == 200


def probe(operation: Any, url: str) -> None:
    """Requests that fit the schema, and such that do not. They get the model's name, to come further."""
    modes = schemathesis.GenerationMode
    for mode in (modes.POSITIVE, modes.NEGATIVE):
        strategy = operation.as_strategy(generation_mode=mode)

        @hypothesis.settings(
            max_examples=12, derandomize=True, deadline=None, database=None,
            suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
        )  # fmt: skip
        @hypothesis.given(case=strategy)
        def send(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = "stories"
            answer = case.call(base_url=url)
            assert answer.status_code < 500, (operation.label, case.body, answer.text)

        try:
            send()
        except hypothesis.errors.Unsatisfiable:
            assert mode is modes.NEGATIVE, operation.label  # nothing can be wrong with a request that has no parts


def test_server_without_keys_says_so(shared_data: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv: KVBoost = stories(shared_data)
    with open_service(kv) as service:
        make_app(service, kv, ServerOptions("stories"))
    assert "everybody is one tenant" in caplog.text
