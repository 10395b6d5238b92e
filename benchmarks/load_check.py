"""What `load` checks when the load is over: answers against solo runs, slots, memory, the end and the next start."""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import httpx

from load_asks import Ask, Mix
from load_clients import Result, connect, send
from load_server import KVBoostServer, state

TIE = 1e-4  # logits closer than this may change places in another batch
IDLE_S = 30.0
END_S = 120.0
COMPARISONS = ("same", "tie", "different")
Sample = tuple[float, float, float]  # seconds, anonymous bytes, bytes of the cache

RUNNING, QUEUED = "kvboost_requests_running", "kvboost_queue_length"


def compare(said: Result, alone: Result) -> str:
    """`same`; `tie`: another token where two were as likely; or `different`."""
    for i, (token, other) in enumerate(zip(said.tokens, alone.tokens, strict=False)):
        if token != other:
            return "tie" if min(said.gaps[i], alone.gaps[i]) < TIE else "different"
    return "same" if len(said.tokens) == len(alone.tokens) else "different"


async def exact_as_alone(url: str, results: Sequence[Result], most: int) -> dict[str, Any]:
    """Asks again, one at a time and without the cache, what was answered exactly: `most` of the distinct asks."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for r in results:
        if r.outcome == "answered" and r.ask.is_exact:
            groups[r.ask.key].append(r)
    keys = sorted(groups)
    chosen = random.Random(0).sample(keys, min(most, len(keys)))
    counts: Counter[str] = Counter()
    tokens = ties = 0
    async with connect(url) as http:
        for key in chosen:
            alone = await send(http, groups[key][0].ask.alone())
            counts.update(compare(r, alone) for r in groups[key])
            tokens += sum(len(r.tokens) for r in groups[key])
            ties += sum(gap < TIE for gap in alone.gaps)
    told = {"distinct": len(keys), "asked_again": len(chosen), "answers": counts.total(), "tokens": tokens}
    return {**told, **{c: counts[c] for c in COMPARISONS}, "near_ties_met": ties}


# --- memory and slots -------------------------------------------------------------------------------------------------


async def watch(server: KVBoostServer, samples: list[Sample], every_s: float) -> None:
    """Notes the server's memory until it is cancelled."""
    async with server.admin() as admin:
        while True:
            samples.append(await sample(server, admin))
            await asyncio.sleep(every_s)


async def sample(server: KVBoostServer, admin: httpx.AsyncClient) -> Sample:
    """The server's memory now."""
    now = await state(admin)
    return time.monotonic(), float(server.anonymous_bytes()), now['kvboost_cache_bytes{tier="memory"}']


def memory(before: Sample, samples: Sequence[Sample], after: Sample) -> dict[str, float]:
    """Megabytes before a run, in its first and last third (medians), and after it; the cache's own apart."""
    third = max(1, len(samples) // 3)
    parts = {"before": [before], "first": samples[:third], "last": samples[-third:], "after": [after]}
    told = {}
    for name, part in parts.items():
        told[f"{name}_mb"] = statistics.median(s[1] for s in part) / 1e6
        told[f"{name}_cache_mb"] = statistics.median(s[2] for s in part) / 1e6
    return told


async def settled(server: KVBoostServer) -> dict[str, Any]:
    """Metrics and settings once no request runs or waits, or as they stand after `IDLE_S`."""
    async with server.admin() as admin:
        until = time.monotonic() + IDLE_S
        while True:
            now = await state(admin)
            if now[RUNNING] == now[QUEUED] == 0 or time.monotonic() > until:
                return now
            await asyncio.sleep(0.05)


async def at_once(url: str, asks: Sequence[Ask]) -> list[Result]:
    """The results of asks that all are sent at once."""
    async with connect(url) as http:
        return list(await asyncio.gather(*(send(http, ask) for ask in asks)))


# --- the end, and the next start --------------------------------------------------------------------------------------


async def terminate(server: KVBoostServer, asks: Sequence[Ask]) -> dict[str, Any]:
    """SIGTERM as soon as all of `asks` run, wait, or were refused: how each of them ends, and the process."""
    async with server.admin() as admin, connect(server.url) as http:
        answering = [asyncio.create_task(send(http, ask)) for ask in asks]
        until = time.monotonic() + IDLE_S
        now = await state(admin)
        while now[RUNNING] + now[QUEUED] + sum(a.done() for a in answering) < len(asks) and time.monotonic() < until:
            now = await state(admin)
        server.process.send_signal(signal.SIGTERM)
        told_s = time.monotonic()
        results = await asyncio.gather(*answering)
    code = await asyncio.to_thread(server.process.wait, END_S)
    ends = Counter("told_an_error" if r.outcome == "failed" and r.told else r.outcome for r in results)
    return {
        "in_flight": int(now[RUNNING] + now[QUEUED]),
        **{end: ends[end] for end in ("answered", "told_an_error", "busy")},
        "unclear": ends["failed"],
        "exit_code": code,
        "ended_s": time.monotonic() - told_s,
    }


async def first_after_restart(server: KVBoostServer, mix: Mix, results: Sequence[Result]) -> dict[str, Any]:
    """Asks a new server what an old one on the same directory answered again and again, the latest first."""
    answered = (r for r in reversed(results) if r.ask.kind == "repeat" and r.outcome == "answered")
    known = {r.ask.key: r.ask for r in answered}
    asks = [ask.alone() for ask in known.values()]
    async with connect(server.url) as http, server.admin() as admin:
        entries = (await state(admin))['kvboost_cache_entries{tier="disk"}']
        found = [await send(http, Ask(a.kind, a.path, a.body)) for a in asks]
    usages = [r.usage for r in found if r.usage]
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usages]
    return {
        "entries_on_disk": int(entries),
        "asked": len(asks),
        "first_cached_tokens": cached[0] if cached else 0,
        "reused_share": sum(cached) / max(1, sum(u["prompt_tokens"] for u in usages)),
    }
