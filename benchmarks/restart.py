"""A new process on the same store: what it hits at once, and its time to first token against a full prefill.

    kvboost bench restart [--tokens 4096] [--redis-url redis://127.0.0.1:6379/0] [--codecs none k8v4]

For every store (a temporary directory; with `--redis-url` that server too, whose records of an earlier run count as
well unless it is empty) and codec: one process answers prompts and ends. The prompts that follow are planned in it
first, which is the *warm* hit rate, and then in a new process, whose own memory is empty: *restarted*. There each is
answered by both sides alternately, every one for the first time, so all its rows come from disk or Redis. Ends with
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvboost import KVBoost
from kvboost.hf.embedded import SMOLLM2, ensure
from kvboost.types import Kind
from prompts import document_sets, encode
from record import emit, rounded, versions
from speed import call, compare, orders

FLUSH_S = 120.0


def follow_ups(kv: KVBoost, num_tokens: int, repeats: int) -> tuple[list[torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """Prompts that are answered before the restart, and named ones that follow."""
    known, following = [], []
    for repeat, documents in enumerate(document_sets(kv.tokenizer, num_tokens, 300, repeats, seed=num_tokens)):
        rng = random.Random(repeat)
        natural = list(range(len(documents.documents)))
        stamp = encode(f"[{rng.randrange(1000)}:{rng.randrange(60):02d}] ", kv.tokenizer)[:, :6]
        known.append(documents.prompt(natural))
        following += [
            ("same prompt", documents.prompt(natural)),
            ("head changed", documents.prompt(natural, stamp)),
            ("reordered", documents.prompt(orders(len(natural), rng, 1)[0])),
        ]
    return known, following


def found(kv: KVBoost, prompts: list[tuple[str, torch.Tensor]]) -> list[float]:
    """Share of each prompt that a plan would reuse now."""
    plans = [kv.plan(ids) for _, ids in prompts]
    return [1 - plan.count(Kind.FRESH) / plan.num_tokens for plan in plans]


def warm(kv: KVBoost, arguments: argparse.Namespace) -> dict[str, Any]:
    """Before the restart."""
    known, following = follow_ups(kv, arguments.tokens, arguments.repeats)
    for ids in known:
        call(kv, ids)
    began = time.perf_counter()
    if not kv.flush(FLUSH_S):
        raise SystemExit(f"the slower tiers did not take everything within {FLUSH_S:.0f} s")
    return {"found": found(kv, following), "flush_s": time.perf_counter() - began}


def restarted(kv: KVBoost, arguments: argparse.Namespace) -> dict[str, Any]:
    """After it."""
    following = follow_ups(kv, arguments.tokens, arguments.repeats)[1]
    shares = found(kv, following)
    call(kv, torch.arange(5, 300)[None], cache_salt="kernels")
    rows = []
    for i, (name, ids) in enumerate(following):
        kv.store.tiers[0].delete()
        sides = [lambda: call(kv, ids, disable=True), lambda: call(kv, ids)]  # noqa: B023
        results = {side: sides[side]() for side in (i % 2, 1 - i % 2)}
        report = results[1][2]
        pair = compare(results[0], results[1], ids.shape[1])
        rows.append({"scenario": name, **pair, "load_s": report.load_s, "lookup_s": report.lookup_s})
    tier = kv.store.tiers[1]
    return {"found": shares, "rows": rows, "errors": dict(tier.stats().errors), "bytes": tier.stats().bytes_used}


def child(step: str, arguments: argparse.Namespace, **store: Any) -> dict[str, Any]:
    """Runs one step in a process of its own."""
    command = [sys.executable, __file__, "--step", step, "--store", json.dumps(store)]
    for name in ("tokens", "repeats", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(arguments: argparse.Namespace, **store: Any) -> dict[str, Any]:
    """Both processes over one store."""
    before, after = child("warm", arguments, **store), child("restarted", arguments, **store)
    names = dict.fromkeys(r["scenario"] for r in after["rows"])
    by_name = {n: [r for r in after["rows"] if r["scenario"] == n] for n in names}
    medians = {
        n: {
            k: statistics.median(r[k] for r in rows)
            for k in ("full_s", "ours_s", "speedup", "load_s", "lookup_s", "kl")
        }
        for n, rows in by_name.items()
    }
    return {
        "warm_hit_rate": statistics.mean(before["found"]),
        "restarted_hit_rate": statistics.mean(after["found"]),
        "flush_s": before["flush_s"],
        "bytes": after["bytes"],
        "errors": after["errors"],
        "scenarios": medians,
    }


def show(results: dict[str, dict[str, Any]], tokens: int) -> None:
    """Prints the table."""
    table = Table(title=f"first answers of a new process, {tokens} tokens")
    for column in ("store", "hits warm", "restarted", "scenario", "full s", "ours s", "load s", "speed-up", "KL"):
        table.add_column(column, justify="left" if column in ("store", "scenario") else "right")
    for name, r in results.items():
        for scenario, m in r["scenarios"].items():
            rates = (f"{r['warm_hit_rate']:.1%}", f"{r['restarted_hit_rate']:.1%}")
            figures = (f"{m['full_s']:.2f}", f"{m['ours_s']:.2f}", f"{m['load_s']:.2f}", f"{m['speedup']:.1f}x")
            table.add_row(name, *rates, scenario, *figures, f"{m['kl']:.4f}")
    Console(width=120, stderr=True).print(table)


def main() -> None:
    """Runs the benchmark, or one step of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--codecs", nargs="+", default=["none", "k8v4"])
    parser.add_argument("--redis-url", help="measure this server too")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    parser.add_argument("--step", choices=["warm", "restarted"], help=argparse.SUPPRESS)
    parser.add_argument("--store", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        torch.set_num_threads(arguments.threads)
        with KVBoost.from_pretrained(ensure(SMOLLM2), dtype=torch.float32, **arguments.store) as kv:
            print(json.dumps({"warm": warm, "restarted": restarted}[arguments.step](kv, arguments)))
        return
    results = {}
    for codec in arguments.codecs:
        with tempfile.TemporaryDirectory() as directory:
            results[f"disk, {codec}"] = measure(arguments, codec=codec, disk_directory=directory)
        if arguments.redis_url:
            results[f"redis, {codec}"] = measure(
                arguments, codec=codec, redis_url=arguments.redis_url, hash_secret=f"restart {codec}"
            )
    show(results, arguments.tokens)
    emit(
        {"benchmark": "restart", "tokens": arguments.tokens, "versions": versions(), **rounded(results)}, arguments.out
    )


if __name__ == "__main__":
    main()
