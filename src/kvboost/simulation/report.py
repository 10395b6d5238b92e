"""What a simulation showed, as one self-contained page with a plot."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape

from kvboost.errors import InputError
from kvboost.simulation.breaks import BreakSummary
from kvboost.simulation.replay import BOUND, Cell

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --dim: #57606a; --line: #d0d7de }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0f1419; --dim: #9aa5b1; --line: #30363d } }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.35rem; margin: 0 } h2 { font-size: 1.05rem; margin: 1.75rem 0 .5rem } p { color: var(--dim) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top }
th { color: var(--dim); font-weight: 400 } .text { text-align: left }
code { font: .85rem/1.4 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap }
svg { max-width: 100%; height: auto; background: #fff; border-radius: 4px }
"""
REUSES = {"prefix": "prefix caching", "anywhere": "chunk reuse at any position"}
LABELS = {"lru": "LRU", "lfu": "LFU", "s3-fifo": "S3-FIFO", "gdsf": "GDSF", "importance": "KVBoost", BOUND: "bound"}


def render_page(
    title: str, facts: str, cells: Sequence[Cell], breaks: Sequence[BreakSummary], notes: Sequence[str], svg: str
) -> str:
    """A page without scripts or network. `facts` is a sentence about the trace, `notes` say what the figures are."""
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(facts)}</p>", svg]
    for reuse in dict.fromkeys(cell.reuse for cell in cells):
        head, *rows = hit_table([c for c in cells if c.reuse == reuse])
        body += [f"<h2>Hit tokens, {escape(REUSES[reuse])}</h2>", _table(head, rows)]
    if breaks:
        head, *rows = break_table(breaks)
        body += ["<h2>What ends common prefixes</h2>", _table(head, rows, text=(0, 3))]
        for row in breaks:
            example = f"{escape(row.example.before)}<br>{escape(row.example.after)}"
            body.append(f"<p>{escape(row.kind)}, request {row.example.request + 1}:</p><code>{example}</code>")
    body += [f"<p>{escape(note)}</p>" for note in notes]
    head_html = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head_html}</head>\n<body>{"".join(body)}</body></html>\n'


def hit_table(cells: Sequence[Cell]) -> list[list[str]]:
    """A head row, then a row per budget: share of the footprint, tokens, hit rate of every policy."""
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    rates = {(cell.share, cell.policy): f"{cell.hit_rate:.1%}" for cell in cells}
    budgets = {cell.share: cell.capacity_tokens for cell in cells}
    rows = [
        [f"{share:.0%}", f"{tokens:,}", *(rates.get((share, p), "") for p in policies)]
        for share, tokens in budgets.items()
    ]
    return [["budget", "tokens", *(LABELS[p] for p in policies)], *rows]


def break_table(breaks: Sequence[BreakSummary]) -> list[list[str]]:
    """A head row, then a row per kind of text."""
    rows = [[b.kind, f"{b.requests:,}", f"{b.lost_tokens:,}", b.remedy] for b in breaks]
    return [["text", "requests", "tokens lost", "what helps"], *rows]


def plot(cells: Sequence[Cell]) -> str:
    """Hit rate against budget as SVG. Raises `InputError` that says what to install if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise InputError('the report\'s plot needs matplotlib: pip install ".[bench]" in the checkout') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    reuses = list(dict.fromkeys(cell.reuse for cell in cells))
    with pyplot.rc_context({"svg.hashsalt": "kvboost", "svg.fonttype": "none"}):
        figure, axes = pyplot.subplots(
            1, len(reuses), figsize=(5 * len(reuses), 3.4), sharey=True, squeeze=False, layout="constrained"
        )
        for axis, reuse in zip(axes[0], reuses, strict=True):
            shown = [c for c in cells if c.reuse == reuse]
            for policy in dict.fromkeys(c.policy for c in shown):
                points = sorted((c.share, c.hit_rate) for c in shown if c.policy == policy)
                style = {"color": "black", "linestyle": ":"} if policy == BOUND else {"marker": "o", "markersize": 3}
                axis.plot([100 * x for x, _ in points], [100 * y for _, y in points], label=LABELS[policy], **style)
            axis.set(title=REUSES[reuse], xlabel="budget, % of all distinct text", ylim=(0, None))
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("hit tokens, %")
        axes[0][-1].legend(frameon=False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return re.sub(r"^.*?(?=<svg)", "", drawn.getvalue(), flags=re.DOTALL)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text: Sequence[int] = (0,)) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        marks = (' class="text"' if i in text else "" for i in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{m}>{escape(c)}</{tag}>" for c, m in zip(cells, marks, strict=True)) + "</tr>"

    lines = "".join(row(r, "td") for r in rows)
    return f'<div class="wide" tabindex="0"><table>{row(head, "th")}{lines}</table></div>'
