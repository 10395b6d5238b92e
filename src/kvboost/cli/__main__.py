"""`python -m kvboost.cli ...` is `kvboost ...`; `python -m kvboost.cli docs` prints `docs/cli.md`."""

from __future__ import annotations

import sys

from kvboost.cli import app
from kvboost.cli.reference import render_reference

if __name__ == "__main__":
    if sys.argv[1:] == ["docs"]:
        sys.stdout.write(render_reference(app))
    else:
        app(prog_name="kvboost")
