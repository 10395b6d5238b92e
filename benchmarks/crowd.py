"""Output tokens per second of the service with one client and with many, and whether a crowd changes an answer.

    kvboost bench crowd [--clients 1 4 16] [--new-tokens 128] [--prompt-tokens 200] [--rounds 3] [--dtype bfloat16]

Every client asks one prompt of its own, greedily, and nothing of it is cached; the time is from the first submission to
the last token, prefills included. The numbers of clients alternate in one process. Each answer is compared with that to
the same prompt alone; where they part, the lead of the token that was alone chosen (nat) tells how near a tie it was.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvboost import KVBoost
from kvboost.hf.embedded import SMOLLM2, ensure
from kvboost.serving import Job, Sampling, Token
from kvboost.serving.scheduler import Scheduler
from prompts import DATA, encode
from record import emit, rounded, versions

Ids = tuple[int, ...]
Answer = tuple[Token, ...]


def make_prompts(tokenizer: Any, count: int, size: int) -> list[Ids]:
    """Pieces of different lines of the shared logs and code, `size` tokens each, with nothing in common."""
    text = (DATA / "buglocal.jsonl").read_text(encoding="utf-8")
    ids = encode(text[: 40 * count * size], tokenizer)[0].tolist()
    starts = random.Random(0).sample(range(0, len(ids) - size, size), count)
    return [tuple(ids[start : start + size]) for start in starts]


async def answer(service: Scheduler, prompt: Ids, new_tokens: int, name: str) -> Answer:
    """The tokens of one greedy answer, each with the two most likely ones; nothing is served from the cache."""
    sampling = Sampling(new_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    job = Job(name, prompt, sampling, settings={"cache_salt": name, "fidelity": "exact"})
    return tuple([token async for piece in service.submit(job) for token in piece.tokens])


def parting_lead(alone: Answer, found: Answer) -> float | None:
    """How far (nat) the first token that differs led the runner-up when alone; None where the answers are the same."""
    for mine, other in zip(alone, found, strict=True):
        if mine.id != other.id:
            return mine.top[0][2] - mine.top[1][2]
    return None


async def crowd(service: Scheduler, prompts: list[Ids], new_tokens: int, tag: str) -> tuple[float, list[Answer]]:
    """Tokens per second of clients that ask at once, and their answers."""
    began = time.perf_counter()
    found = await asyncio.gather(*(answer(service, p, new_tokens, f"{tag}-{i}") for i, p in enumerate(prompts)))
    return sum(map(len, found)) / (time.perf_counter() - began), list(found)


async def measure(kv: KVBoost, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per number of clients."""
    service = Scheduler(kv, slots=max(arguments.clients), queue=2 * max(arguments.clients))
    prompts = make_prompts(kv.tokenizer, max(arguments.clients), arguments.prompt_tokens)
    alone: dict[int, Answer] = {}
    rates: dict[int, list[float]] = {n: [] for n in arguments.clients}
    leads: dict[int, list[float | None]] = {n: [] for n in arguments.clients}
    await crowd(service, prompts[:1], 8, "kernels")
    for round_ in range(arguments.rounds):
        for n in arguments.clients:
            rate, answers = await crowd(service, prompts[:n], arguments.new_tokens, f"{round_}-{n}")
            rates[n].append(rate)
            for i, found in enumerate(answers):
                if i not in alone:
                    alone[i] = await answer(service, prompts[i], arguments.new_tokens, f"alone-{i}")
                leads[n].append(parting_lead(alone[i], found))
    await service.drain(30.0)
    base = statistics.median(rates[arguments.clients[0]])
    return [
        {
            "clients": n,
            "tokens_per_s": statistics.median(rates[n]),
            "ratio": statistics.median(rates[n]) / base,
            "answers": len(leads[n]),
            "same_answers": leads[n].count(None) / len(leads[n]),
            "largest_lead_where_they_part": max((lead for lead in leads[n] if lead is not None), default=None),
        }
        for n in arguments.clients
    ]


def main() -> None:
    """Runs the benchmark and ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kv = KVBoost.from_pretrained(ensure(SMOLLM2), dtype=getattr(torch, arguments.dtype))
    rows = asyncio.run(measure(kv, arguments))
    table = Table(title=f"{arguments.prompt_tokens} prompt tokens, {arguments.new_tokens} new ones")
    for column in ("clients", "output tokens/s", "ratio", "same answers as alone"):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(str(r["clients"]), f"{r['tokens_per_s']:.1f}", f"{r['ratio']:.2f}x", f"{r['same_answers']:.0%}")
    Console(stderr=True).print(table)
    emit({"benchmark": "crowd", "dtype": arguments.dtype, "versions": versions(), "rows": rounded(rows)}, arguments.out)


if __name__ == "__main__":
    main()
