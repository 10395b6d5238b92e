"""How the commands talk: results to stdout, steps and errors to stderr, an error in one line."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

from kvboost.errors import KVBoostError

ERROR = 2  # exit code of every failure; the parser uses the same one for wrong usage

out = Console()
err = Console(stderr=True)


class OneLineErrors(TyperGroup):
    """A command group whose commands end a `KVBoostError` with one line on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command line."""
        try:
            return super().invoke(ctx)
        except KVBoostError as error:
            message = " ".join(str(error).split())
            err.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
            raise typer.Exit(ERROR) from None


def silence_libraries() -> None:
    """Keeps progress bars and advice of transformers out of the output. Acts only if it was not imported before."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("kvboost").setLevel(logging.ERROR)  # what the log would say of a model, the commands say


@contextmanager
def step(title: str) -> Iterator[Callable[[str], None]]:
    """A moving bar with the elapsed time while a step of unknown length runs; yields a function that renames it."""
    if not err.is_terminal:
        note(f"{title} ...")
        yield lambda text: note(f"{text} ...")
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda text: progress.update(task, description=text)


def note(text: str) -> None:
    """A line on stderr that is no result."""
    err.print(f"[dim]{escape(text)}[/]", highlight=False, soft_wrap=True)


def make_table(*columns: str, numbers: Sequence[int] = ()) -> Table:
    """A table without walls; the columns at the indices `numbers` are aligned to the right."""
    table = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i in numbers:
        table.columns[i].justify, table.columns[i].no_wrap = "right", True
    return table


def print_json(value: Any) -> None:
    """A JSON document on stdout."""
    out.out(json.dumps(value, indent=2, ensure_ascii=False), highlight=False)


def bytes_text(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def seconds_text(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
