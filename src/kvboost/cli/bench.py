"""`kvboost bench`: runs the scripts in `benchmarks/`, from the source checkout or from the wheel."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import kvboost
from kvboost.cli.console import make_table, out
from kvboost.errors import InputError

PASS_THROUGH: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def run(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Benchmark to run; without it, all are listed.")] = None,
) -> None:
    """Run a benchmark, or list what there is.

    Everything after NAME goes to the benchmark: `kvboost bench chunkers --quick`, `kvboost bench chunkers --help`.
    """
    found = benchmarks()
    if name is None or name == "--help":
        _list(found)
        return
    if name not in found:
        raise InputError(f"there is no benchmark {name!r}; there are: {', '.join(found) or 'none'}")
    done = subprocess.run([sys.executable, str(found[name]), *context.args], check=False)
    raise typer.Exit(done.returncode)


def folder() -> Path | None:
    """Where the benchmarks lie: inside the package in a wheel, beside `src` in a checkout; None if they are nowhere."""
    package = Path(kvboost.__file__).parent
    places = (package / "_benchmarks", package.parents[1] / "benchmarks")
    return next((p for p in places if p.is_dir()), None)


def benchmarks() -> dict[str, Path]:
    """The runnable scripts by name; a module without a main part is a helper of others."""
    place = folder()
    scripts = sorted(place.glob("*.py")) if place else []
    return {p.stem: p for p in scripts if "__main__" in p.read_text(encoding="utf-8")}


def _list(found: dict[str, Path]) -> None:
    if not found:
        out.print("No benchmarks are installed. They are in the source checkout: benchmarks/")
        return
    table = make_table("benchmark", "what it measures")
    for name, path in found.items():
        table.add_row(name, first_line(path))
    out.print(table)
    out.print("Run one with `kvboost bench NAME`; its options: `kvboost bench NAME --help`.", highlight=False)


def first_line(path: Path) -> str:
    """The first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]
