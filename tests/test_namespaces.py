"""What one namespace has cached no other one sees: not in what it is served, nor told, nor in how it is refused."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvboost import KVBoost
from kvboost.cli.serve import Admin, Listening, _apps
from kvboost.server import ServerOptions, make_app
from kvboost.server.tenants import Namespaces
from kvboost.serving import Job, Piece
from kvboost.types import ChunkHeader, Kind, ReusePlan
from scenario import SMALL
from server_run import STORY, get, open_service, post, serving, stories

TEXTS = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends.",
    "One day, a big dog came and took the ball away. Lily was sad, and her mom gave her a new red ball to play with.",
    "Tom had a blue car and a green hat. He did not like to share, but then he saw that his friend was very sad.",
    "The cat sat on the mat and looked at the moon. It was cold outside, so she went home and had some warm soup.",
)
KINDS = ("completion", "completion stream", "chat", "chat stream", "generate", "generate stream", "too long", "unknown")
NEW_TOKENS = 2
TENANTS = 4096  # a namespace of its own for everybody in every run
PAGES = (
    "/v1/models", "/v1/models/stories", "/v1/models/other", "/info", "/health", "/ready", "/metrics", "/openapi.json",
)  # fmt: skip
VOLATILE = re.compile(r'"created":\d+|"risk":[^,}]+')


@dataclass(frozen=True)
class Step:
    """One request. `tenant` counts the tenants of one run."""

    texts: tuple[int, ...]
    kind: str = "completion"
    tenant: int = 0
    salt: str | None = None
    session: str | None = None
    gate: bool = True
    site: int = 0

    @property
    def namespace(self) -> tuple[int, str | None]:
        return self.tenant, self.salt


@dataclass
class Site:
    """A server, and what it did for each request id."""

    url: str
    kv: KVBoost
    heard: dict[str, tuple[Job, Piece]] = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """All that a client learns, without what differs from request to request anyway."""

    status: int
    headers: frozenset[str]
    body: str


def key_of(tenant: int) -> str:
    return f"key-of-tenant-{tenant}"


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    lines = [f"t{n} sha256:{hashlib.sha256(key_of(n).encode()).hexdigest()}" for n in range(TENANTS)]
    path.write_text("\n".join(lines))
    return path


@contextmanager
def site(shared_data: Path, keys_file: Path, **flags: Any) -> Iterator[Site]:
    heard: dict[str, tuple[Job, Piece]] = {}
    with ExitStack() as stack:
        kv = stack.enter_context(stories(shared_data, **{**SMALL, "share_moved": "session", **flags}))
        service = stack.enter_context(open_service(kv, slots=4))
        options = ServerOptions("stories", api_keys=keys_file)
        app = make_app(service, kv, options, observe=lambda job, last: heard.update({job.request_id: (job, last)}))
        yield Site(stack.enter_context(serving(app)), kv, heard)


@pytest.fixture(scope="module")
def sites(shared_data: Path, keys_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Site]]:
    """Two servers, each with memory of its own, over one directory."""
    shared = str(tmp_path_factory.mktemp("shared"))
    with ExitStack() as stack:
        yield [stack.enter_context(site(shared_data, keys_file, disk_directory=shared)) for _ in range(2)]


tenants = count()
steps = st.builds(
    Step,
    texts=st.lists(st.sampled_from(range(len(TEXTS))), min_size=1, max_size=3).map(tuple),
    kind=st.sampled_from(KINDS),
    tenant=st.sampled_from([0, 1]),
    salt=st.sampled_from([None, "a"]),
    session=st.sampled_from([None, "x", "y"]),
    gate=st.booleans(),
    site=st.sampled_from([0, 1]),
)


# --- the model of what may happen ------------------------------------------------------------------------------------


@dataclass
class Books:
    """Who sent what, and who wrote which record."""

    sent: dict[tuple[int, str | None], list[str]] = field(default_factory=dict)
    writers: dict[bytes, tuple[int, str | None]] = field(default_factory=dict)

    def check(self, step: Step, ids: Sequence[int], plan: ReusePlan) -> None:
        """Rows come from records of the namespace alone, and stand for tokens that it sent itself."""
        own = self.sent.get(step.namespace, [])
        for s in plan:
            if s.kind is Kind.FRESH or s.record_id is None:
                continue
            assert self.writers.get(s.record_id) == step.namespace, "rows of another namespace"
            certain = ids[
                s.span.start : max(s.span.start, s.span.stop - NEW_TOKENS)
            ]  # the last ones may have been generated
            assert not certain or any(spelled(certain) in text for text in own), (
                "rows of text that the namespace never sent"
            )

    def add(self, step: Step, ids: Sequence[int], stored: Mapping[bytes, ChunkHeader]) -> None:
        self.sent.setdefault(step.namespace, []).append(spelled(ids))
        for record_id in stored.keys() - self.writers.keys():
            self.writers[record_id] = step.namespace
        for header in stored.values():
            if header.source is not None and header.source.record_id in self.writers:
                assert self.writers[header.source.record_id] == self.writers[header.record_id], "a link across"


def spelled(ids: Sequence[int]) -> str:
    return f" {' '.join(map(str, ids))} "


def stored(sites: Sequence[Site]) -> dict[bytes, ChunkHeader]:
    """Every record in every tier of every server, once all is written."""
    found = {}
    for s in sites:
        assert s.kv.flush()
        for tier in s.kv.store.tiers:
            listed = list(tier.records())  # type: ignore[attr-defined]
            found.update({r.record_id: r.header for r in listed if r.header is not None})
    return found


def request_of(step: Step) -> tuple[str, dict[str, Any]]:
    text, stream = " ".join(TEXTS[i] for i in step.texts), step.kind.endswith("stream")
    more: dict[str, Any] = {"kvboost": {"gate": step.gate}}
    if step.salt is not None:
        more["cache_salt"] = step.salt
    if step.kind.startswith("generate"):
        path = "/generate_stream" if stream else "/generate"
        return path, {"inputs": text, "parameters": {"max_new_tokens": NEW_TOKENS}, **more}
    body = {"model": "stories", "max_tokens": NEW_TOKENS, "temperature": 0, "stream": stream, **more}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if step.kind == "too long":
        body["max_tokens"] = 510
    if step.kind == "unknown":
        body["nonsense"] = 1
    if step.kind.startswith("chat"):
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}
    return "/v1/completions", {**body, "prompt": text}


def ask(at: Site, step: Step, key: str, request_id: str) -> httpx.Response:
    path, body = request_of(step)
    headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
    if step.session is not None:
        headers["x-kvboost-session"] = step.session
    return post(at.url + path, json=body, headers=headers)


def play(traffic: Sequence[Step], sites: Sequence[Site]) -> list[Told]:
    """Sends everything, one after the other, by tenants of its own; checks each request against the books."""
    for s in sites:
        s.kv.forget()
    keys = {tenant: key_of(next(tenants)) for tenant in {step.tenant for step in traffic}}
    books, told = Books(), []
    for number, step in enumerate(traffic):
        at, name = sites[step.site], f"request-{number}"
        answer = ask(at, step, keys[step.tenant], name)
        body = VOLATILE.sub("", answer.text).replace(name, "")
        told.append(Told(answer.status_code, frozenset(answer.headers), body))
        job, last = at.heard.pop(name, (None, None))
        assert (job is None) == (step.kind in ("too long", "unknown")) == (answer.status_code == 400), answer.text
        if job is None or last is None or last.plan is None:
            continue
        books.check(step, job.input_ids, last.plan)
        books.add(step, job.input_ids, stored(sites))
    return told


def check(traffic: Sequence[Step], sites: Sequence[Site]) -> None:
    """Nothing crosses, and everybody hears what they would hear if they were alone."""
    together = play(traffic, sites)
    for namespace in dict.fromkeys(step.namespace for step in traffic):
        own = [(s, t) for s, t in zip(traffic, together, strict=True) if s.namespace == namespace]
        assert play([s for s, _ in own], sites) == [t for _, t in own], "others show in what a namespace is told"


# --- random traffic --------------------------------------------------------------------------------------------------

quick = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@given(traffic=st.lists(steps, min_size=2, max_size=8))
@settings(quick, max_examples=25)
def test_no_namespace_is_served_or_told_what_another_one_has_cached(sites: list[Site], traffic: list[Step]) -> None:
    check(traffic, sites)


@given(traffic=st.lists(steps, min_size=8, max_size=14))
@settings(quick, max_examples=6)
def test_nor_where_memory_is_short(cramped: list[Site], traffic: list[Step]) -> None:
    play([replace(step, site=0) for step in traffic], cramped)


@pytest.fixture(scope="module")
def cramped(shared_data: Path, keys_file: Path) -> Iterator[list[Site]]:
    """A server that evicts what it has not room for."""
    with site(shared_data, keys_file, cache_bytes=600_000) as made:
        yield [made]
        assert made.kv.store.stats().evictions["importance_low"] > 0, "the test's memory is not short"


def test_a_namespace_finds_its_own_text_again_on_either_server(sites: list[Site]) -> None:
    """The positive control of the property: there is something to see."""
    told = play([Step((0, 1)), Step((0, 1), site=1), Step((2, 0, 1), gate=False)], sites)
    reused = [int(re.findall(r'"cached_tokens":(\d+)', t.body)[0]) for t in told]
    size = int(re.findall(r'"prompt_tokens":(\d+)', told[0].body)[0])
    assert reused[0] == 0
    assert reused[1] == size - 1
    assert reused[2] > 16


@pytest.mark.parametrize("step", [Step((0, 1), tenant=1), Step((0, 1), salt="a")], ids=["tenant", "salt"])
def test_the_property_notices_namespaces_that_meet(
    sites: list[Site], step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    check([Step((0, 1)), step], sites)
    monkeypatch.setattr(Namespaces, "salt", lambda *_: "one for all")
    with pytest.raises(AssertionError, match="another namespace"):
        check([Step((0, 1)), step], sites)


# --- at the same time, and after a restart ---------------------------------------------------------------------------


def test_equal_prompts_of_many_tenants_at_once_are_computed_by_each(sites: list[Site]) -> None:
    keys = [key_of(next(tenants)) for _ in range(6)]

    def fresh(name: str) -> list[int]:
        with ThreadPoolExecutor(len(keys)) as crowd:
            answers = crowd.map(lambda key: ask(sites[0], Step((3, 1)), key, f"{name}-{key}"), keys)
            return [a.json()["usage"]["kvboost"]["fresh"] for a in answers]

    first = fresh("first")
    assert min(first) > 50
    assert len(set(first)) == 1
    assert fresh("second") == [1] * len(keys)


def test_a_restart_on_the_same_directory_keeps_namespaces_apart(
    shared_data: Path, keys_file: Path, tmp_path: Path
) -> None:
    ann, bob = key_of(next(tenants)), key_of(next(tenants))
    step = Step((0, 2))
    with site(shared_data, keys_file, disk_directory=str(tmp_path)) as before:
        ask(before, step, ann, "before")
    with site(shared_data, keys_file, disk_directory=str(tmp_path)) as after:
        split = {
            name: ask(after, asked, key, "after").json()["usage"]["kvboost"]
            for name, asked, key in (
                ("bob", step, bob),
                ("ann, salted", Step((0, 2), salt="a"), ann),
                ("ann", step, ann),
            )
        }
        assert after.heard["after"][1].report is not None
        assert after.heard["after"][1].report.bytes_by_tier.keys() == {"disk"}
    assert split["ann"]["exact"] > 50
    for stranger in ("bob", "ann, salted"):
        assert split[stranger]["exact"] == split[stranger]["moved"] == split[stranger]["continued"] == 0


# --- what else a tenant can read -------------------------------------------------------------------------------------


def test_no_page_changes_with_what_others_have_cached(sites: list[Site]) -> None:
    ann, bob = key_of(next(tenants)), key_of(next(tenants))

    def seen() -> list[tuple[int, frozenset[str], str]]:
        answers = [get(f"{sites[0].url}{path}", headers={"authorization": f"Bearer {bob}"}) for path in PAGES]
        return [(a.status_code, frozenset(a.headers), a.text) for a in answers]

    before = seen()
    for number, texts in enumerate([(0, 1, 2), (0, 1, 2), (3, 0)]):
        assert ask(sites[0], Step(texts), ann, f"ann-{number}").status_code == 200
    assert seen() == before
    assert [status for status, _, _ in before] == [200, 200, 404, 200, 200, 200, 404, 200]


def test_a_request_id_that_another_tenant_used_finds_nothing_of_it(sites: list[Site]) -> None:
    ann, bob = key_of(next(tenants)), key_of(next(tenants))
    first, second = (ask(sites[0], Step((1, 3)), key, "the-same-id") for key in (ann, bob))
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "the-same-id"
    assert second.json()["usage"] == first.json()["usage"]
    assert second.json()["choices"] == first.json()["choices"]
    assert get(f"{sites[0].url}/v1/chat/completions/chatcmpl-the-same-id", headers=bearer(bob)).status_code == 404


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("with_keys", "metrics_port", "on_main"),
    [(False, None, True), (True, None, False), (True, 0, False), (False, 0, False)],
)
def test_counters_of_all_tenants_are_not_where_the_tenants_are(
    shared_data: Path, keys_file: Path, with_keys: bool, metrics_port: int | None, on_main: bool
) -> None:
    kv = stories(shared_data)
    options = ServerOptions("stories", api_keys=keys_file if with_keys else None)
    where = Listening("127.0.0.1", 0, metrics_port, Admin(None, None, False, 0))
    with open_service(kv) as service:
        main, *others = [app for app, _ in _apps(kv, service, options, where)]
        with serving(main) as url:
            assert (get(f"{url}/metrics").status_code == 200) is on_main
        assert len(others) == (metrics_port is not None)


def test_what_one_tenant_has_judged_by_itself_does_not_suspend_reuse_for_others(
    shared_data: Path, keys_file: Path
) -> None:
    """Ten requests with a bound of nothing and no gate: their checks would all fail."""
    ann, bob = key_of(next(tenants)), key_of(next(tenants))
    heads = ["My mom likes to bake a cake with me. " * 3, "I saw a bird in the tree and it sang. " * 3]
    with site(shared_data, keys_file, shadow_share=1.0, share_moved="namespace", recompute_strategy="none") as made:

        def moved(key: str, head: str, **steering: Any) -> int:
            body = {"model": "stories", "prompt": head + STORY, "max_tokens": 1, "kvboost": steering}
            answer = post(f"{made.url}/v1/completions", json=body, headers=bearer(key))
            return int(answer.json()["usage"]["kvboost"]["moved"])

        moved(ann, heads[0])
        asked = [moved(ann, f"{n} {heads[1]}", gate=False, risk_bound=0.0) for n in "ABCDEFGHIJ"]
        assert min(asked) > 0
        made.kv.shadow.close()  # waits for checks
        assert made.kv.shadow.stats().checks == 0
        moved(bob, heads[0])
        assert moved(bob, heads[1], risk_bound=1e9) > 0
