"""`kvboost config`: the settings in force and where each comes from."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvboost.cli.console import make_table, note, out, print_json
from kvboost.config import Settings, unknown_environment
from kvboost.live import LiveSettings

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show the settings.")


@app.callback()
def _group() -> None:
    """Show the settings."""


@app.command("show")
def show(
    origin: Annotated[bool, typer.Option("--origin", help="Show which source each value comes from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List every setting: its value in force and what it does.

    Sources, highest first: request, admin API, file (KVBOOST_SETTINGS_FILE), environment (KVBOOST_NAME), flag, default.
    A running program reads its own environment and the file at every request; what an administrator set, it alone
    knows.
    """
    live = LiveSettings()
    rows = _rows(live)
    problem = live.status().last_error
    if problem is not None:
        note(f"the settings file {live.status().file} is rejected, nothing of it is shown: {problem}")
    for mistake in unknown_environment():
        note(f"warning: {mistake}")
    if as_json:
        print_json(rows)
        return
    table = make_table("setting", "value", *(["origin"] if origin else []), "meaning")
    for name, row in rows.items():
        changed = row["origin"] != "default"
        cells = [name, str(row["value"]), *([str(row["origin"])] if origin else []), row["description"]]
        table.add_row(*cells, style="bold" if changed else None)
    out.print(table)


def _rows(live: LiveSettings) -> dict[str, dict[str, Any]]:
    resolved = live.resolve()
    values = resolved.settings.model_dump(mode="json")  # a secret is masked
    return {
        name: {"value": values[name], "origin": resolved.origins[name], "description": field.description or ""}
        for name, field in Settings.model_fields.items()
    }
