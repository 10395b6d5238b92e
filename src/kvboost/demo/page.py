"""The token map as one HTML file: no network, no script, light and dark, for mouse, keyboard, touch and paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from itertools import groupby

from kvboost.tokenmap import LETTER, MEANING, MappedChunk

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --dim: #57606a; --line: #d0d7de;
  --exact: #c3e8c8; --continued: #bfe3e6; --moved: #c9dcfb; --repaired: #ffd58a; --fresh: transparent;
  --mark: #1b1f24; --rule: #6e7781 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0f1419; --dim: #9aa5b1; --line: #30363d;
  --exact: #1d4a2a; --continued: #144a50; --moved: #1f3d6e; --repaired: #7a4f00;
  --mark: #e6edf3; --rule: #8b949e } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 68rem; padding: 1rem 1rem 7rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.35rem; margin: 0 0 .25rem } h2 { font-size: 1.05rem; margin: 1.75rem 0 .5rem }
p { margin: .25rem 0; color: var(--dim) }
.bar { display: flex; height: 1.5rem; margin: 1rem 0 .5rem; border: 1px solid var(--line); border-radius: 4px;
  overflow: hidden }
.bar i { display: block; min-width: 1px }
dl { display: grid; grid-template-columns: auto auto 1fr; gap: .3rem .75rem; margin: .75rem 0; align-items: baseline }
dt { white-space: nowrap } dd { margin: 0 } dd.n { text-align: right; font-variant-numeric: tabular-nums }
dd:not(.n) { color: var(--dim) }
.wide { overflow-x: auto; background:
  linear-gradient(90deg, transparent, var(--paper) 60%) 100% 0 / 3rem 100% no-repeat local,
  linear-gradient(270deg, var(--line), transparent) 100% 0 / 1.2rem 100% no-repeat scroll }
table { border-collapse: collapse; font-size: .9rem; white-space: nowrap }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; font-weight: 400 }
th { color: var(--dim) } th:first-child, td:first-child { padding-left: 0 }
:is(th, td):is(:first-child, :last-child) { text-align: left }
.map { font: .85rem/1.75 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border-top: 1px solid var(--line); padding-top: .75rem }
.exact { background: var(--exact) } .continued { background: var(--continued) }
.moved { background: var(--moved) } .repaired { background: var(--repaired) } .fresh { background: var(--fresh) }
.t { border-bottom: 2px solid transparent; padding: .1em 0 }
.t.exact { border-bottom: 2px solid var(--rule) } .t.continued { border-bottom: 3px double var(--rule) }
.t.moved { border-bottom: 2px dashed var(--rule) }
.t.repaired { border-bottom: 2px dotted var(--rule); font-weight: 700 }
.key { padding: 0 .4rem; border: 1px solid var(--line) }
.key.t { border-width: 1px 1px 3px }
.chunk::before { content: attr(data-letter); font: 700 .65rem/1 ui-monospace, monospace; vertical-align: .5em;
  border: 1px solid var(--rule); border-radius: 3px; padding: 0 .2em; margin: 0 .15em }
.chunk:hover, .chunk:focus { outline: 2px solid var(--mark); outline-offset: 1px; cursor: help }
.chunk:hover::after, .chunk:focus::after { content: attr(data-about); position: fixed; z-index: 1; left: 0; right: 0;
  bottom: 0; padding: .8rem 1rem; background: var(--ink); color: var(--paper); font: 1rem/1.4 system-ui, sans-serif;
  white-space: normal }
.map:has(.chunk:hover) .chunk:focus:not(:hover)::after { content: none }
@media print { .t, .bar i { print-color-adjust: exact; -webkit-print-color-adjust: exact }
  body { padding-bottom: 1rem } }
"""


def render_page(chunks: Sequence[MappedChunk], title: str, table: Sequence[Sequence[str]] = ()) -> str:
    """A self-contained page. `table` is shown above the map: a head row, then rows of cells."""
    counts = Counter(t.kind for c in chunks for t in c.tokens)
    total = sum(counts.values())
    computed = counts["fresh"] + counts["repaired"]
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{total:,} tokens; {computed:,} of them were computed, {total - computed:,} came from the cache.</p>",
        _bar(chunks, total),
        _legend(counts),
        *([f"<h2>All requests</h2>{_table(table)}"] if table else []),
        "<h2>The prompt</h2><p>Point at a chunk, tap it, or reach it with the Tab key, to see where it came from.</p>",
        f'<div class="map">{"".join(map(_chunk, chunks))}</div>',
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(body)}</body></html>\n'


def _bar(chunks: Sequence[MappedChunk], total: int) -> str:
    """The whole prompt at a glance: one strip per run of tokens of a kind."""
    runs = groupby(t.kind for c in chunks for t in c.tokens)
    strips = (f'<i class="{kind}" style="width:{100 * sum(1 for _ in run) / total:.3f}%"></i>' for kind, run in runs)
    return (
        f'<div class="bar" role="img" aria-label="The prompt from its first to its last token">{"".join(strips)}</div>'
    )


def _legend(counts: Counter[str]) -> str:
    rows = (
        f'<dt><span class="key t {kind}">{LETTER[kind]} {kind}</span></dt><dd class="n">{counts[kind]:,}</dd>'
        f"<dd>{escape(meaning)}</dd>"
        for kind, meaning in MEANING.items()
    )
    return f"<dl>{''.join(rows)}</dl>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = rows
    cells = "".join(f"<th>{escape(c)}</th>" for c in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in rest)
    region = '<div class="wide" tabindex="0" role="region" aria-label="All requests">'
    return f"{region}<table><tr>{cells}</tr>{lines}</table></div>"


def _chunk(chunk: MappedChunk) -> str:
    about = escape(chunk.describe(), quote=True)
    tokens = "".join(f'<span class="t {t.kind}">{escape(t.text)}</span>' for t in chunk.tokens)
    letter = LETTER[chunk.kind] + (f"{chunk.shift:+d}" if chunk.kind == "moved" else "")
    return (
        f'<span class="chunk" tabindex="0" role="group" aria-label="{about}" data-letter="{letter}" '
        f'data-about="{about}">{tokens}</span>'
    )
