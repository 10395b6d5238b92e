"""The exactness matrix as a table: every family, attention implementation and dtype, with the errors measured.

    kvboost bench exactness [--write docs/exactness.md]

It runs the measurements that the test suite asserts, over tiny random models of real architectures.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from families import BY_NAME, SUPPORTED_HERE
from matrix import (
    LONGER,
    REORDERED,
    Cell,
    cells,
    exact_prefix,
    full_repair,
    no_reuse_error,
    shift_error,
    yardstick,
)
from scenario import engine

HEADER = """# Exactness matrix

Written by `kvboost bench exactness --write docs/exactness.md`; the test suite asserts the same measurements.
Tiny random models of real architectures, against a full prefill by transformers {version} (torch {torch}, {machine}).
An error is the largest difference of logits (or rows) over the largest value. *Bound*: in bfloat16 twice what eager
and SDPA differ by in transformers alone (a family with one implementation: its distance from float32); in float32 the
bounds are 1e-5 without moved rows and 1e-4 with them.

* **no reuse**: nothing known; the tokens equal those of transformers in every cell.
* **exact prefix**: the loaded rows are the very bytes that were computed, the logits equal transformers' own
  continuation of the same cache bit for bit (*bits*), and a full prefill within the error shown.
* **full repair**: reordered documents with every moved row recomputed.
* **shift**: first-layer rows of a moved chunk against the rows that the model computes there, nothing repaired.

| family | attention | dtype | bound | no reuse | exact prefix | bits | full repair | shift |
|---|---|---|---|---|---|---|---|---|
"""


def row(cell: Cell) -> dict[str, Any]:
    """All measurements of one cell; None where the family does not serve that kind of reuse."""
    reuse = BY_NAME[cell.family].reuse
    bfloat16 = cell.dtype is torch.bfloat16
    prefix = exact_prefix(cell) if reuse != "none" else None
    return {
        "family": cell.family,
        "attention": cell.attention,
        "dtype": str(cell.dtype).removeprefix("torch."),
        "bound": yardstick(cell, REORDERED if reuse == "moved" else LONGER) if bfloat16 else None,
        "no_reuse": no_reuse_error(cell)[0],
        "exact_prefix": prefix.error if prefix else None,
        "bits": (prefix.same_rows and prefix.same_logits) if prefix else None,
        "full_repair": full_repair(cell)[0] if reuse == "moved" else None,
        "shift": shift_error(cell) if reuse == "moved" else None,
    }


def shown(value: Any) -> str:
    """One cell of the table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "equal" if value else "DIFFER"
    return f"{value:.0e}" if isinstance(value, float) else str(value)


def refusals() -> str:
    """What the refused families say."""
    lines = ["\n## Refused, and why\n"]
    for family in SUPPORTED_HERE:
        if family.reuse != "moved":
            support = engine(Cell(family.name, family.attention[0], torch.float32).model()).support
            kind = "nothing is reused" if support.refused else "exact prefixes only"
            lines.append(f"* **{family.name}**: {kind}: {support.refused or support.moved_refused}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures every cell and ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the table to this markdown file")
    arguments = parser.parse_args()
    versions = {"version": transformers.__version__, "torch": torch.__version__, "machine": platform.machine()}
    rows = []
    for cell in cells(SUPPORTED_HERE):
        rows.append(row(cell))
        print(f"{len(rows):4d} {cell}", file=sys.stderr)
    table = (
        HEADER.format(**versions) + "".join(f"| {' | '.join(map(shown, r.values()))} |\n" for r in rows) + refusals()
    )
    if arguments.write:
        arguments.write.write_text(table)
    print(table)
    print(json.dumps({"benchmark": "exactness", "versions": versions, "rows": rows}))


if __name__ == "__main__":
    main()
