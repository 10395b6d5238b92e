"""The gate's curve: what the signs of a repair say about its measured error, and what each fidelity serves.

    kvboost bench gate FIT.jsonl ... --held-out TEST.jsonl ... [--first-tokens TRAFFIC.jsonl ...] [--plot docs/gate]

Reads results of `kvboost bench repair`. On the first files (systems `guided` at 5, 15 and 40 %, which record their
signs) log(KL) is fitted to the logarithms of the signs by least squares, the intercept is raised to the quantile
`COVERAGE`, and every prompt is walked up the budgets of each fidelity. On the held-out files (systems `guided`,
`balanced`, `fast`) it tells how often the shipped estimate is exceeded, and what `balanced` and `fast` really served:
at which error, how often more than the first budget was computed, how often all. With results of `bench buglocal` and
`bench workloads` it tells the error of all these prompts together, the COLD requests among them left out or not. Ends
with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from compare import Result, spread
from kvboost.repair.gate import BOUNDS, BUDGETS, FLOOR, INTERCEPT, WEIGHTS
from repair import recorded
from serving import Outcome
from serving import recorded as recorded_requests

COVERAGE = 0.95
AT_BUDGET = {0.05: "guided 5 %", 0.15: "guided", 0.4: "guided 40 %"}
NAMES = list(WEIGHTS)
Floats = npt.NDArray[np.float64]


def features(results: list[Result]) -> tuple[Floats, Floats]:
    """Logarithms of the signs with a column of ones, [n, k + 1], and of the measured KL, [n]."""
    signs = np.array([[max(FLOOR, r.signs[name]) for name in NAMES] for r in results])
    return np.column_stack([np.ones(len(results)), np.log(signs)]), np.log([max(FLOOR, r.kl) for r in results])


def fit(results: list[Result]) -> Floats:
    """Weights [k + 1], the intercept first."""
    x, y = features(results)
    weights, *_ = np.linalg.lstsq(x, y, rcond=None)
    weights[0] += np.quantile(y - x @ weights, COVERAGE)
    return np.asarray(weights)


def served(results: list[Result], weights: Floats, fidelity: str) -> dict[str, float]:
    """Every prompt walked up the ladder of its fidelity; what is above the bound at the last one is prefilled.

    All documents are long enough to begin with the first budget, see `RUN_TOKENS` of the gate.
    """
    x, _ = features(results)
    estimates = {(r.case, r.context, r.system): e for r, e in zip(results, np.exp(x @ weights), strict=True)}
    measured = {(r.case, r.context, r.system): r.kl for r in results}
    kl, escalations, prefilled = [], [], []
    for prompt in sorted({key[:2] for key in measured}):
        steps = [(*prompt, AT_BUDGET[b]) for b in BUDGETS[fidelity]]
        if not all(s in measured for s in steps):
            continue
        good = [i for i, s in enumerate(steps) if estimates[s] <= BOUNDS[fidelity]]
        kl.append(measured[steps[good[0]]] if good else 0.0)
        escalations.append(good[0] if good else len(steps))
        prefilled.append(not good)
    return {
        **errors(kl, fidelity),
        "escalated": float(np.mean(np.array(escalations) > 0)),
        "prefilled": float(np.mean(prefilled)),
    }


def measured(results: list[Result], weights: Floats, fidelity: str) -> dict[str, float]:
    """What a fidelity really served, the gate's own escalations and fallbacks included, and its estimates of that."""
    rows = [r for r in results if r.system == fidelity]
    if not rows:
        return {}
    return {
        **errors([r.kl for r in rows], fidelity),
        "escalated": float(np.mean([bool(r.escalations) for r in rows])),
        "prefilled": float(np.mean([not r.moved for r in rows])),
        **curve(rows, weights),
    }


def pooled(results: list[Result], requests: list[Outcome], fidelity: str) -> dict[str, dict[str, float]]:
    """Errors of held-out prompts (32 tokens) and of WARM, then of all requests (first tokens) taken together."""
    held_out = [r.kl for r in results if r.system == fidelity]
    served = [r for r in requests if r.system == f"guided, {fidelity}"]
    return {
        "warm": errors([*held_out, *(r.kl for r in served if r.warm)], fidelity),
        "all": errors([*held_out, *(r.kl for r in served)], fidelity),
    }


def errors(kl: list[float], fidelity: str) -> dict[str, float]:
    """The spread of some errors, and how many are above the bound of a fidelity."""
    return {
        "prompts": len(kl),
        **spread(kl),
        "p99": float(np.quantile(kl, 0.99)),
        "above_bound": float(np.mean(np.array(kl) > BOUNDS[fidelity])),
    }


def curve(results: list[Result], weights: Floats) -> dict[str, float]:
    """How the estimate and the measured error of served prompts go together."""
    x, y = features([r for r in results if r.signs and r.moved])
    line = x @ weights
    return {
        "results": len(y),
        "exceeded": float((y > line).mean()),
        "correlation": float(np.corrcoef(line, y)[0, 1]),
    }


def show(found: dict[str, Any], title: str) -> None:
    """Prints what each fidelity serves."""
    exceeded = f"estimate exceeded {found['exceeded']:.1%}, correlation of the logarithms {found['correlation']:.2f}"
    show_errors(found["fidelity"], f"{title}: {found['results']} results, {exceeded}")


def show_errors(found: dict[str, dict[str, float]], title: str) -> None:
    """Prints the errors of each fidelity, and how it got there where that is known."""
    table = Table(title=title)
    columns = ("mean", "p95", "p99", "worst", "above_bound", "escalated", "prefilled")
    for column in ("fidelity", "bound", "prompts", *columns):
        table.add_column(column.replace("_", " "), justify="left" if column == "fidelity" else "right")
    for name, r in found.items():
        if r:
            shown = [f"{r[c]:.4f}" if c in columns[:4] else f"{r[c]:.1%}" for c in columns if c in r]
            table.add_row(name, str(BOUNDS[name]), str(r["prompts"]), *shown)
    Console(width=120, stderr=True).print(table)


def plot(results: list[Result], weights: Floats, path: Path) -> None:
    """Estimated against measured KL, to `path` (.svg and .png)."""
    from drawing import pyplot, save

    figure, axes = pyplot.subplots(figsize=(6, 4.6))
    served = [r for r in results if r.signs and r.moved]
    x, y = features(served)
    for system in dict.fromkeys(r.system for r in served):
        here = np.array([r.system == system for r in served])
        axes.loglog(np.exp(x @ weights)[here], np.exp(y)[here], ".", alpha=0.5, label=system)
    ends = [float(np.exp(x @ weights).min()), float(np.exp(x @ weights).max())]
    axes.plot(ends, ends, "k--", linewidth=1, label="measured = estimated")
    for name, bound in BOUNDS.items():
        axes.axvline(bound, linestyle=":", color="grey")
        axes.annotate(name, (bound, float(np.exp(y).min())), fontsize=8)
    axes.set(xlabel="estimated upper bound of the KL (nat)", ylabel="measured KL (nat)", title="Held-out prompts")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


def main() -> None:
    """Fits, judges, and ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fit", type=Path, nargs="+")
    parser.add_argument("--held-out", type=Path, nargs="+", required=True)
    parser.add_argument("--first-tokens", type=Path, nargs="+", default=[], help="results of traffic, to pool")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    known, unseen = (
        [replace(r, case=f"{p.stem}: {r.case}") for p in paths for r in recorded(p)]  # one file per model
        for paths in (arguments.fit, arguments.held_out)
    )
    known = [r for r in known if r.system in AT_BUDGET.values()]
    fitted = fit(known)
    shipped = np.array([INTERCEPT, *WEIGHTS.values()])
    curves = {
        "fitted": {**curve(known, shipped), "fidelity": {f: served(known, shipped, f) for f in BOUNDS}},
        "held out": {**curve(unseen, shipped), "fidelity": {f: measured(unseen, shipped, f) for f in BOUNDS}},
    }
    for name, found in curves.items():
        show(found, name)
    together: dict[str, Any] = {}
    if arguments.first_tokens:
        requests = [r for path in arguments.first_tokens for r in recorded_requests(path)]
        together = {f: pooled(unseen, requests, f) for f in BOUNDS}
        for mix in ("warm", "all"):
            show_errors({f: together[f][mix] for f in BOUNDS}, f"held-out prompts and {mix} requests")
    if arguments.plot:
        plot(unseen, shipped, arguments.plot)
    constants = dict(zip(["intercept", *NAMES], np.round(fitted, 3).tolist(), strict=True))
    print(json.dumps({"benchmark": "gate", "coverage": COVERAGE, "fit": constants, **curves, "pooled": together}))


if __name__ == "__main__":
    main()
