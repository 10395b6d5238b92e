"""Promises of the service: what is answered, in what order, and that nothing is lost, stuck or shared by mistake."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from families import SUPPORTED_HERE, Family, build
from kvboost import KVBoost
from kvboost.serving import Job, Piece, Sampling
from kvboost.serving.scheduler import Scheduler
from scenario import engine, prompt

GREEDY = Sampling(max_new_tokens=8, temperature=0.0, ignore_eos=True)


def job(ids: torch.Tensor, sampling: Sampling = GREEDY, name: str = "job", **options: Any) -> Job:
    return Job(name, tuple(ids[0].tolist()), sampling, **options)


@contextmanager
def service(kv: KVBoost, **options: Any) -> Iterator[Scheduler]:
    scheduler = Scheduler(kv, **options)
    try:
        yield scheduler
    finally:
        scheduler.close()
        assert not scheduler._worker.is_alive(), "the worker hangs"


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work(), 60)

    return asyncio.run(bounded())


async def answer(scheduler: Scheduler, wanted: Job) -> list[Piece]:
    return [piece async for piece in scheduler.submit(wanted)]


def ids_of(pieces: list[Piece]) -> list[int]:
    return [token.id for piece in pieces for token in piece.tokens]


def served(kv: KVBoost, *jobs: Job, **options: Any) -> list[list[Piece]]:
    """The pieces of all jobs, submitted at once."""

    async def work() -> list[list[Piece]]:
        return await asyncio.gather(*(answer(scheduler, j) for j in jobs))

    with service(kv, **options) as scheduler:
        return run(work)


def generated(model: Any, ids: torch.Tensor, new_tokens: int = 8, **options: Any) -> list[int]:
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options
    )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", SUPPORTED_HERE, ids=lambda f: f.name)
def test_a_greedy_answer_is_the_one_of_generate(family: Family) -> None:
    model = build(family.name, family.attention[0])
    [pieces] = served(engine(model), job(prompt()))
    assert ids_of(pieces) == generated(model, prompt(), do_sample=False, eos_token_id=-1)
    assert pieces[-1].finish_reason == "length"
    assert [p.finish_reason for p in pieces[:-1]] == [None] * 8
