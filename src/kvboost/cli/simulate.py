"""`kvboost simulate`: what a cache would have hit on your own requests, at which budget, and what breaks prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost.cli.console import make_table, note, out, print_json, step
from kvboost.errors import InputError

if TYPE_CHECKING:
    from kvboost.simulation.breaks import BreakSummary
    from kvboost.simulation.readers import Log
    from kvboost.simulation.replay import Cell
    from kvboost.simulation.trace import Trace

DEFAULT_POLICIES = "lru,importance,belady"
BLOCKS_ONLY = "The trace names histories, not texts: it cannot tell what stands at another position again."
PIECES = "No tokenizer was given: tokens are short word pieces. Counts differ from your model's, shares hardly do."
CHUNKS = "Chunk reuse counts whole chunks; KVBoost also finds parts of them, so it finds more. Moved text is repaired."
BOUND = "The bound knows the future; no policy can exceed it."


@dataclass
class Simulation:
    """What was found."""

    facts: str
    traces: list[Trace]
    notes: list[str]
    cells: list[Cell] = field(default_factory=list)
    breaks: list[BreakSummary] = field(default_factory=list)


def run(
    trace: Annotated[Path, typer.Argument(help="Requests, one JSON document per line, oldest first.")],
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="auto|openai|prompts|mooncake|claude_code",
            help="What a line is; auto looks at the first.",
        ),
    ] = "auto",
    budgets: Annotated[
        str, typer.Option(metavar="PERCENT,...", help="Cache sizes in per cent of all distinct text.")
    ] = "5,10,30,100",
    policies: Annotated[
        str, typer.Option(metavar="NAME,...", help="Of lru, lfu, s3-fifo, gdsf, importance (KVBoost), belady (bound).")
    ] = DEFAULT_POLICIES,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", "--model", metavar="NAME", help="Tokenizer directory or hub name; without it, word pieces."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Take the first N requests only.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.html and hits.svg there (needs the extra bench).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Replay a log of requests over cache sizes and eviction policies; no model runs.

    Takes OpenAI requests (`messages`, or batch lines with a `body`), prompts (a JSON string, an object with `prompt`,
    or plain lines), and block traces (mooncake, claude_code). Of texts it tells what prefix caching and what chunk
    reuse would have hit, and which text ends prefixes: timestamps, ids, counters, reordered tools or documents. The
    output shows short excerpts of your prompts.
    """
    shares, names = _shares(budgets), _policies(policies)
    with step("reading") as tell:
        found = prepare(trace, kind, tokenizer, limit)
        for cell in _replay(found.traces, shares, names):
            tell(f"{cell.policy} at {cell.share:.0%}, {cell.reuse}")
            found.cells.append(cell)
        svg = _draw(found) if report is not None else ""
    if report is not None:
        _write(report, trace.name, found, svg)
    show(found, as_json=as_json)


def prepare(path: Path, kind: str, tokenizer: str | None, limit: int | None) -> Simulation:
    """Reads a file into the traces that are replayed. Raises `InputError` if it cannot be read."""
    from kvboost.simulation.readers import Log, read

    source = read(path, kind)
    if isinstance(source, Log):
        return _of_texts(Log(source.name, source.prompts[:limit]), tokenizer)
    source.requests[:] = source.requests[:limit]
    return Simulation(_facts(source), [source], [BLOCKS_ONLY, BOUND])


def _of_texts(log: Log, tokenizer: str | None) -> Simulation:
    from kvboost.chunking import Separators, make_chunker
    from kvboost.config import Settings
    from kvboost.simulation.breaks import find_breaks, summarize
    from kvboost.simulation.tokens import WordPieces, chunk_trace, encode_all, prefix_trace

    pieces: Any = WordPieces() if tokenizer is None else _load(tokenizer)
    prompts = encode_all(log.prompts, pieces if tokenizer is None else lambda text: pieces(text).input_ids)
    chunker = make_chunker(Settings(), Separators.from_tokenizer(pieces), tokenizer=pieces)
    prefix, chunks = prefix_trace(log.name, prompts), chunk_trace(log.name, prompts, chunker)
    breaks = summarize(list(find_breaks(log.prompts, prefix, chunks)))
    notes = ([PIECES] if tokenizer is None else []) + [CHUNKS, BOUND]
    return Simulation(_facts(chunks), [prefix, chunks], notes, breaks=breaks)


def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"cannot load a tokenizer from {name!r}: {error}") from None


def _facts(trace: Trace) -> str:
    return (
        f"{len(trace.requests):,} requests, {trace.tokens:,} tokens, of which {trace.footprint_tokens:,} in distinct "
        f"pieces: an endless cache of whole pieces would hit {1 - trace.footprint_tokens / max(1, trace.tokens):.1%}."
    )


def _replay(traces: Sequence[Trace], shares: Sequence[float], policies: Sequence[str]) -> Iterator[Cell]:
    """Both kinds of reuse get the same budgets: shares of the last trace's footprint, the smaller one."""
    from kvboost.simulation.replay import grid

    for trace in traces:
        yield from grid(trace, shares, policies, traces[-1].footprint_tokens)


def _shares(budgets: str) -> list[float]:
    try:
        shares = [float(part) / 100 for part in budgets.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(0 < share <= 100 for share in shares):
        raise InputError(f"--budgets takes numbers above 0 separated by commas, in per cent, not {budgets!r}")
    return shares


def _policies(policies: str) -> list[str]:
    from kvboost.simulation.policies import POLICIES
    from kvboost.simulation.replay import BOUND as NAME_OF_BOUND

    names, known = [p.strip() for p in policies.split(",")], [*POLICIES, NAME_OF_BOUND]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"there is no policy {unknown[0]!r}; there are: {', '.join(known)}")
    return names


def _draw(found: Simulation) -> str:
    from kvboost.simulation.report import plot

    return plot(found.cells)


def _write(folder: Path, name: str, found: Simulation, svg: str) -> None:
    from kvboost.simulation.report import render_page

    page = render_page(f"What a cache would have hit: {name}", found.facts, found.cells, found.breaks, found.notes, svg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hits.svg").write_text(svg, encoding="utf-8")
        (folder / "report.html").write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write to {str(folder)!r}: {error.strerror}") from None
    note(f"written: {folder / 'report.html'}")


def show(found: Simulation, *, as_json: bool) -> None:
    """A table per kind of reuse, the breaks with an example each, and what the figures are."""
    from kvboost.simulation.report import REUSES, break_table, hit_table

    if as_json:
        cells = [{**asdict(cell), "hit_rate": cell.hit_rate} for cell in found.cells]
        print_json({"cells": cells, "breaks": [asdict(b) for b in found.breaks], "notes": found.notes})
        return
    out.print(found.facts, highlight=False, soft_wrap=True)
    for reuse in dict.fromkeys(cell.reuse for cell in found.cells):
        head, *rows = hit_table([c for c in found.cells if c.reuse == reuse])
        out.print(f"\nHit tokens, {REUSES[reuse]}:", highlight=False)
        _print_table(head, rows, range(len(head)))
    if found.breaks:
        out.print("\nWhat ends common prefixes:", highlight=False)
        head, *rows = break_table(found.breaks)
        _print_table(head, rows, (1, 2))
        for b in found.breaks:
            example = f"{b.kind}, request {b.example.request + 1}:\n  {b.example.before}\n  {b.example.after}"
            out.print(example, highlight=False, markup=False, soft_wrap=True)
    for text in found.notes:
        note(text)


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> None:
    table = make_table(*head, numbers=numbers)
    for row in rows:
        table.add_row(*row)
    out.print(table)
