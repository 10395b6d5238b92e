"""Strategies on the committed cases: KL(full prefill || ours) per token, at an equal charged budget.

    kvboost bench repair [--gemma] [--kinds code prose logs agents] [--split test] [--limit 40] [--out FILE]

Every case of `cells.json` is captured in three contexts and scored by every system: the full prefill's own 32 greedy
tokens, teacher-forced. One JSON line per (case, context, system) is appended to `--out`, and what stands there is not
measured again, so a run may be cut into shards (`--shard 0/2`) and stopped at any time. `--report` reads such files and
prints mean, p95 and worst per cell, and the paired bootstrap of `guided` against the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import cells
from compare import Result, report
from fidelity import CONTINUATION, divergence, full_prefill
from kvboost import KVBoost
from kvboost.hf.embedded import GEMMA3, SMOLLM2, ensure

BUDGET = 0.15
SYSTEMS: Mapping[str, dict[str, Any]] = {
    "none": {"recompute_strategy": "none", "gate": False},
    "epic": {"recompute_strategy": "epic", "recompute_ratio": BUDGET, "gate": False},
    "cacheblend": {
        "recompute_strategy": "cacheblend",
        "deviation_score": "values",
        "recompute_ratio": BUDGET,
        "gate": False,
    },
    "cacheblend-kl": {
        "recompute_strategy": "cacheblend",
        "deviation_score": "attention",
        "recompute_ratio": BUDGET,
        "gate": False,
    },
    "guided": {"recompute_strategy": "guided", "recompute_ratio": BUDGET, "risk_bound": 1e9},  # judged, never escalated
    "guided 5 %": {"recompute_strategy": "guided", "recompute_ratio": 0.05, "risk_bound": 1e9},
    "balanced": {"fidelity": "balanced"},
    "fast": {"fidelity": "fast"},
    "guided 40 %": {"recompute_strategy": "guided", "recompute_ratio": 0.4, "risk_bound": 1e9},
}


def measure(
    kv: KVBoost,
    reader: cells.Reader,
    case: cells.Case,
    systems: Mapping[str, dict[str, Any]],
    contexts: list[str],
    before: Callable[[str], None] = lambda system: None,
    begin: Callable[[], None] = lambda: None,
) -> Iterator[Result]:
    """All systems in all contexts on one case; the truth is computed once. `before` every system, `begin` a context."""
    ids = reader.prompt(case)
    answer, truth = full_prefill(kv, ids)
    for context in contexts:
        kv.invalidate()
        begin()
        for captured in reader.captures(case, context):
            kv.generate(captured, max_new_tokens=1, do_sample=False, fidelity="exact")
        for system, settings in systems.items():
            before(system)
            began = time.perf_counter()
            ours, seen = kv.score(ids, answer, **settings)
            yield Result(
                case=case.name,
                kind=case.kind,
                hard=case.template >= 0,
                context=context,
                system=system,
                charged=seen.charged_budget,
                moved=seen.moved_tokens,
                repaired=seen.repaired_tokens,
                seconds=time.perf_counter() - began,
                signs=dict(seen.signs),
                escalations=seen.escalations,
                **divergence(truth, ours),
            )


def recorded(path: Path | None) -> list[Result]:
    """The results that a file holds."""
    if path is None or not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def run(
    kv: KVBoost,
    cases: list[cells.Case],
    systems: Mapping[str, Any],
    contexts: list[str],
    out: Path | None,
    work: Callable[..., Iterator[Result]] = measure,
) -> list[Result]:
    """Measures what `out` does not hold yet and returns everything."""
    results = recorded(out)
    done = {(r.case, r.context, r.system) for r in results}
    reader = cells.Reader(kv.tokenizer)
    for number, case in enumerate(cases):
        missing = {s: v for s, v in systems.items() if any((case.name, c, s) not in done for c in contexts)}
        if not missing:
            continue
        fresh = list(work(kv, reader, case, missing, contexts))
        results += fresh
        if out is not None:
            with out.open("a") as file:
                file.writelines(json.dumps(r.as_json()) + "\n" for r in fresh)
        print(f"{number + 1} of {len(cases)}: {case.name}", file=sys.stderr, flush=True)
    return results


def make_parser(description: str | None, systems: Mapping[str, Any]) -> argparse.ArgumentParser:
    """The options of a benchmark that runs `systems` on the committed cases."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma", action="store_true", help="Gemma 3 270M instead of SmolLM2-135M-Instruct")
    parser.add_argument("--kinds", nargs="+", default=list(cells.KINDS), choices=cells.KINDS)
    parser.add_argument("--contexts", nargs="+", default=list(cells.CONTEXTS), choices=[*cells.CONTEXTS, cells.HEAD])
    parser.add_argument("--systems", nargs="+", default=list(systems), choices=list(systems))
    parser.add_argument("--split", default="test", choices=list(cells.SPLITS))
    parser.add_argument("--limit", type=int, help="cases per kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first case of a kind")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th case, from the i-th")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON lines, one per result")
    parser.add_argument("--report", type=Path, nargs="+", help="only report what these files hold")
    return parser


def results_of(
    arguments: argparse.Namespace, systems: Mapping[str, Any], work: Callable[..., Iterator[Result]] = measure
) -> list[Result]:
    """What the files of `--report` hold, or else what `work` measures."""
    if arguments.report:
        return [r for path in arguments.report for r in recorded(path)]
    torch.set_num_threads(arguments.threads)
    kv = KVBoost.from_pretrained(ensure(GEMMA3 if arguments.gemma else SMOLLM2), dtype=torch.float32)
    number, of = map(int, arguments.shard.split("/"))
    cases = [c for c in cells.load(arguments.kinds, [arguments.split], arguments.limit) if c.number >= arguments.first]
    chosen = {name: systems[name] for name in arguments.systems}
    return run(kv, cases[number::of], chosen, arguments.contexts, arguments.out, work)


def main() -> None:
    """Runs or reports, and ends with one JSON line."""
    results = results_of(make_parser(__doc__, SYSTEMS).parse_args(), SYSTEMS)
    print(json.dumps({"benchmark": "repair", "continuation": CONTINUATION, **report(results)}))


if __name__ == "__main__":
    main()
