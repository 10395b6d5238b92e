"""Answers over moved text, replayed alone on the plans that they had. A part of `load`.

The server runs in this process, so that the plan of every job can be noted: segments, and the records behind them.
Afterwards each answer is scored on its own plan, its tokens given, one after another on an idle engine
(`KVBoost.score`). What cannot be compared is counted: a record may have gone since, or a truer one replaced it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import uvicorn

from kvboost import InputError, KVBoost
from kvboost.server import ServerOptions, make_app
from kvboost.server.process import listen
from kvboost.serving import Job, Piece, ServiceStats, Token
from kvboost.serving.scheduler import Scheduler
from kvboost.store.memory import MemoryTier
from kvboost.types import ChunkHeader, Kind, ReusePlan
from load_asks import Mix
from load_check import TIE
from load_clients import Result, account, client


@dataclass(eq=False)
class Noted:
    """A job that was answered."""

    job: Job
    tokens: list[Token] = field(default_factory=list)
    plan: ReusePlan | None = None  # None: the answer is not complete
    headers: dict[bytes, ChunkHeader] = field(default_factory=dict)  # of the records behind the plan, then


class NotingService:
    """A `Service` that notes what another one answers."""

    def __init__(self, service: Scheduler) -> None:
        self.service = service
        self.noted: list[Noted] = []

    def submit(self, job: Job) -> AsyncIterator[Piece]:
        return self._answer(Noted(job), self.service.submit(job))

    def stats(self) -> ServiceStats:
        return self.service.stats()

    async def drain(self, timeout_s: float) -> bool:
        return await self.service.drain(timeout_s)

    async def _answer(self, noted: Noted, pieces: Any) -> AsyncIterator[Piece]:
        try:
            async for piece in pieces:
                noted.tokens += piece.tokens
                if piece.plan is not None and piece.finish_reason in ("stop", "length", "eos"):
                    noted.plan, noted.headers = piece.plan, headers_of(self.service.engine, piece.plan)
                    self.noted.append(noted)
                yield piece
        finally:
            await pieces.aclose()


def headers_of(kv: KVBoost, plan: ReusePlan) -> dict[bytes, ChunkHeader]:
    """The headers of a plan's records in memory, and of the sources of linked ones."""
    memory = next(tier for tier in kv.store.tiers if isinstance(tier, MemoryTier))
    own = memory.stored(s.record_id for s in plan if s.record_id is not None)
    headers = {i: record.header for i, record in own.items() if record.header is not None}
    linked = memory.stored(h.source.record_id for h in headers.values() if h.source is not None)
    return headers | {i: record.header for i, record in linked.items() if record.header is not None}


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The base URL of `app`, served by a thread until the block ends."""
    with listen("127.0.0.1", 0) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def replay_check(kv: KVBoost, mix: Mix, clients: int, requests: int, most: int) -> dict[str, Any]:
    """Answers `clients` that ask `requests` times each, then replays up to `most` answers over inexact rows."""
    service = NotingService(Scheduler(kv))
    results: list[Result] = []

    async def ask_all(url: str) -> None:
        asks = [itertools.islice(mix.asks(1000 + i), requests) for i in range(clients)]
        await asyncio.gather(*(client(url, a, results, lambda: False) for a in asks))

    try:
        with serving(make_app(service, kv, ServerOptions("served"))) as url:
            asyncio.run(ask_all(url))
    finally:
        service.service.close()
    inexact = [n for n in service.noted if n.plan is not None and _is_inexact(n.plan)]
    chosen = inexact[-most:]  # of the latest, most records are still there
    return {"load": account(results), "inexact": len(inexact), **replayed(kv, chosen)}


def _is_inexact(plan: ReusePlan) -> bool:
    return plan.count(Kind.MOVED) + plan.count(Kind.CONTINUED) > 0


def replayed(kv: KVBoost, answers: Sequence[Noted]) -> dict[str, Any]:
    """Scores each answer alone on the plan that it had; `drift` is the largest change of a told log-probability."""
    counts: Counter[str] = Counter()
    drift, ties, tokens, moved = 0.0, 0, 0, 0
    for noted in answers:
        if noted.plan is None or headers_of(kv, noted.plan) != noted.headers:
            counts["replaced"] += 1
            continue
        try:
            logits, _ = kv.score(
                torch.tensor([noted.job.input_ids]),
                torch.tensor([[t.id for t in noted.tokens]]),
                plan=noted.plan,
                **noted.job.settings,
            )
        except InputError:
            counts["replaced"] += 1
            continue
        verdict, changed, near = _against(noted.tokens, logits.log_softmax(-1))
        counts[verdict] += 1
        drift, ties, tokens = max(drift, changed), ties + near, tokens + len(noted.tokens)
        moved += noted.plan.count(Kind.MOVED) > 0
    told = {name: counts[name] for name in ("same", "tie", "different", "replaced")}
    return {"replayed": len(answers), "with_moved_rows": moved, "tokens": tokens, **told,
            "near_ties_met": ties, "drift": drift}  # fmt: skip


def _against(tokens: Sequence[Token], logprobs: torch.Tensor) -> tuple[str, float, int]:
    """Whether greedy decoding of `logprobs` [m, V] says the same tokens; their drift; and how many were near ties."""
    best, second = logprobs.topk(2, -1).values.unbind(-1)
    near = (best - second) < TIE
    parted = [i for i, t in enumerate(tokens) if int(logprobs[i].argmax()) != t.id]
    drift = max((abs(p - float(logprobs[i, j])) for i, t in enumerate(tokens) for j, _, p in t.top), default=0.0)
    verdict = "same" if not parted else "tie" if all(bool(near[i]) for i in parted) else "different"
    return verdict, drift, int(near.sum())
