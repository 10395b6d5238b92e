"""Clients of `load`: each sends one request at a time, and every request ends in exactly one of five ways.

answered       the whole answer came
busy           429; the client comes back when it was told to
refused        a broken body got the status that it must get
disconnected   the client went first, as it meant to
failed         anything else
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from load_asks import Ask

OUTCOMES = ("answered", "busy", "refused", "disconnected", "failed")
PATIENCE_S = 600.0  # a request that takes longer is stuck
JSON = {"content-type": "application/json"}


@dataclass
class Result:
    """What became of a request. Times are of `time.monotonic`."""

    ask: Ask
    began_s: float
    outcome: str = "failed"
    status: int = 0  # 0: no response began
    first_s: float | None = None  # when the first token came, of a stream
    ended_s: float = 0.0
    tokens: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between the two largest logits, token by token
    usage: Mapping[str, Any] = field(default_factory=dict)
    retry_after_s: float = 0.0
    told: str = ""  # what the server said was wrong
    broke: str = ""  # what happened to the connection

    def take(self, choice: Mapping[str, Any]) -> None:
        """Adds the tokens of a choice, or of a part of one."""
        told = choice.get("logprobs") or {}
        if "content" in told:
            self.tokens += [token["token"] for token in told["content"]]
            tops = [[top["logprob"] for top in token["top_logprobs"]] for token in told["content"]]
        else:
            self.tokens += told.get("tokens", [])
            tops = [list(top.values()) for top in told.get("top_logprobs", [])]
        self.gaps += [max(top) - min(top) for top in tops]  # one entry: two tokens with one text
        if self.tokens and self.first_s is None:
            self.first_s = time.monotonic()

    def judge(self, response: httpx.Response) -> None:
        """What a response without an answer means. Its body has been read."""
        if response.status_code == 429:
            self.outcome, self.retry_after_s = "busy", float(response.headers["retry-after"])
        elif response.status_code == self.ask.expected != 200:
            self.outcome = "refused"
        else:
            self.told = response.text[:300]


def connect(url: str) -> httpx.AsyncClient:
    """A client with connections of its own."""
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, verify=False, trust_env=False)


async def client(url: str, asks: Iterable[Ask], results: list[Result], stop: Callable[[], bool]) -> None:
    """Asks one after another; what is busy is asked again. Ends between two requests."""
    async with connect(url) as http:
        for ask in asks:
            while not stop():
                results.append(await send(http, ask))
                if results[-1].outcome != "busy":
                    break
                await asyncio.sleep(results[-1].retry_after_s)
            if stop():
                return


async def send(http: httpx.AsyncClient, ask: Ask) -> Result:
    """One request, whatever happens to it."""
    result = Result(ask, time.monotonic())
    patience_s = None if ask.leaves_after is None or ask.streams else ask.leaves_after / 10
    try:
        await asyncio.wait_for(_stream(http, ask, result) if ask.streams else _whole(http, ask, result), patience_s)
    except asyncio.TimeoutError:
        result.outcome = "disconnected"
    except httpx.HTTPError as error:
        result.broke = f"{type(error).__name__}: {error}"
    result.ended_s = time.monotonic()
    return result


async def _whole(http: httpx.AsyncClient, ask: Ask, result: Result) -> None:
    response = await http.post(ask.path, content=ask.content, headers={**JSON, **ask.headers})
    result.status = response.status_code
    if result.status != 200 or ask.expected != 200:
        result.judge(response)
        return
    answer = response.json()
    result.take(answer["choices"][0])
    result.first_s = None  # it came with all others
    result.outcome, result.usage = "answered", answer["usage"]


async def _stream(http: httpx.AsyncClient, ask: Ask, result: Result) -> None:
    async with http.stream("POST", ask.path, content=ask.content, headers={**JSON, **ask.headers}) as response:
        result.status = response.status_code
        if result.status != 200:
            await response.aread()
            result.judge(response)
            return
        events = 0
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                result.outcome = "answered"
            elif line.startswith("data: "):
                _hear(json.loads(line.removeprefix("data: ")), result)
                events += 1
                if ask.leaves_after is not None and events >= ask.leaves_after:
                    result.outcome = "disconnected"
                    return


def _hear(event: Mapping[str, Any], result: Result) -> None:
    if "error" in event:
        result.told = str(event["error"])[:300]
    for choice in event.get("choices", ()):
        result.take(choice)
    result.usage = event.get("usage") or result.usage


def account(results: Sequence[Result]) -> dict[str, Any]:
    """How many requests ended in which way, and what is wrong with those that failed."""
    outcomes = Counter(r.outcome for r in results)
    answered = [r for r in results if r.outcome == "answered"]
    ttfts = sorted(r.first_s - r.began_s for r in answered if r.first_s is not None)
    reused = sum(r.usage["prompt_tokens_details"]["cached_tokens"] for r in answered if r.usage)
    prompts = sum(r.usage["prompt_tokens"] for r in answered if r.usage)
    failed = [r for r in results if r.outcome == "failed"]
    return {
        "requests": len(results),
        **{outcome: outcomes[outcome] for outcome in OUTCOMES},
        "answered_exact": sum(r.ask.is_exact for r in answered),
        "server_errors": sum(r.status >= 500 for r in results),
        "wrong": sorted({f"{r.ask.kind} {r.status} {r.told}{r.broke}" for r in failed})[:10],
        "output_tokens": sum(len(r.tokens) for r in results),
        "prompt_tokens": prompts,
        "reused_share": reused / max(1, prompts),
        "ttft_p50_s": statistics.median(ttfts) if ttfts else None,
        "ttft_p95_s": ttfts[int(0.95 * len(ttfts))] if ttfts else None,
        "longest_s": max((r.ended_s - r.began_s for r in results), default=None),
    }
