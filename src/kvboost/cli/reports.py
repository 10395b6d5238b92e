"""A request's `ReuseReport` as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table

from kvboost.cli.console import bytes_text, make_table, seconds_text

if TYPE_CHECKING:
    from kvboost.types import ReuseReport


def report_json(report: ReuseReport) -> dict[str, Any]:
    """Every field of the report."""
    return {**asdict(report), "bytes_by_tier": dict(report.bytes_by_tier), "signs": dict(report.signs)}


def report_table(report: ReuseReport) -> Table:
    """What the request reused and what that cost."""
    table = make_table("rows", "tokens", "step", "time", numbers=(1, 3))
    kinds = ("prompt", "exact", "continued", "moved", "repaired", "fresh", "written")
    times = ("lookup", "load", "shift", "select", "prefill", "capture", "ttft")
    for kind, time in zip(kinds, times, strict=True):
        count = f"{getattr(report, f'{kind}_tokens'):,}"
        table.add_row(kind, count, time, seconds_text(getattr(report, f"{time}_s")))
    loaded = sum(report.bytes_by_tier.values())
    caption = f"loaded {bytes_text(loaded)}; {report.charged_budget:.0%} of the rows found were computed again"
    if report.risk is not None:
        caption += f"; estimated error at most {report.risk:.3f} nat"
    table.caption = f"not served by the cache: {report.fallback}" if report.fallback else caption
    table.caption_justify = "left"
    return table
