"""The load benchmark in small: what it promises of a server holds, and it would see it if it did not."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import load
import serve_compare
from kvboost.serving import Token
from load_asks import COMPLETIONS, Ask, Mix
from load_changes import CHANGES, Made, judged
from load_check import compare
from load_clients import OUTCOMES, Result, account, send
from load_replay import _against
from server_run import CHAT_TEMPLATE

SMALL = [
    "--clients", "28", "--requests", "4", "--document-characters", "100", "--documents", "6", "--per-prompt", "2",
    "--new-tokens", "4", "12", "--last-tokens", "150", "--queue", "16", "--check", "40", "--replays", "20",
]  # fmt: skip


@pytest.fixture(scope="module")
def told(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = tmp_path_factory.mktemp("model") / "stories"
    shutil.copytree(shared_data / "models" / "stories260K-llama", model, copy_function=shutil.copy)
    model.chmod(0o755)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return load.main(["--model", str(model), *SMALL])


def test_every_promise_is_kept(told: dict[str, Any]) -> None:
    assert [b for b in told["broken"] if "within" not in b] == [], "how soon a change acts depends on the machine"


def test_every_request_ended_in_one_way_and_the_server_counts_the_same(told: dict[str, Any]) -> None:
    ended = told["load"]
    assert sum(ended[o] for o in OUTCOMES) == ended["requests"] >= 100
    assert ended["answered"] > 60
    assert ended["refused"] > 0
    assert ended["disconnected"] > 0
    assert ended["busy"] > 0
    by_outcome = {k.split('"')[1]: v for k, v in told["server"].items()}
    answered = sum(by_outcome[o] for o in ("stop", "length", "eos"))
    assert by_outcome["failed"] == by_outcome["deadline"] == 0
    assert ended["answered"] <= answered <= ended["answered"] + ended["disconnected"]
    assert answered + by_outcome["cancelled"] <= ended["answered"] + ended["disconnected"]
    assert ended["busy"] <= by_outcome["refused"] <= ended["busy"] + ended["disconnected"]


def test_exact_answers_are_those_of_a_solo_run(told: dict[str, Any]) -> None:
    checked = told["exact_as_alone"]
    assert checked["different"] == 0
    assert checked["same"] + checked["tie"] == checked["answers"] >= checked["asked_again"] > 15
    assert told["load"]["reused_share"] > 0.1


def test_every_change_of_the_settings_acted(told: dict[str, Any]) -> None:
    assert [c["change"] for c in told["changes"]] == [c.name for c in CHANGES]
    assert all(c["effect_s"] is not None for c in told["changes"])


def test_sigterm_answers_all_and_the_next_start_is_warm(told: dict[str, Any]) -> None:
    end = told["sigterm"]
    assert end["in_flight"] > load.STREAMS / 2
    assert end["answered"] + end["told_an_error"] == load.STREAMS
    assert end["exit_code"] == told["restart"]["exit_code"] == 0
    assert told["restart"]["first_cached_tokens"] > 0
    assert told["restart"]["reused_share"] > 0.5


def test_answers_over_inexact_rows_are_replayed_on_their_plans(told: dict[str, Any]) -> None:
    replayed = told["replay"]
    assert replayed["same"] + replayed["tie"] >= 5
    assert replayed["with_moved_rows"] > 0
    assert replayed["different"] == 0
    assert 0 < replayed["drift"] < 1e-3


# --- it would see it --------------------------------------------------------------------------------------------------


async def ill(request: Request) -> Response:
    """Fails as its prompt says."""
    how = (await request.json())["prompt"]
    if how == "busy":
        return JSONResponse({}, 429, headers={"retry-after": "3"})
    if how in ("cut", "error event"):
        said = [b'data: {"choices": []}\n\n', b'data: {"error": {"message": "shutting down"}}\n\n']
        return StreamingResponse(_each(said[: 1 if how == "cut" else 2]), media_type="text/event-stream")
    return JSONResponse({"error": {"message": how}}, 200 if how == "taken" else 500)


async def _each(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.fixture
def asked() -> Any:
    app = Starlette(routes=[Route(COMPLETIONS, ill, methods=["POST"])])

    def results(*asks: Ask) -> list[Result]:
        async def work() -> list[Result]:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ill") as http:
                return [await send(http, ask) for ask in asks]

        return asyncio.run(work())

    return results


def ask(prompt: str, **more: Any) -> Ask:
    return Ask("fresh", COMPLETIONS, {"prompt": prompt, "stream": prompt in ("cut", "error event")}, **more)


def test_what_goes_wrong_is_a_failure(asked: Any) -> None:
    results = asked(ask("cut"), ask("error event"), ask("boom"), ask("taken", expected=400), ask("boom", expected=400))
    assert [r.outcome for r in results] == ["failed"] * 5
    assert [bool(r.told) for r in results] == [False, True, True, True, True], "a stream that is cut says nothing"
    told = account(results)
    assert told["failed"] == told["requests"] == 5
    assert told["server_errors"] == 2
    assert len(told["wrong"]) >= 3


def test_what_is_meant_to_be_is_no_failure(asked: Any) -> None:
    busy, refused = asked(ask("busy"), ask("boom", expected=500))
    assert (busy.outcome, busy.retry_after_s) == ("busy", 3.0)
    assert refused.outcome == "refused"


def result(tokens: list[str], gaps: list[float] | None = None, **more: Any) -> Result:
    return Result(ask("x"), more.pop("began_s", 0.0), "answered", 200, tokens=tokens, gaps=gaps or [1.0] * len(tokens),
                  **more)  # fmt: skip


def test_an_answer_may_part_from_the_solo_run_at_a_near_tie_only() -> None:
    said = result(["a", "b", "c"], [1.0, 5e-5, 1.0])
    assert compare(said, result(["a", "b", "c"])) == "same"
    assert compare(said, result(["a", "x", "y"])) == "tie"
    assert compare(said, result(["x", "b", "c"])) == "different"
    assert compare(said, result(["a", "b", "x"])) == "different"
    assert compare(said, result(["a", "b"])) == "different"


def test_an_answer_that_contradicts_a_change_is_counted() -> None:
    on, off = ({"kvboost": {"fallback": f, "strategy": None}} for f in (None, "switched off"))
    made = [Made(CHANGES[0], 10.0, 0.1), Made(CHANGES[1], 20.0, 0.1)]
    results = [
        result([], usage=on, began_s=9.0, ended_s=12.0),  # it came before the change
        result([], usage=off, began_s=12.0, ended_s=13.0),
        result([], usage=on, began_s=12.0, ended_s=13.0),
        result([], usage=on, began_s=19.0, ended_s=21.0),  # it may have begun to run behind the next change
        result([], usage=on, began_s=22.0, ended_s=23.0),
    ]
    off_told, on_told = judged(made, results)
    assert (off_told["answers_after"], off_told["contradicting"]) == (2, 1)
    assert (on_told["answers_after"], on_told["contradicting"]) == (1, 0)


def test_a_replay_that_says_other_tokens_is_seen() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.00005, 0.0]]).log_softmax(-1)

    def token(i: int, step: int) -> Token:
        return Token(i, "", None, ((i, "", float(logits[step, i]) + 1e-5),))

    for ids, expected in (((1, 1), "same"), ((1, 0), "tie"), ((0, 1), "different")):
        verdict, drift, near = _against([token(i, step) for step, i in enumerate(ids)], logits)
        assert (verdict, near) == (expected, 1)
        assert drift == pytest.approx(1e-5, rel=0.1)


def test_equal_mixes_draw_equal_asks_and_every_kind() -> None:
    def mix(seed: int) -> Mix:
        return Mix([f"document {i} " * 9 for i in range(5)], "some text " * 500, seed=seed)

    def drawn(seed: int, client: int) -> list[Ask]:
        asks = mix(seed).asks(client)
        return [next(asks) for _ in range(300)]

    first = drawn(1, 0)
    assert first == drawn(1, 0)
    assert first != drawn(1, 1)
    assert {a.kind for a in first} == {"shared", "repeat", "fresh", "broken"}
    assert any(a.leaves_after for a in first)
    exact = next(a for a in first if a.is_exact and a.streams)
    assert exact.alone().key == exact.key
    assert not exact.alone().streams


# --- beside transformers serve ----------------------------------------------------------------------------------------


def test_new_texts_share_no_line_with_an_earlier_one() -> None:
    licence = "Licensed under whatever they thought of"
    texts = [f"{licence}\nimport os\nfirst of all these files", "import os\nsecond", f"x\n  {licence}", "second\nthird"]
    assert list(serve_compare.unseen(texts)) == [texts[0], texts[1], texts[3]]


def test_shared_traffic_asks_about_the_same_documents_and_new_traffic_about_none(shared_data: Path) -> None:
    asked = list(serve_compare.traffic(300, 4, seed=1))
    assert [kind for kind, _ in asked] == ["warm-up", *["shared, head changed", "new", "shared, reordered", "new"] * 2]
    first = asked[0][1]
    documents = first.split("File ")[1:]
    for kind, text in asked[1:]:
        longest = [d for d in documents if d.split("\n", 1)[1][:60] in text]
        assert len(longest) == (0 if kind == "new" else serve_compare.DOCUMENTS)
        assert (first in text) == (kind == "shared, head changed")


def test_medians_stand_beside_ours_and_a_server_that_cannot_run_is_left_out() -> None:
    ours, theirs = serve_compare.Running("ours"), serve_compare.Running("theirs")
    ours.ttfts_s |= {"shared, a": [1.0, 1.0, 1.0], "shared, b": [3.0], "new": [4.0]}
    theirs.ttfts_s |= {"shared, a": [4.0, 4.0, 5.0], "shared, b": [4.0], "new": [5.0]}
    running = [ours, theirs, serve_compare.Running("none", refused="it did not start")]
    serve_compare.merge(running)
    ratios = {(r["traffic"], r["server"]): r["times_ours"] for r in serve_compare.summary(running)}
    assert ratios["shared", "theirs"] == 4.0
    assert ratios["new", "theirs"] == 1.25
    assert {server for _, server in ratios} == {"ours", "theirs"}
