"""The gate's curve: what the signs of a repair say about its measured error.

    kvboost bench gate FIT.jsonl ... --held-out TEST.jsonl ... [--plot docs/gate]

Reads results of `kvboost bench repair` (system `guided`, which records its signs). Fits log(KL) to the logarithms of
the signs on the first files, by least squares, and raises the intercept to the quantile `COVERAGE`. On the held-out
files it tells how often the estimate is exceeded, and what each bound would serve and refuse. Prints the constants that
stand in `kvboost.repair.gate`, and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from compare import Result
from kvboost.repair.gate import FLOOR
from repair import recorded

COVERAGE = 0.95
Floats = npt.NDArray[np.float64]


def features(results: list[Result], names: list[str]) -> tuple[Floats, Floats]:
    """Logarithms of the signs with a column of ones, [n, k + 1], and of the measured KL, [n]."""
    signs = np.array([[max(FLOOR, r.signs[name]) for name in names] for r in results])
    return np.column_stack([np.ones(len(results)), np.log(signs)]), np.log([max(FLOOR, r.kl) for r in results])


def fit(results: list[Result], names: list[str]) -> Floats:
    """Weights [k + 1], the intercept first; no sign may count against its meaning."""
    x, y = features(results, names)
    weights, *_ = np.linalg.lstsq(x, y, rcond=None)
    kept = [n for n, w in zip(names, weights[1:], strict=True) if w > 0]
    if len(kept) < len(names):
        smaller = dict(zip(kept, fit(results, kept)[1:], strict=True)) if kept else {}
        weights = np.array([0.0, *(smaller.get(n, 0.0) for n in names)])
    weights[0] = 0.0
    weights[0] = np.quantile(y - x @ weights, COVERAGE)
    return np.asarray(weights)


def curve(results: list[Result], names: list[str], weights: Floats) -> dict[str, Any]:
    """How often the estimate is exceeded, and what a bound serves: its share, mean, p99 and share above the bound."""
    x, y = features(results, names)
    estimate, kl = np.exp(x @ weights), np.exp(y)
    bounds = {}
    for bound in (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0):
        served = kl[estimate <= bound]
        pooled = np.where(estimate <= bound, kl, 0.0)  # what is refused is prefilled
        bounds[str(bound)] = {
            "served": len(served) / len(kl),
            "mean": float(pooled.mean()),
            "p99": float(np.quantile(pooled, 0.99)),
            "above": float((pooled > bound).mean()),
        }
    return {
        "prompts": len(kl),
        "exceeded": float((kl > estimate).mean()),
        "correlation": float(np.corrcoef(x @ weights, y)[0, 1]),
        "bounds": bounds,
    }


def show(found: dict[str, Any], title: str) -> None:
    """Prints a curve."""
    exceeded = f"estimate exceeded {found['exceeded']:.1%}, correlation of the logarithms {found['correlation']:.2f}"
    table = Table(title=f"{title}: {found['prompts']} prompts, {exceeded}")
    for column in ("bound", "served", "mean KL", "p99", "above the bound"):
        table.add_column(column, justify="right")
    for bound, r in found["bounds"].items():
        table.add_row(bound, f"{r['served']:.1%}", f"{r['mean']:.4f}", f"{r['p99']:.4f}", f"{r['above']:.1%}")
    Console(width=110, stderr=True).print(table)


def plot(results: list[Result], names: list[str], weights: Floats, path: Path) -> None:
    """Estimated against measured KL, to `path` (.svg and .png)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    x, y = features(results, names)
    figure, axes = pyplot.subplots(figsize=(6, 4.6))
    for context in sorted({r.context for r in results}):
        here = np.array([r.context == context for r in results])
        axes.loglog(np.exp(x @ weights)[here], np.exp(y)[here], ".", alpha=0.5, label=context)
    ends = [float(np.exp(x @ weights).min()), float(np.exp(x @ weights).max())]
    axes.plot(ends, ends, "k--", linewidth=1, label="measured = estimated")
    axes.set(xlabel="estimated upper bound of the KL (nat)", ylabel="measured KL (nat)", title="Held-out prompts")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=150)


def main() -> None:
    """Fits, judges, and ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fit", type=Path, nargs="+")
    parser.add_argument("--held-out", type=Path, nargs="+", required=True)
    parser.add_argument("--signs", nargs="+", default=["movement", "attended", "unexplained", "unrepaired"])
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    known, unseen = (
        [r for path in paths for r in recorded(path) if r.system == "guided" and r.signs]
        for paths in (arguments.fit, arguments.held_out)
    )
    weights = fit(known, arguments.signs)
    curves = {name: curve(rs, arguments.signs, weights) for name, rs in (("fitted", known), ("held out", unseen))}
    for name, found in curves.items():
        show(found, name)
    if arguments.plot:
        plot(unseen, arguments.signs, weights, arguments.plot)
    constants = dict(zip(["intercept", *arguments.signs], np.round(weights, 3).tolist(), strict=True))
    print(json.dumps({"benchmark": "gate", "coverage": COVERAGE, "weights": constants, **curves}))


if __name__ == "__main__":
    main()
