"""The command line, `kvboost`: one command per file; `app` is the entry point. The only importer of typer.

Importing it loads neither torch nor transformers, so `--help`, `--version` and `config show` answer at once.
Exit codes: 0 done; 1 `doctor` found a limit, `verify` an error above the bound, `cache` damaged records, or a benchmark
failed; 2 wrong usage or an error, told in one line.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvboost import __version__
from kvboost.cli import bench, cache, config, demo, doctor, generate, serve, simulate, verify, warm
from kvboost.cli.console import OneLineErrors, out, silence_libraries

app = typer.Typer(cls=OneLineErrors, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.command("demo")(demo.run)
app.command("generate")(generate.run)
app.command("serve")(serve.run)
app.command("warm")(warm.run)
app.command("doctor")(doctor.run)
app.command("verify")(verify.run)
app.command("simulate")(simulate.run)
app.command("bench", context_settings=bench.PASS_THROUGH)(bench.run)
app.add_typer(cache.app, name="cache")
app.add_typer(config.app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"kvboost {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _prepare(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Reuse the KV cache of text that a Hugging Face model has seen, wherever it stands in a new prompt.

    Every setting can be given in the environment as KVBOOST_NAME; `kvboost config show` lists them.
    """
    silence_libraries()
