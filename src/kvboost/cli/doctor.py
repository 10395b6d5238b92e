"""`kvboost doctor`: what a model supports, why not what not, and what reuse costs on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvboost.cli.console import bytes_text, make_table, out, print_json, seconds_text, step
from kvboost.cli.models import DTypeOption

if TYPE_CHECKING:
    from kvboost.cli.diagnosis import Diagnosis

LIMITED = 1  # exit code


def run(
    model: Annotated[str, typer.Argument(help="Model directory or hub name.")],
    dtype: DTypeOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what a model supports, and why not what not.

    Exit code 0: text is reused at any position. 1: the model is limited to exact prefixes, or reuses nothing; the
    reason is given. 2: it cannot be loaded.
    """
    with step("starting torch and transformers") as tell:
        from kvboost.cli.diagnosis import diagnose
        from kvboost.engine import KVBoost

        tell(f"loading and checking {model}")
        kv = KVBoost.from_pretrained(model, dtype=dtype)
        tell("measuring the break-even length")
        found = diagnose(kv, model)
    if as_json:
        print_json(asdict(found))
    else:
        _print(found)
    raise typer.Exit(LIMITED if found.limited else 0)


def _print(found: Diagnosis) -> None:
    facts = Table.grid(padding=(0, 2))
    for label, value in _facts(found):
        facts.add_row(Text(label, style="dim"), value)
    out.print(facts)
    if found.layers:
        out.print(_layer_table(found))
    for warning in found.warnings:
        out.print(Text(f"warning: {warning}", style="yellow"))
    for note in found.notes:
        out.print(Text(f"note: {note}", style="dim"))


def _facts(found: Diagnosis) -> list[tuple[str, str | Text]]:
    facts: list[tuple[str, str | Text]] = [
        ("model", f"{found.architecture}, {found.parameters / 1e6:,.1f} M parameters"),
        ("runs as", f"{found.dtype} on {found.device}, attention {found.attention}"),
        ("reuses", Text(found.reuses, style="bold yellow" if found.limited else "bold green")),
    ]
    if found.reason is not None:
        facts.append(("because", found.reason))
    facts += [("limit", text) for text in found.length_limits]
    facts += [("longest prompt", f"{found.max_tokens:,} tokens")] if found.max_tokens else []
    if found.bytes_per_token:
        per_thousand = bytes_text(1000 * found.bytes_per_token)
        facts.append(("KV per token", f"{bytes_text(found.bytes_per_token)} ({per_thousand} per 1,000 tokens)"))
    facts += [(f"{name} check", _check(name, e, found.self_check_tolerance)) for name, e in found.self_check.items()]
    facts += [("declared", f"{name} = {value}") for name, value in found.declared_rotary.items()]
    facts += [(f"codec {codec}", _codec(measured)) for codec, measured in found.quantization.items()]
    if not found.limited:
        facts.append(("break-even", _break_even(found)))
    return facts


def _check(name: str, error: float, tolerance: float) -> str:
    meaning = {
        "continuation": "a continued cache, against a plain prefill",
        "recompute": "every row through this path, against a plain prefill",
        "shift": "moved keys, against keys computed there",
    }.get(name, name)
    return f"{'ok' if error <= tolerance else 'FAILED'}, off by {error:.1e} of {tolerance:.0e} allowed ({meaning})"


def _codec(measured: dict[str, Any]) -> str:
    if measured["refused"] is not None:
        return f"not used: {measured['refused']}"
    least = ", ".join(f"{slot} {db:.1f} dB" for slot, db in measured["least_db"].items())
    plain = ", ".join(map(str, measured["plain_layers"]))
    kept = f"layers {plain} stay as computed" if plain else "no layer has to stay as computed"
    return f"adds {measured['kl']:.2g} nat per token; the worst head comes back with {least}; {kept}"


def _break_even(found: Diagnosis) -> str:
    if found.break_even_tokens is None:
        return f"longer than {found.run_costs[-1]['tokens']:.0f} tokens: computing was cheaper for every run measured"
    example = min(found.run_costs, key=lambda c: abs(c["tokens"] - 64))
    return (
        f"about {found.break_even_tokens} tokens: longer moved runs are cheaper to reuse and repair than to compute "
        f"({example['tokens']:.0f} tokens: {seconds_text(example['reuse_s'])} against "
        f"{seconds_text(example['compute_s'])}); the setting min_run_tokens is {found.min_run_tokens}"
    )


def _layer_table(found: Diagnosis) -> Table:
    table = make_table("layers", "attention", "KV heads", "key/value", "rotary", "rotated", "probed base")
    for kind in found.layers:
        table.add_row(*_layer_cells(kind))
    return table


def _layer_cells(kind: dict[str, Any]) -> list[str]:
    window = "full" if kind["window"] is None else f"window {kind['window']:,}"
    base = "-" if kind["base"] is None else f"{kind['base']:,.10g}"
    shape = f"{kind['key_dim']}/{kind['value_dim']}"
    attention = "not probed" if kind["rotary"] == "not probed" else window
    return [kind["layers"], attention, str(kind["kv_heads"]), shape, kind["rotary"], kind["rotated_dims"] or "-", base]
