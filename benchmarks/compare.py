"""Results of systems on the same cases, compared: means and tails per cell, paired bootstrap, McNemar."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvboost.errors import InputError
from record import rounded

RESAMPLES = 4000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """One system on one case in one capture context."""

    case: str
    kind: str
    hard: bool
    context: str
    system: str
    charged: float
    moved: int
    repaired: int
    seconds: float
    kl: float
    top1: float
    first_divergence: float
    signs: dict[str, float] = field(default_factory=dict)  # what the gate saw
    escalations: int | None = None  # budgets that were not enough; results of early versions do not tell

    def as_json(self) -> dict[str, Any]:
        """Rounded, so that lines stay short."""
        found: dict[str, Any] = rounded(asdict(self))
        return found


def spread(kl: Sequence[float]) -> dict[str, float]:
    """Mean, p95 and worst."""
    values = np.asarray(kl)
    return {"mean": float(values.mean()), "p95": float(np.quantile(values, 0.95)), "worst": float(values.max())}


def paired_bootstrap(
    ours: Floats, theirs: Floats, statistic: Callable[[Floats], Any], cases: Sequence[str] | None = None, seed: int = 0
) -> tuple[float, float, float]:
    """The difference ours - theirs of a statistic, and its 95 % interval over resampled pairs.

    Pairs of the same of `cases` are drawn together: they are no independent evidence.
    """
    rng = np.random.default_rng(seed)
    _, owner = np.unique(np.arange(len(ours)) if cases is None else np.array(cases), return_inverse=True)
    members = [np.flatnonzero(owner == i) for i in range(owner.max() + 1)]

    def difference(picked: npt.NDArray[np.int64]) -> float:
        return float(statistic(ours[picked]) - statistic(theirs[picked]))

    draws = rng.integers(0, len(members), (RESAMPLES, len(members)))
    differences = [difference(np.concatenate([members[i] for i in draw])) for draw in draws]
    low, high = np.quantile(differences, [0.025, 0.975])
    return difference(np.arange(len(ours))), float(low), float(high)


def p95(values: Floats) -> float:
    """95th percentile, as `spread` takes it."""
    return float(np.quantile(values, 0.95))


def mcnemar(right: Sequence[bool], other_right: Sequence[bool]) -> float:
    """Two-sided exact p-value that two systems are right equally often on the same questions."""
    only_a = sum(a and not b for a, b in zip(right, other_right, strict=True))
    only_b = sum(b and not a for a, b in zip(right, other_right, strict=True))
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1)) / 2**n if n else 1.0
    return min(1.0, 2 * tail)


def by_system(results: Sequence[Result]) -> dict[str, dict[tuple[str, str], Result]]:
    """Results by system, then by (case, context); the cases that every system has."""
    found: dict[str, dict[tuple[str, str], Result]] = defaultdict(dict)
    for r in results:
        found[r.system][r.case, r.context] = r
    common = set.intersection(*(set(rows) for rows in found.values())) if found else set()
    return {system: {k: rows[k] for k in sorted(common)} for system, rows in found.items()}


def report(results: Sequence[Result], ours: str = "guided") -> dict[str, Any]:
    """Prints a table per capture context and per cell; returns all figures."""
    rows = by_system(results)
    common = [r for r in results if (r.case, r.context) in next(iter(rows.values()), {})]
    if not common:
        raise InputError("no case was measured with all of these systems; report fewer systems, or more files")
    contexts = sorted({r.context for r in common})
    figures: dict[str, Any] = {}
    for context in [*contexts, "all"]:
        here = {s: [r for r in rs.values() if context in (r.context, "all")] for s, rs in rows.items()}
        figures[context] = {s: _summary(rs) for s, rs in here.items()}
        _show(figures[context], f"{context}: {len(next(iter(here.values()), []))} prompts")
        if ours in here:
            figures[context + " against"] = _against(here, ours)
    figures["cells"] = {
        f"{kind}, {context}": {
            s: spread([r.kl for r in rs.values() if (r.kind, r.context) == (kind, context)]) for s, rs in rows.items()
        }
        for kind in sorted({r.kind for r in common})
        for context in contexts
    }
    return figures


def _summary(rows: Sequence[Result]) -> dict[str, float]:
    return {
        **spread([r.kl for r in rows]),
        "top1": float(np.mean([r.top1 for r in rows])),
        "charged": float(np.mean([r.charged for r in rows])),
        "seconds": float(np.median([r.seconds for r in rows])),
    }


def _against(rows: dict[str, list[Result]], ours: str) -> dict[str, Any]:
    mine, cases = np.array([r.kl for r in rows[ours]]), [r.case for r in rows[ours]]
    found = {}
    for system, theirs in rows.items():
        if system != ours:
            other = np.array([r.kl for r in theirs])
            found[system] = {
                "less": 1 - float(mine.mean() / other.mean()),
                "mean": paired_bootstrap(mine, other, np.mean, cases),
                "p95": paired_bootstrap(mine, other, p95, cases),
            }
    return found


def _show(rows: dict[str, dict[str, float]], title: str) -> None:
    table = Table(title=title)
    for column in ("system", "KL mean", "p95", "worst", "top-1", "charged", "s"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system, r in rows.items():
        figures = [f"{r[k]:.4f}" for k in ("mean", "p95", "worst")]
        table.add_row(system, *figures, f"{r['top1']:.1%}", f"{r['charged']:.1%}", f"{r['seconds']:.2f}")
    Console(width=110, stderr=True).print(table)
