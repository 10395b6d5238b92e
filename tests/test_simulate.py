"""The simulator: policies against slow references, the bound above all of them, logs read as what they are."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvboost.cli import app
from kvboost.errors import InputError
from kvboost.simulation.belady import belady, unordered
from kvboost.simulation.breaks import classify, common_prefix
from kvboost.simulation.policies import LRU, POLICIES, Importance
from kvboost.simulation.readers import Log, read
from kvboost.simulation.replay import grid, replay
from kvboost.simulation.tokens import WordPieces, chunk_trace, prefix_trace
from kvboost.simulation.trace import Piece, Trace
from kvboost.store import MemoryTier
from test_store import record

Names = list[list[int]]
REQUESTS = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), min_size=1, max_size=60)


def trace(requests: Names, reuse: Any = "anywhere", sizes: Sequence[int] = (1,)) -> Trace:
    pieces = [[Piece(b"%d" % n, sizes[n % len(sizes)]) for n in request] for request in requests]
    return Trace("test", reuse, pieces)


def brute_force_lru(requests: Names, capacity: int) -> int:
    """Whole prompts are looked up first; then all their pieces are used, the first one last."""
    recent: list[int] = []  # the latest last
    hits = 0
    for request in requests:
        distinct = list(dict.fromkeys(request))
        found = [n for n in distinct if n in recent]
        hits += len(found)
        for n in [*reversed(found), *reversed([n for n in distinct if n not in found])]:
            recent = [*(r for r in recent if r != n), n][-capacity:]
    return hits


@settings(max_examples=200, deadline=None)
@given(REQUESTS, st.integers(1, 10))
def test_lru_is_lru(requests: Names, capacity: int) -> None:
    assert replay(trace(requests), LRU(capacity)) == brute_force_lru(requests, capacity)


@settings(max_examples=100, deadline=None)
@given(REQUESTS, st.integers(1, 12), st.sampled_from(sorted(POLICIES)), st.sampled_from([(1,), (1, 3, 2)]))
def test_no_policy_hits_more_than_the_bound(
    requests: Names, capacity: int, policy: str, sizes: tuple[int, ...]
) -> None:
    t = trace(requests, sizes=sizes)
    assert replay(t, POLICIES[policy](capacity)) <= belady(t, capacity)


@settings(max_examples=200, deadline=None)
@given(REQUESTS, st.integers(1, 20), st.sampled_from([(1,), (1, 3, 2), (5, 1, 4)]))
def test_belady_over_whole_pieces_hits_no_more_than_the_bound_and_as_much_if_all_are_of_one_size(
    requests: Names, capacity: int, sizes: tuple[int, ...]
) -> None:
    t = trace(requests, sizes=sizes)
    whole, bound = belady(t, capacity, whole=True), belady(t, capacity)
    assert whole <= bound
    assert whole == bound or len(sizes) > 1


def brute_force_belady(requests: list[list[Piece]], capacity: int) -> int:
    """Hit tokens up to the first gap; of what is asked for again, the latest goes first, and tails before heads."""
    kept: dict[Piece, int] = {}  # -> its place in its history
    hits = 0
    for number, request in enumerate(requests):
        hits += sum(p.tokens for p in itertools.takewhile(kept.__contains__, request))
        kept |= {p: at for at, p in enumerate(request)}
        next_use = {p: next((n for n in range(number + 1, len(requests)) if p in requests[n]), None) for p in kept}
        kept = {p: at for p, at in kept.items() if next_use[p] is not None}
        while sum(p.tokens for p in kept) > capacity:
            del kept[max(kept, key=lambda p: (next_use[p], kept[p]))]
    return hits


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=30), st.integers(1, 20))
def test_belady_over_whole_pieces_keeps_no_tail_without_its_head(paths: Names, capacity: int) -> None:
    histories = [[tuple(path[:n]) for n in range(1, len(path) + 1)] for path in paths]
    requests = [[Piece(repr(h).encode(), 1 + sum(h)) for h in request] for request in histories]
    assert belady(Trace("test", "prefix", requests), capacity, whole=True) == brute_force_belady(requests, capacity)


def test_belady_keeps_pieces_whole() -> None:
    t = trace([[0], [1], [0], [1]], sizes=(3, 2))  # three tokens and two, room for four
    assert belady(t, 4, whole=True) == 3
    assert belady(t, 4) == 4


@settings(max_examples=100, deadline=None)
@given(REQUESTS, st.integers(1, 12))
def test_knowing_how_often_is_worth_no_more_than_knowing_when(requests: Names, capacity: int) -> None:
    t = trace(requests)
    assert unordered(t, capacity) <= belady(t, capacity)


def test_what_comes_most_often_is_kept_even_if_something_else_comes_sooner() -> None:
    t = trace([[1], [2], [2], [2], [1], [1], [1], [1]])
    assert unordered(t, 1) == 4  # 1 is there from the start, 2 is always computed
    assert belady(t, 1) == 5


def test_in_random_order_no_policy_hits_more_than_one_that_knows_how_often() -> None:
    rng = random.Random(7)
    names = [[name] for name in range(60) for _ in range(1 + 120 // (1 + name))]
    rng.shuffle(names)
    t = trace(names)
    assert all(replay(t, make(12)) <= unordered(t, 12) for make in POLICIES.values())


def test_the_bound_is_belady_on_pieces_of_one_size() -> None:
    requests = [[n] for n in (1, 2, 3, 1, 2, 4, 1, 2, 3, 4)]
    assert belady(trace(requests), 2) == 4  # 1 and 2 stay until their last use
    assert belady(trace(requests), 4) == 6
    assert belady(trace(requests), 0) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_hits_all_that_repeats_if_there_is_room(policy: str) -> None:
    rng = np.random.default_rng(1)
    t = trace(rng.integers(0, 40, (200, 5)).tolist(), sizes=(1, 7, 3))
    repeats = sum(p.tokens for r in t.requests for p in dict.fromkeys(r)) - t.footprint_tokens
    assert replay(t, POLICIES[policy](t.footprint_tokens)) == belady(t, t.footprint_tokens) == repeats


@pytest.mark.parametrize("policy", POLICIES)
def test_a_piece_larger_than_the_cache_is_not_kept(policy: str) -> None:
    cache = POLICIES[policy](5)
    cache.put(b"small", 2)
    cache.put(b"large", 6)
    assert b"small" in cache
    assert b"large" not in cache


def test_a_prefix_is_found_up_to_its_first_gap_and_a_chunk_anywhere() -> None:
    requests = [[1, 2, 3], [1, 9, 3]]
    assert replay(trace(requests, "prefix"), LRU(10)) == 1
    assert replay(trace(requests, "anywhere"), LRU(10)) == 2
    repeated = [[1, 1, 1], [1, 1]]
    assert replay(trace(repeated), LRU(10)) == 1, "a prompt is looked up before it is computed"


def test_the_simulated_policy_is_the_one_that_the_store_runs() -> None:
    rng = np.random.default_rng(2)
    numbers = np.minimum(rng.zipf(1.3, 3000), 200).tolist()
    size = record(0).num_bytes
    tier, policy = MemoryTier(20 * size), Importance(20 * size)
    for n in numbers:
        simulated = b"%d" % n in policy
        with tier.get_many([record(n).header.record_id]) as lease:
            assert bool(lease.records) == simulated
        if simulated:
            policy.use(b"%d" % n)
        else:
            policy.put(b"%d" % n, size)
            tier.put_many([record(n)])
        tier.check_integrity()


# --- files ------------------------------------------------------------------------------------------------------------


def write(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(v) + "\n" for v in values), encoding="utf-8")
    return path


def chat(system: str, user: str, tools: list[Any] | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}
    return body | ({"tools": tools} if tools else {})


def test_mooncake_blocks_are_512_tokens_and_the_last_one_less(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", {"timestamp": 0, "input_length": 1100, "hash_ids": [4, 5, 6], "output_length": 1}
    )
    found = read(path)
    assert isinstance(found, Trace)
    assert [p.tokens for p in found.requests[0]] == [512, 512, 76]
    assert found.reuse == "prefix"


def test_sessions_keep_their_own_blocks_apart_and_their_requests_in_order(tmp_path: Path) -> None:
    sessions = [
        {"block_size": 64, "requests": [{"t": 0, "h": [[1, 16]]}, {"t": 5, "h": [[1, 8], [30, 17]]}]},
        {"block_size": 64, "requests": [{"t": 1, "requests": [{"t": 2, "h": [[1, 8]]}]}]},
    ]
    found = read(write(tmp_path / "s.jsonl", *sessions))
    assert isinstance(found, Trace)
    names = [[p.name for p in r] for r in found.requests]
    assert sorted(names) == sorted([[b"0/8", b"0/16"], [b"0/8", b"0/37", b"0/45"], [b"1/8"]])
    assert names.index([b"0/8", b"0/16"]) < names.index([b"0/8", b"0/37", b"0/45"])
    assert {p.tokens for r in found.requests for p in r} == {512}


def test_openai_requests_and_batch_lines_and_prompts_are_texts(tmp_path: Path) -> None:
    request = chat("Be brief.", "Hello?")
    parts = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    }
    log = read(write(tmp_path / "a.jsonl", request, {"custom_id": "1", "body": request}, parts))
    assert isinstance(log, Log)
    assert log.prompts[0] == log.prompts[1]
    assert "Be brief." in log.prompts[0]
    assert "one\ntwo" in log.prompts[2]
    prompts = read(write(tmp_path / "b.jsonl", "first", {"prompt": "second"}))
    assert isinstance(prompts, Log)
    assert prompts.prompts == ["first", "second"]
    (tmp_path / "c.txt").write_text("a plain line\n\nanother\n")
    plain = read(tmp_path / "c.txt")
    assert isinstance(plain, Log)
    assert plain.prompts == ["a plain line", "another"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no request"),
        ('{"messages": []}\n', "line 1"),
        ('{"hash_ids": [1, 2], "input_length": 100}\n', "too many"),
        ('{"hash_ids": 3, "input_length": 100}\n', "`hash_ids`"),
        ('{"prompt": "a"}\n{oops\n', "line 2"),
        (None, "cannot read"),
    ],
)
def test_a_wrong_line_is_named(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=message):
        read(path)


# --- texts ------------------------------------------------------------------------------------------------------------


def test_word_pieces_lose_no_text_and_name_equal_text_alike() -> None:
    pieces = WordPieces()
    text = "Straße 12345,\n\n  if (x_1 == 'ü'):\t<|im_start|>user ½"
    ids = pieces(text)
    by_id = {i: piece for piece, i in pieces.get_vocab().items()}
    assert "".join(by_id[i] for i in ids) == text
    assert pieces(text) == ids


def test_blocks_name_histories_and_chunks_name_texts() -> None:
    a = np.arange(64, dtype=np.int32)
    b = np.concatenate([np.full(16, 99, np.int32), a])
    blocks = prefix_trace("t", [a, b, a[:40]]).requests
    assert not {p.name for p in blocks[0]} & {p.name for p in blocks[1]}
    assert blocks[2][:2] == blocks[0][:2]
    assert [p.tokens for p in blocks[2]] == [16, 16, 8]

    class Halves:
        def split(self, input_ids: Any) -> list[Any]:
            from kvboost.types import Span

            return [Span(i, i + 16) for i in range(0, len(input_ids), 16)]

    chunks = chunk_trace("t", [a, b], Halves()).requests
    assert chunks[1][1:] == chunks[0]


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("It is 2026-11-29 10:15:02 now.", "It is 2026-11-29 10:17:44 now.", "timestamp"),
        ("Today is Monday, 5 May 2025.", "Today is Friday, 9 May 2025.", "timestamp"),
        ("at 1764412345 sharp", "at 1764499999 sharp", "timestamp"),
        ("id 3f2a9c42-8c96-4e1b-9a77-001122334455.", "id 3f2a9c42-8c96-4e1b-9a77-001122339999.", "id"),
        ("session sess-8f3ab2c9 begins", "session sess-8f3ac001 begins", "id"),
        ("Request 41 of many", "Request 42 of many", "counter"),
        ("Dear Anna, hello", "Dear Bert, hello", "other text"),
    ],
)
def test_what_differs_is_classed(old: str, new: str, kind: str) -> None:
    assert classify(old, new, common_prefix(old, new)) == kind


def test_reordered_text_is_told_from_changed_text() -> None:
    docs = [
        f"Document about {w}: " + f"{w} is a thing of which there are many. " * 8 for w in ("apples", "bears", "cats")
    ]
    tools = [json.dumps({"type": "function", "function": {"name": w, "description": w * 60}}) for w in "xyz"]
    for parts, kind in ((docs, "reordered documents"), (tools, "reordered tools")):
        old, new = ("\n\n".join(parts[i] for i in order) for order in ((0, 1, 2), (2, 0, 1)))
        assert classify(old, new, common_prefix(old, new)) == kind
    inserted = docs[0][:15] + "green " + docs[0][15:]
    assert classify(docs[0], inserted, common_prefix(docs[0], inserted)) == "other text"


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_common_prefix_is_the_common_prefix(head: str, a: str, b: str) -> None:
    at = common_prefix(head + a, head + b)
    assert (head + a)[:at] == (head + b)[:at]
    assert at >= len(head)
    assert at == min(len(head + a), len(head + b)) or (head + a)[at] != (head + b)[at]


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["simulate", *arguments])


@pytest.fixture
def log(tmp_path: Path) -> str:
    """Shuffled documents behind a clock: a prefix cache finds the head, chunk reuse nearly all."""
    rng = np.random.default_rng(3)
    docs = [" ".join(f"word{d}x{rng.integers(0, 999)}" for _ in range(60)) for d in range(8)]
    requests = []
    for n in range(40):
        shown = "\n\n".join(docs[d] for d in rng.permutation(8)[:5])
        requests.append(chat(f"You are an assistant who reads. It is 10:{n:02}:00.", f"{shown}\n\nQuestion {n}?"))
    return str(write(tmp_path / "log.jsonl", *requests))


def test_a_log_tells_what_prefix_caching_misses_and_why(log: str) -> None:
    result = run(log, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    rate = {(c["reuse"], c["policy"], c["share"]): c["hit_rate"] for c in found["cells"]}
    assert rate["prefix", "lru", 1.0] < 0.1
    assert rate["anywhere", "lru", 1.0] > 0.7
    for (reuse, policy, share), value in rate.items():
        assert value <= rate[reuse, "belady", share], (reuse, policy, share)
    worst = found["breaks"][0]
    assert worst["kind"] == "timestamp"
    assert worst["requests"] > 20
    assert "10:" in worst["example"]["before"]
    assert any("word pieces" in note for note in found["notes"])


def test_the_report_is_one_page_with_its_plot(log: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run(log, "--report", str(tmp_path / "out"), "--budgets", "10,50")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 1
    assert "timestamp" in page
    assert "<script" not in page
    assert "src=" not in page
    assert (tmp_path / "out" / "hits.svg").read_text().startswith("<svg")


def test_the_report_without_matplotlib_says_what_to_install(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(log, "--report", str(tmp_path / "out"), "--budgets", "50")
    assert result.exit_code == 2
    assert 'pip install ".[bench]"' in result.stderr
    assert run(log, "--budgets", "50").exit_code == 0


def test_a_tokenizer_counts_its_own_tokens(log: str, shared_data: Path) -> None:
    result = run(log, "--tokenizer", str(shared_data / "models" / "stories260K-llama"), "--json", "--budgets", "100")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert not any("word pieces" in note for note in found["notes"])
    assert {c["reuse"] for c in found["cells"]} == {"prefix", "anywhere"}


def test_a_block_trace_is_replayed_for_prefixes_only(tmp_path: Path) -> None:
    lines = [{"timestamp": i, "input_length": 1024, "hash_ids": [0, i % 3 + 1]} for i in range(9)]
    result = run(str(write(tmp_path / "t.jsonl", *lines)), "--policies", "lru,belady", "--budgets", "100")
    assert result.exit_code == 0, result.output
    assert "prefix caching" in result.stdout
    assert "any position" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--budgets", "0"), "--budgets"), (("--policies", "lru,best"), "'best'"), (("--format", "csv"), "'csv'")],
)
def test_wrong_options_are_told_in_one_line(log: str, arguments: tuple[str, str], message: str) -> None:
    result = run(log, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1]


def test_budgets_are_shares_of_the_footprint() -> None:
    t = trace([[1, 2, 3, 4], [1, 2]], sizes=(10,))
    cells = list(grid(t, [0.5, 1.0], ["lru"]))
    assert [c.capacity_tokens for c in cells] == [20, 40]
    assert [c.hit_rate for c in cells] == [c.hit_tokens / 60 for c in cells]


CHAT = '{"messages": [{"role": "user", "content": %s}]}'


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("[" * 100_000, "openai"),
        ("1" * 5000, "openai"),
        ('{"hash_ids": ["a"], "input_length": 5}', "mooncake"),
        ('{"hash_ids": [null], "input_length": 5}', "mooncake"),
        ('{"block_size": -64, "requests": [{"t": 0, "h": [[1, 20]]}]}', "claude_code"),
        ('{"block_size": Infinity, "requests": []}', "claude_code"),
    ],
    ids=lambda v: v[:30],
)
def test_a_malformed_line_is_named(line: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line)
    with pytest.raises(InputError, match="line 1 of"):
        read(path, kind)


@pytest.mark.parametrize("content", ["5", "true", '{"a": 1}', "null", "[5]"])
def test_content_of_any_type_is_read(content: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(CHAT % content)
    assert isinstance(read(path), Log)
