"""The token map in a terminal: one letter per token, coloured where there is colour, and a list of the chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from kvboost.cli.console import make_table
from kvboost.tokenmap import LETTER, MEANING, MappedChunk

STYLE = {
    "exact": "black on green",
    "continued": "black on cyan",
    "moved": "white on blue",
    "repaired": "black on yellow",
    "fresh": "default",
}
MIN_EXCERPT = 20
OTHER_COLUMNS = 46  # width of the run table without its last column


class TokenStrip:
    """A rich renderable: the legend, one letter per token, and one line per run of chunks."""

    def __init__(self, chunks: Sequence[MappedChunk]) -> None:
        self._chunks = chunks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Legend, letters, runs."""
        counts = Counter(t.kind for c in self._chunks for t in c.tokens)
        legend = Table.grid(padding=(0, 2))
        for kind, meaning in MEANING.items():
            legend.add_row(Text(f" {LETTER[kind]} ", STYLE[kind]), kind, f"{counts[kind]:>6,}", Text(meaning, "dim"))
        yield legend
        yield Text()
        letters = Text(overflow="fold")
        for chunk in self._chunks:
            for token in chunk.tokens:
                letters.append(LETTER[token.kind], STYLE[token.kind])
        yield letters
        yield Text()
        yield _run_table(self._chunks, max(MIN_EXCERPT, options.max_width - OTHER_COLUMNS))


def _run_table(chunks: Sequence[MappedChunk], excerpt: int) -> Table:
    """One line per run: neighbouring chunks of one kind that moved together."""
    table = make_table("kind", "tokens", "from", "shift", "again", "text", numbers=range(1, 5))
    for _, group in groupby(chunks, lambda c: (c.kind, c.shift if c.kind == "moved" else 0)):
        table.add_row(*_run_cells(list(group), excerpt))
    return table


def _run_cells(run: Sequence[MappedChunk], excerpt: int) -> tuple[str | Text, ...]:
    first, last = run[0], run[-1]
    source, shift, again = "-", "-", "-"
    if first.kind != "fresh":
        source, shift = str(first.source), f"{first.shift:+d}" if first.shift else "0"
    if first.kind == "moved":
        again = str(sum(c.repaired for c in run))
    text = " ".join("".join(c.text for c in run).split())[:excerpt]
    return (
        Text(first.kind, STYLE[first.kind]),
        f"{first.span.start}-{last.span.stop - 1}",
        source,
        shift,
        again,
        Text(text),
    )
