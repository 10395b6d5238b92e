"""Time to first token against a full prefill of the same prompt, at several lengths.

    kvboost bench speed [--model DIR] [--dtype float32|bfloat16] [--tokens 1024 2048 4096 8192] [--repeats 3]

Both sides run alternately in one process, back to back, so whatever the cache does after the first token is paid. A
side's time is the wall time of a whole call with `max_new_tokens=1`; ratios are medians over the repeats, each with
its own documents, head and order. Beside each ratio stand the KL divergence of the first token's distribution (full
prefill || ours) and the share of the time that is spent outside of the forwards. In the last row *full* is `guided`,
and *ours* the same rows computed without a probe or a gate.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from kvboost import KVBoost
from kvboost.config import Settings
from kvboost.hf.assembly import Assembly
from kvboost.hf.embedded import SMOLLM2, ensure
from kvboost.repair import STRATEGIES, Selection
from kvboost.repair.guided import select_guided
from prompts import DocumentSet, document_sets, encode, shuffled
from record import emit, versions

DOCUMENT_TOKENS = 300  # shorter in short prompts, so that there are at least six
ROW_SHARE = 0.15


def call(kv: KVBoost, ids: torch.Tensor, **settings: Any) -> tuple[float, torch.Tensor, Any]:
    """Wall seconds of one call, log-probabilities of the first token [V], report."""
    began = time.perf_counter()
    out = kv.generate(
        ids, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True, **settings
    )
    return time.perf_counter() - began, out.output.logits[0][0].float().log_softmax(-1), out.report


def requests(documents: DocumentSet, repeat: int, tokenizer: Any) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
    """The scenarios over one document set: prompt and settings. The first one computes what the others reuse."""
    rng = random.Random(repeat)
    natural = list(range(len(documents.documents)))
    stamps = [encode(f"[{rng.randrange(1000)}:{rng.randrange(60):02d}] ", tokenizer)[:, :6] for _ in range(2)]
    order = iter(orders(len(natural), rng, 5))
    epic = {"recompute_strategy": "epic", "gate": False}
    return {
        "nothing shared": (documents.prompt(natural), {}),
        "same prompt": (documents.prompt(natural), {}),
        "head changed, epic 8": (documents.prompt(natural, stamps[0]), epic),
        "head changed, balanced": (documents.prompt(natural, stamps[1]), {"fidelity": "balanced"}),
        "reordered, epic 8": (documents.prompt(next(order)), epic),
        "reordered, epic 15 %": (documents.prompt(next(order)), {**epic, "recompute_ratio": ROW_SHARE}),
        "reordered, guided 15 %": (documents.prompt(next(order)), {"risk_bound": 1e9, "recompute_ratio": ROW_SHARE}),
        "reordered, fast": (documents.prompt(next(order)), {"fidelity": "fast"}),
        "reordered, balanced": (documents.prompt(next(order)), {"fidelity": "balanced"}),
    }


def orders(count: int, rng: random.Random, wanted: int) -> list[list[int]]:
    """Different orders, so that no prompt is the continuation of an earlier one."""
    found: list[list[int]] = []
    while len(found) < wanted:
        order = shuffled(count, rng)
        if order not in found:
            found.append(order)
    return found


def measure(kv: KVBoost, tokenizer: Any, num_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """One row per scenario."""
    seen: dict[str, list[dict[str, float]]] = defaultdict(list)
    size = min(DOCUMENT_TOKENS, num_tokens // 7)
    for repeat, documents in enumerate(document_sets(tokenizer, num_tokens, size, repeats, seed=num_tokens)):
        kv.invalidate()
        for i, (name, (ids, settings)) in enumerate(requests(documents, repeat, tokenizer).items()):
            sides = [lambda: call(kv, ids, disable=True), lambda: call(kv, ids, **settings)]  # noqa: B023
            first = (repeat + i) % 2
            results = {side: sides[side]() for side in (first, 1 - first)}
            seen[name].append(compare(results[0], results[1], ids.shape[1]))
        seen["the rows of guided 15 %, no probe"].append(bare(kv, documents, repeat))
    return [summary(name, rows) for name, rows in seen.items()]


def bare(kv: KVBoost, documents: DocumentSet, repeat: int) -> dict[str, float]:
    """`guided` at 15 % against the same rows without choosing or judging them: what the probe costs in TTFT."""
    last = orders(len(documents.documents), random.Random(repeat + 1000), 2)
    results = []
    chosen: list[Selection] = []

    def record(assembly: Assembly, settings: Settings) -> Selection:
        chosen.append(select_guided(assembly, settings))
        return chosen[-1]

    def replay(assembly: Assembly, settings: Settings) -> Selection:
        return Selection(chosen[-1].rows)

    ids = documents.prompt(last[0])
    for strategy, gate, salt in ((record, True, "a"), (replay, False, "b")):
        call(kv, documents.prompt(list(range(len(documents.documents)))), cache_salt=salt)
        with mock.patch.dict(STRATEGIES, guided=strategy):
            results.append(call(kv, ids, cache_salt=salt, gate=gate, risk_bound=1e9, recompute_ratio=ROW_SHARE))
    return compare((results[0][0], results[1][1], None), results[1], ids.shape[1])


def compare(
    full: tuple[float, torch.Tensor, Any], ours: tuple[float, torch.Tensor, Any], size: int
) -> dict[str, float]:
    """Figures of one pair."""
    report = ours[2]
    outside_s = report.lookup_s + report.load_s + report.shift_s + report.select_s + report.capture_s
    computed = report.fresh_tokens + report.repaired_tokens
    return {
        "tokens": size,
        "full_s": full[0],
        "ours_s": ours[0],
        "speedup": full[0] / ours[0],
        "computed": computed,
        "outside_share": outside_s / ours[0],
        "charged": report.charged_budget,
        "escalations": float(report.escalations),
        "prefilled": float(report.fallback is not None),
        "kl": (full[1].exp() * (full[1] - ours[1])).sum().item(),
        "agree": float(full[1].argmax() == ours[1].argmax()),
    }


def summary(name: str, rows: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over the repeats; KL is the mean and the worst."""
    medians = {key: statistics.median(r[key] for r in rows) for key in rows[0]}
    return {
        "scenario": name,
        **medians,
        "kl": statistics.mean(r["kl"] for r in rows),
        "kl_worst": max(r["kl"] for r in rows),
        "agree": statistics.mean(r["agree"] for r in rows),
        "repeats": len(rows),
    }


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Prints the table."""
    table = Table(title=title)
    for column in ("scenario", "tokens", "computed", "full s", "ours s", "speed-up", "outside", "KL", "worst", "top-1"):
        table.add_column(column, justify="left" if column == "scenario" else "right")
    for r in rows:
        table.add_row(
            r["scenario"],
            f"{r['tokens']:.0f}",
            f"{r['computed']:.0f}",
            f"{r['full_s']:.2f}",
            f"{r['ours_s']:.2f}",
            f"{r['speedup']:.2f}x",
            f"{r['outside_share']:.0%}",
            f"{r['kl']:.4f}",
            f"{r['kl_worst']:.4f}",
            f"{r['agree']:.0%}",
        )
    Console(width=120).print(table)


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """TTFT over prompt length, one line per scenario and the full prefill, to `path` (.svg and .png)."""
    from drawing import pyplot, save

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    full = [r for r in rows if r["scenario"] == "nothing shared"]
    axes.plot([r["tokens"] for r in full], [r["full_s"] for r in full], "k--o", label="full prefill")
    for name in dict.fromkeys(r["scenario"] for r in rows):
        line = [r for r in rows if r["scenario"] == name]
        axes.plot([r["tokens"] for r in line], [r["ours_s"] for r in line], "o-", label=name)
    axes.set(xlabel="prompt length (tokens)", ylabel="time to first token (s)", title=title, yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


def recorded_rows(path: Path, dtype: str) -> list[dict[str, Any]]:
    """All rows of one dtype in a results file, by length."""
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted((r for run in runs if run["dtype"] == dtype for r in run["rows"]), key=lambda r: r["tokens"])


def main() -> None:
    """Runs the benchmark and ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plot", type=Path, help="plot all runs in --out, as .svg and .png")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kv = KVBoost.from_pretrained(arguments.model or ensure(SMOLLM2), dtype=getattr(torch, arguments.dtype))
    call(kv, torch.arange(5, 300)[None])  # warms up allocator and kernels
    rows = []
    for num_tokens in arguments.tokens:
        measured = measure(kv, kv.tokenizer, num_tokens, arguments.repeats)
        show(measured, f"{num_tokens} tokens, {arguments.dtype}, {arguments.threads} threads, {platform.machine()} CPU")
        rows += measured
    result = {
        "benchmark": "speed",
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "versions": versions(),
        "rows": [{k: round(v, 5) if isinstance(v, float) else v for k, v in r.items()} for r in rows],
    }
    emit(result, arguments.out)
    if arguments.plot:
        recorded = recorded_rows(arguments.out, arguments.dtype) if arguments.out else rows
        plot(recorded, arguments.plot, f"SmolLM2-135M, {arguments.dtype}, {arguments.threads} CPU threads")


if __name__ == "__main__":
    main()
