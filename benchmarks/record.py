"""How a run is told: its versions, short numbers, one JSON line at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

import kvboost


def versions() -> dict[str, str]:
    """What a line of results must say of its making."""
    return {m.__name__: m.__version__ for m in (kvboost, torch, transformers)}


def rounded(value: Any) -> Any:
    """Five significant digits, inside dictionaries and lists too: enough for a line of results."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def emit(result: dict[str, Any], out: Path | None) -> None:
    """Prints the result as one JSON line, and appends it to `out`."""
    line = json.dumps(result)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")
    print(line)
