"""What a traffic showed: time to first token, reuse, and truth, per system and for COLD and WARM requests apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from compare import mcnemar, paired_bootstrap, spread
from record import rounded
from serving import FULL, PREFIX, Outcome

MIXES = ("cold", "warm", "all")
Rows = dict[str, list[Outcome]]  # by system, all over the same requests


def report(results: Sequence[Outcome], benchmark: str) -> dict[str, Any]:
    """Prints tables; returns all figures. Requests that a system lacks are left out for all.

    Ends the program if there is nothing to report, or results of several models.
    """
    models = sorted({r.model for r in results})
    if len(models) != 1:
        raise SystemExit(f"results of one model can be reported at a time, not of {len(models)}: {models}")
    figures: dict[str, Any] = {"benchmark": benchmark}
    everything = by_system(results)
    sources = list(dict.fromkeys(r.source for r in results))
    for source in [*sources, *(["all"] if len(sources) > 1 else [])]:
        rows = {s: [r for r in rs if source in (r.source, "all")] for s, rs in everything.items()}
        if any(rows.values()):
            figures[source] = source_figures(rows)
            show(figures[source], source)
    found: dict[str, Any] = rounded(figures)
    return found


def by_system(results: Sequence[Outcome]) -> Rows:
    """Outcomes of the requests that every system has, in one order. Systems of a second dtype carry its name."""
    first = results[0].dtype if results else ""
    found: dict[str, dict[str, Outcome]] = defaultdict(dict)
    for r in results:
        found[r.system if r.dtype == first else f"{r.system}, {r.dtype}"][r.request] = r
    common = set.intersection(*(set(rows) for rows in found.values())) if found else set()
    order = [name for name in next(iter(found.values()), {}) if name in common]
    return {system: [rows[name] for name in order] for system, rows in found.items()}


def source_figures(rows: Rows) -> dict[str, Any]:
    """All figures of one source."""
    first = next(iter(rows.values()))
    mixes = {mix: [i for i, r in enumerate(first) if mix in ("all", "warm" if r.warm else "cold")] for mix in MIXES}
    return {
        "traffic": traffic_figures(first),
        **{
            mix: {s: system_figures(s, {k: [rs[i] for i in at] for k, rs in rows.items()}) for s in rows}
            for mix, at in mixes.items()
            if at
        },
    }


def traffic_figures(rows: Sequence[Outcome]) -> dict[str, Any]:
    """What the requests are, whatever serves them: their mix, what could be reused, and what guessing would give."""
    tokens = sum(r.prompt_tokens for r in rows)
    asked = [r for r in rows if r.right is not None]
    return {
        "requests": len(rows),
        "cold": sum(not r.warm for r in rows),
        "warm": sum(r.warm for r in rows),
        "prompt_tokens": tokens / len(rows),
        "token_overlap": sum(r.overlap_tokens for r in rows) / tokens,
        "ideal_reuse": sum(r.ideal_tokens for r in rows) / tokens,
        "ideal_prefix_reuse": sum(r.ideal_prefix_tokens for r in rows) / tokens,
        "chance": float(np.mean([1 / r.options for r in asked])) if asked else None,
        "pick_mentioned": float(np.mean([picked(r) for r in asked])) if asked else None,
    }


def picked(r: Outcome) -> float:
    """Expected score of who picks the option that the question mentions, and guesses among several or none."""
    candidates = r.mentioned or tuple(range(r.options))
    return (r.right in candidates) / len(candidates)


def system_figures(system: str, rows: Rows) -> dict[str, Any]:
    """One system beside the full prefill and prefix caching."""
    ours = rows[system]
    ttft = np.array([r.ttft_s for r in ours])
    tokens = sum(r.prompt_tokens for r in ours)
    kinds = ("exact", "continued", "moved", "repaired", "fresh")
    return {
        "ttft_mean_s": float(ttft.mean()),
        "ttft_p50_s": float(np.quantile(ttft, 0.5)),
        "ttft_p95_s": float(np.quantile(ttft, 0.95)),
        "over_full": _ratio(rows, FULL, ttft),
        "over_prefix": _ratio(rows, PREFIX, ttft),
        **{kind: sum(getattr(r, f"{kind}_tokens") for r in ours) / tokens for kind in kinds},
        "charged": float(np.mean([r.charged for r in ours])),
        "reuse_histogram": np.histogram([r.reused_share for r in ours], bins=10, range=(0, 1))[0].tolist(),
        "kl": spread([r.kl for r in ours]),
        "same_token": float(np.mean([r.same_token for r in ours])),
        "fallbacks": sum(r.fallback is not None for r in ours) if system != FULL else 0,
        **task_figures(ours, rows.get(FULL, [])),
    }


def _ratio(rows: Rows, other: str, ttft: Any) -> float | None:
    """How many times faster in the mean than another system."""
    return float(np.mean([r.ttft_s for r in rows[other]]) / ttft.mean()) if other in rows else None


def task_figures(ours: Sequence[Outcome], full: Sequence[Outcome]) -> dict[str, Any]:
    """Answers: right ones, expected texts, agreement with the full prefill's choice, McNemar's p against it."""
    asked = [i for i, r in enumerate(ours) if r.right is not None]
    matched = [r.matched for r in ours if r.matched is not None]
    found: dict[str, Any] = {"exact_match": float(np.mean(matched))} if matched else {}
    if not asked:
        return found
    right = [ours[i].choice == ours[i].right for i in asked]
    found["accuracy"] = float(np.mean(right))
    if full:
        full_right = [full[i].choice == full[i].right for i in asked]
        difference = paired_bootstrap(np.array(right, float), np.array(full_right, float), np.mean)
        found["agreement"] = float(np.mean([ours[i].choice == full[i].choice for i in asked]))
        found["mcnemar_p"] = mcnemar(right, full_right)
        found["accuracy_difference"] = dict(zip(("mean", "low", "high"), difference, strict=True))
    return found


# --- showing ---------------------------------------------------------------------------------------------------------


def show(figures: dict[str, Any], source: str) -> None:
    """Prints the tables of one source to stderr, so that stdout holds the JSON line alone."""
    console = Console(width=150, stderr=True)
    about = figures["traffic"]
    console.print(
        f"[bold]{source}[/]: {about['requests']} requests, {about['cold']} COLD and {about['warm']} WARM, "
        f"{about['prompt_tokens']:,.0f} tokens each. Ideal reuse at any position {about['ideal_reuse']:.1%}, as a "
        f"prefix {about['ideal_prefix_reuse']:.1%}; token overlap with an earlier prompt {about['token_overlap']:.1%}."
    )
    if about["chance"] is not None:
        console.print(f"Chance {about['chance']:.1%}; pick what the report mentions {about['pick_mentioned']:.1%}.")
    for mix in MIXES:
        if mix in figures:
            console.print(_times(figures[mix], f"{source}, {mix}: time to first token and reuse"))
            console.print(_truths(figures[mix], f"{source}, {mix}: truth, against the full prefill"))


def _times(systems: dict[str, Any], title: str) -> Table:
    table = Table(title=title)
    for column in ("system", "mean s", "p50", "p95", "/full", "/prefix", "exact", "cont.", "moved", "rep.", "charged"):
        table.add_column(column, justify="left" if column == "system" else "right")
    table.add_column("by share reused, 0 to 100 %")
    for system, f in systems.items():
        table.add_row(
            system,
            *(f"{f[k]:.3f}" for k in ("ttft_mean_s", "ttft_p50_s", "ttft_p95_s")),
            *(_shown(f[k], "{:.2f}x") for k in ("over_full", "over_prefix")),
            *(f"{f[k]:.1%}" for k in ("exact", "continued", "moved", "repaired", "charged")),
            " ".join(str(n) if n else "." for n in f["reuse_histogram"]),
        )
    return table


def _truths(systems: dict[str, Any], title: str) -> Table:
    table = Table(title=title)
    for column in (
        "system",
        "KL mean",
        "p95",
        "worst",
        "token",
        "choice",
        "accuracy",
        "difference",
        "McNemar p",
        "match",
    ):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system, f in systems.items():
        d = f.get("accuracy_difference")
        table.add_row(
            system,
            *(f"{f['kl'][k]:.2g}" for k in ("mean", "p95", "worst")),
            f"{f['same_token']:.1%}",
            _shown(f.get("agreement"), "{:.1%}"),
            _shown(f.get("accuracy"), "{:.1%}"),
            f"{d['mean']:+.1%} [{d['low']:+.1%}, {d['high']:+.1%}]" if d else "-",
            _shown(f.get("mcnemar_p"), "{:.2f}"),
            _shown(f.get("exact_match"), "{:.1%}"),
        )
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def plot(results: Sequence[Outcome], path: Path) -> None:
    """Time to first token and share reused of every system, one row of axes per source, to `path` (.svg and .png)."""
    from drawing import pyplot, save

    everything = by_system(results)
    sources = list(dict.fromkeys(r.source for r in results))
    figure, axes = pyplot.subplots(len(sources), 2, figsize=(11, 3.4 * len(sources)), squeeze=False)
    for (times, shares), source in zip(axes, sources, strict=True):
        rows = {s: [r for r in rs if r.source == source] for s, rs in everything.items()}
        _plot_times(times, rows, source)
        _plot_shares(shares, rows, source)
    save(figure, path)


def _plot_times(axes: Any, rows: Rows, source: str) -> None:
    """Bars of the median, lines up to the 95th percentile."""
    for offset, (warm, colour) in enumerate(((False, "tab:blue"), (True, "tab:orange"))):
        seconds = {s: [r.ttft_s for r in rs if r.warm is warm] for s, rs in rows.items()}
        if not all(seconds.values()):
            continue
        middle = np.array([np.quantile(v, 0.5) for v in seconds.values()])
        high = np.array([np.quantile(v, 0.95) for v in seconds.values()])
        at = np.arange(len(seconds)) + 0.4 * offset - 0.2
        label = "WARM" if warm else "COLD"
        axes.barh(at, middle, 0.38, color=colour, label=label, xerr=[np.zeros_like(middle), high - middle])
    axes.set_yticks(np.arange(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set(xlabel="time to first token (s): median, line to p95", title=source)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)


def _plot_shares(axes: Any, rows: Rows, source: str) -> None:
    """Histograms of the share reused."""
    for system, found in rows.items():
        if system != FULL:
            shares = [r.reused_share for r in found]
            counts, edges = np.histogram(shares, bins=10, range=(0, 1))
            axes.stairs(counts, edges * 100, label=system)
    axes.set(xlabel="share of the prompt that was reused (%)", ylabel="requests", title=f"{source}: reuse")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
