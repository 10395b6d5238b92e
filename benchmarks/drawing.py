"""Pictures of results: drawn without a display, saved as SVG and PNG. Import it where a picture is asked for only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

__all__ = ["pyplot", "save"]


def save(figure: Any, path: Path) -> None:
    """Writes `path` with `.svg` and with `.png`, and closes the figure."""
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=150)
    pyplot.close(figure)
