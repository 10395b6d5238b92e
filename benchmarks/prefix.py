"""Time to first token behind an exact prefix against a full prefill of the same prompt, by the prefix's share of it.

    kvboost bench prefix [--tokens 2048] [--shares 0.0025 0.05 0.1 0.2 0.5 0.9] [--dtype float32|bfloat16] [--repeats 3]

Behind a cache SDPA is given a dense mask, so a row that continues costs more than a row of a fresh prefill. This shows
from which share on a prefix pays, and what `min_prefix_share` has to be; here it is 0, so that every prefix is taken.
Before every pair the cache is emptied and one request computes the prefix. Both sides alternate in one process; a
side's time is the wall time of a whole call with `max_new_tokens=1`. Ratios are medians over the repeats, each with its
own documents. Beside each stands the KL divergence of the first token's distribution (full prefill || ours).
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvboost import KVBoost
from kvboost.hf.embedded import SMOLLM2, ensure
from prompts import document_sets
from record import emit, rounded, versions
from speed import DOCUMENT_TOKENS, call, compare, summary

SETTINGS = {"min_prefix_share": 0.0, "fidelity": "exact"}


def measure(kv: KVBoost, num_tokens: int, shares: list[float], repeats: int) -> list[dict[str, Any]]:
    """One row per share. Raises `SystemExit` if a request did not reuse just the prefix: its time would say nothing."""
    rows = []
    size = min(DOCUMENT_TOKENS, num_tokens // 7)
    sets = document_sets(kv.tokenizer, num_tokens, size, repeats, seed=num_tokens)
    prompts = [s.prompt(list(range(len(s.documents)))) for s in sets]
    for i, share in enumerate(shares):
        pairs = [
            pair(kv, ids, max(1, round(share * ids.shape[1])), (repeat + i) % 2) for repeat, ids in enumerate(prompts)
        ]
        rows.append({"share": share, **summary(f"{share:.2%}", pairs)})
    return rows


def pair(kv: KVBoost, ids: torch.Tensor, prefix_tokens: int, first: int) -> dict[str, float]:
    """Figures of one prompt [1, T]; the full prefill goes first if `first` is 0."""
    kv.invalidate()
    call(kv, ids[:, :prefix_tokens])
    sides = [lambda: call(kv, ids, disable=True), lambda: call(kv, ids, **SETTINGS)]
    results = {side: sides[side]() for side in (first, 1 - first)}
    reused = results[1][2].exact_tokens
    if reused != prefix_tokens:
        raise SystemExit(f"{reused} tokens were reused where {prefix_tokens} were known: there is nothing to compare")
    return {"prefix": prefix_tokens, **compare(results[0], results[1], ids.shape[1])}


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Prints the table."""
    table = Table(title=title)
    for column in ("share", "prefix", "computed", "full s", "ours s", "speed-up", "KL", "worst", "top-1"):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            r["scenario"],
            f"{r['prefix']:.0f}",
            f"{r['computed']:.0f}",
            f"{r['full_s']:.2f}",
            f"{r['ours_s']:.2f}",
            f"{r['speedup']:.2f}x",
            f"{r['kl']:.1e}",
            f"{r['kl_worst']:.1e}",
            f"{r['agree']:.0%}",
        )
    Console(width=120).print(table)


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark and ends with one JSON line, which is returned too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0025, 0.05, 0.1, 0.2, 0.5, 0.9])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args(given)
    if not all(0 < share < 1 for share in arguments.shares):
        parser.error("every share must lie between 0 and 1")
    torch.set_num_threads(arguments.threads)
    kv = KVBoost.from_pretrained(arguments.model or ensure(SMOLLM2), dtype=getattr(torch, arguments.dtype))
    call(kv, torch.arange(5, 300)[None])  # warms up allocator and kernels
    rows = []
    for num_tokens in arguments.tokens:
        measured = measure(kv, num_tokens, arguments.shares, arguments.repeats)
        show(measured, f"{num_tokens} tokens, {arguments.dtype}, {arguments.threads} threads, {platform.machine()} CPU")
        rows += measured
    result = {
        "benchmark": "prefix",
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "continuation_block_tokens": kv.settings().continuation_block_tokens,
        "versions": versions(),
        "rows": rounded(rows),
    }
    emit(result, arguments.out)
    return result


if __name__ == "__main__":
    main()
