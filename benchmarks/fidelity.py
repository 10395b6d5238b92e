"""How true reuse is, on real weights: KL(full prefill || ours) over the full prefill's own next 32 tokens.

    kvboost bench fidelity [--model DIR | --gemma] [--prompts 12] [--tokens 1500] [--dtype float32] [--out FILE]
    kvboost bench fidelity --report FILES --plot docs/fidelity

Documents are captured online, in one order, inside an ordinary request; then they are asked about in another order:
half of the prompts quote a passage and ask how it goes on, half ask about the order. In every other pair of prompts the
first document is left out (*one fewer*), so that rows move to the front of where they were. Each method scores
the same teacher-forced continuation: the 32 tokens that a full prefill generates greedily. *unshifted* serves moved
keys without rotating them: it shows what the shift is worth. `--report` reads the last line of each file instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from kvboost import KVBoost
from kvboost.hf.embedded import GEMMA3, SMOLLM2, ensure
from kvboost.shadow import kl_divergence
from prompts import ORDER_QUESTION, document_sets, encode, shuffled
from record import emit, versions

CONTINUATION = 32
SHOWN_FROM = 1e-7  # where the axis of a plot begins
METHODS: dict[str, dict[str, Any]] = {
    "unshifted keys": {"recompute_strategy": "none", "gate": False},
    "none": {"recompute_strategy": "none", "gate": False},
    "selective": {"recompute_strategy": "selective", "gate": False},
    "cacheblend": {"recompute_strategy": "cacheblend", "gate": False},
    "epic": {"recompute_strategy": "epic", "gate": False},
    "guided": {"recompute_strategy": "guided", "gate": False},
    "fast": {"fidelity": "fast"},
    "balanced": {"fidelity": "balanced"},
}


@contextlib.contextmanager
def unshifted() -> Iterator[None]:
    """Moved rows are copied as they were computed."""
    with mock.patch("kvboost.hf.load.make_rotation", return_value=None):
        yield


def divergence(truth: torch.Tensor, ours: torch.Tensor) -> dict[str, float]:
    """Mean KL over the continuation, share of equal top tokens, index of the first that differs."""
    same = truth.argmax(-1) == ours.argmax(-1)
    first = int((~same).nonzero()[0]) if not bool(same.all()) else len(same)
    return {
        "kl": kl_divergence(truth, ours).mean().item(),
        "top1": same.float().mean().item(),
        "first_divergence": float(first),
    }


def measure(kv: KVBoost, num_prompts: int, num_tokens: int) -> dict[str, list[dict[str, float]]]:
    """Per method, one result per prompt."""
    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number, documents in enumerate(document_sets(kv.tokenizer, num_tokens, 300, num_prompts, seed=1)):
        kv.invalidate()
        rng = random.Random(number)
        quoting = number % 2 == 0
        question = documents.quote(rng, kv.tokenizer) if quoting else encode(ORDER_QUESTION, kv.tokenizer)
        captured = documents.prompt(list(range(len(documents.documents))))
        kv.generate(captured, max_new_tokens=1, do_sample=False)
        fewer = number % 4 >= 2
        order = [i for i in shuffled(len(documents.documents), rng) if not (fewer and i == 0)]
        moved = documents.prompt(order, question=question)
        for name, ids in (("exact hits only", captured), ("moved", moved)):
            answer, truth = full_prefill(kv, ids)
            methods = METHODS if name == "moved" else {name: {}}
            for method, settings in methods.items():
                with unshifted() if method == "unshifted keys" else contextlib.nullcontext():
                    ours, report = kv.score(ids, answer, **settings)
                charged = {"charged": report.charged_budget, "moved": float(report.moved_tokens)}
                result = divergence(truth, ours) | charged
                results[method].append(result)
                if name == "moved":
                    results[f"{method}; {'quoting' if quoting else 'order'}"].append(result)
                    results[f"{method}; {'one fewer' if fewer else 'same documents'}"].append(result)
        print(f"prompt {number + 1} of {num_prompts}", file=sys.stderr)
    return results


def full_prefill(kv: KVBoost, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The full prefill's own greedy tokens [1, 32], and its logits at each of them, float32 [32, V]."""
    out = kv.generate(
        ids,
        max_new_tokens=CONTINUATION,
        min_new_tokens=CONTINUATION,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        disable=True,
    )
    return torch.tensor([out.token_ids]), torch.cat(out.output.logits).float()


def summary(method: str, rows: list[dict[str, float]]) -> dict[str, Any]:
    """Mean, 95th percentile and worst KL; means of the rest."""
    kl = sorted(r["kl"] for r in rows)
    return {
        "method": method,
        "prompts": len(rows),
        "kl_mean": statistics.mean(kl),
        "kl_p95": kl[min(len(kl) - 1, int(0.95 * len(kl)))],
        "kl_worst": kl[-1],
        "top1": statistics.mean(r["top1"] for r in rows),
        "first_divergence": statistics.mean(r["first_divergence"] for r in rows),
        "charged": statistics.mean(r["charged"] for r in rows),
        "moved": statistics.mean(r["moved"] for r in rows),
    }


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Prints the table."""
    table = Table(title=title)
    for column in ("method", "prompts", "KL mean", "KL p95", "KL worst", "top-1", "first differs", "charged"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for r in rows:
        table.add_row(
            r["method"],
            str(r["prompts"]),
            *(f"{r[k]:.2g}" if r[k] < 1e-3 else f"{r[k]:.4f}" for k in ("kl_mean", "kl_p95", "kl_worst")),
            f"{r['top1']:.1%}",
            f"{r['first_divergence']:.1f} / {CONTINUATION}",
            f"{r['charged']:.1%}",
        )
    Console(width=120).print(table)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Mean KL of every method with its share of rows computed again; axes per result, to `path` (.svg and .png)."""
    from drawing import pyplot, save

    figure, axes = pyplot.subplots(1, len(results), figsize=(5.2 * len(results), 3.6), squeeze=False, sharex=True)
    for here, result in zip(axes[0], results, strict=True):
        rows = [r for r in result["rows"] if ";" not in r["method"]]  # without its parts
        for position, row in enumerate(rows):
            mean, worst = (max(row[k], SHOWN_FROM) for k in ("kl_mean", "kl_worst"))
            here.plot([mean, worst], [position, position], "-", color="tab:grey")
            here.plot([mean], [position], "o", color="tab:blue")
        here.set_yticks(range(len(rows)), [f"{r['method']}, {r['charged']:.0%}" for r in rows])
        here.invert_yaxis()
        here.set(xscale="log", xlabel="KL per token (nat): mean, line to the worst", title=result["model"])
        here.grid(axis="x", alpha=0.3)
    save(figure, path)


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark and prints its table."""
    torch.set_num_threads(arguments.threads)
    embedded = GEMMA3 if arguments.gemma else SMOLLM2
    kv = KVBoost.from_pretrained(arguments.model or ensure(embedded), dtype=getattr(torch, arguments.dtype))
    results = measure(kv, arguments.prompts, arguments.tokens)
    rows = [summary(method, values) for method, values in results.items()]
    name = arguments.model or embedded.name
    show(rows, f"{name}, {arguments.dtype}, reordered documents captured online, about {arguments.tokens} tokens")
    return {
        "benchmark": "fidelity",
        "model": Path(name).name,
        "dtype": arguments.dtype,
        "tokens": arguments.tokens,
        "versions": versions(),
        "rows": [{k: round(v, 7) if isinstance(v, float) else v for k, v in r.items()} for r in rows],
    }


def main() -> None:
    """Runs or reports, and ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--gemma", action="store_true", help="the embedded Gemma 3 270M instead")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    parser.add_argument("--report", type=Path, nargs="+", help="only report the last line of each of these files")
    parser.add_argument("--plot", type=Path, help="draw the results, as .svg and .png")
    arguments = parser.parse_args()
    if arguments.report:
        results = [json.loads(path.read_text().splitlines()[-1]) for path in arguments.report]
        for result in results:
            show(result["rows"], f"{result['model']}, {result['dtype']}, about {result['tokens']} tokens")
        print(json.dumps({"benchmark": "fidelity", "results": results}))
    else:
        results = [measured(arguments)]
        emit(results[0], arguments.out)
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
