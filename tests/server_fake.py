"""A service that answers one job after another with the engine's own `generate`, and one that says what it is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from kvboost import KVBoost
from kvboost.serving import Busy, Job, Piece, ServiceStats, Token
from kvboost.types import ReuseReport


class _Tap(LogitsProcessor):
    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.scores.append(scores[0].float().log_softmax(-1))
        return scores


class _Cancelled(StoppingCriteria):
    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((1,), self.event.is_set(), dtype=torch.bool)


class SequentialService:
    def __init__(self, kv: KVBoost, queue: int = 64) -> None:
        self.kv, self.queue = kv, queue
        self.lock = asyncio.Lock()
        self.running = 0
        self.draining = False
        self.finished: dict[str, int] = {}

    def submit(self, job: Job) -> AsyncIterator[Piece]:
        if self.draining or self.running >= self.queue:
            raise Busy("the queue is full", 2.0)
        self.kv.settings(**job.settings)
        self.running += 1
        return self._answer(job)

    async def _answer(self, job: Job) -> AsyncIterator[Piece]:
        cancelled = _Cancelled()
        reason = "cancelled"
        try:
            async with self.lock:
                pieces = await asyncio.to_thread(self._generate, job, cancelled)
            for piece in pieces:
                yield piece
                await asyncio.sleep(0)
            reason = str(pieces[-1].finish_reason)
        finally:
            cancelled.event.set()
            self.running -= 1
            self.finished[reason] = self.finished.get(reason, 0) + 1

    def _generate(self, job: Job, cancelled: _Cancelled) -> list[Piece]:
        s, tap = job.sampling, _Tap()
        if s.seed is not None:
            torch.manual_seed(s.seed)
        drawing = {"do_sample": True, "temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k}
        out = self.kv.generate(
            job.input_ids,
            max_new_tokens=s.max_new_tokens,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([tap]),
            stopping_criteria=StoppingCriteriaList([cancelled]),
            **(drawing if s.temperature > 0 else {"do_sample": False}),
            **job.settings,
        )
        ends = out.token_ids and out.token_ids[-1] == self.kv.tokenizer.eos_token_id
        tokens = [self._token(i, tap.scores[n], s.logprobs) for n, i in enumerate(out.token_ids)]
        pieces, said = [], ""
        for n, token in enumerate(tokens):
            text = self.kv.tokenizer.decode(out.token_ids[: n + 1], skip_special_tokens=True)
            found = [text.index(stop) + len(stop) * s.keep_stop for stop in s.stop if stop in text]
            end = min(found) if found else len(text)
            pieces.append(Piece(text[len(said) : end], (token,), "stop" if found else None))
            said = text
            if found:
                break
        reason = pieces[-1].finish_reason or ("eos" if ends else "length")
        return [*pieces[:-1], Piece(pieces[-1].text, pieces[-1].tokens, reason, out.report, out.plan)]

    def _token(self, token: int, scores: torch.Tensor, top: int | None) -> Token:
        if top is None:
            return Token(token, self.kv.tokenizer.decode([token]))
        best = scores.topk(top) if top else None
        ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True) if best is not None else ()
        most = tuple((i, self.kv.tokenizer.decode([i]), p) for i, p in ranked)
        return Token(token, self.kv.tokenizer.decode([token]), float(scores[token]), most)

    def stats(self) -> ServiceStats:
        return ServiceStats(0, 0, self.running, 1, self.draining, dict(self.finished))

    async def drain(self, timeout_s: float) -> bool:
        self.draining = True
        return True


class ScriptedService:
    """Says `texts`, one piece each, whatever it is asked: what a model says cannot be ordered, how it is read can."""

    def __init__(self, texts: Sequence[str] = (), error: Exception | None = None) -> None:
        self.texts, self.error = list(texts), error
        self.draining = False
        self.jobs: list[Job] = []

    def submit(self, job: Job) -> AsyncIterator[Piece]:
        self.jobs.append(job)
        return self._answer(job)

    async def _answer(self, job: Job) -> AsyncIterator[Piece]:
        for text in self.texts:
            yield Piece(text, (Token(5, text, -0.5),))
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        report = ReuseReport(len(job.input_ids), fresh_tokens=len(job.input_ids))
        yield Piece("", (), "eos", report)

    def stats(self) -> ServiceStats:
        return ServiceStats(0, 0, 0, 1, self.draining)

    async def drain(self, timeout_s: float) -> bool:
        return True
