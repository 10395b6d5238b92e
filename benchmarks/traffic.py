"""Traffic for the benchmarks: requests generated from a committed seed, COLD or WARM by construction.

`pairs` and `shifted` are bug localization (`traffic_code`), the others are in `traffic_text`. Every source gives the
same requests for the same tokenizer, and a smaller number is a beginning of a larger one.
"""

from __future__ import annotations

from collections.abc import Mapping

from request import Request, Source, episodes
from traffic_code import pairs, shifted
from traffic_text import agents, logs, lookup, mdqa, retrieval

BUGLOCAL: Mapping[str, Source] = {"pairs": pairs, "shifted": shifted}
WORKLOADS: Mapping[str, Source] = {
    "retrieval": retrieval,
    "mdqa": mdqa,
    "logs": logs,
    "agents": agents,
    "lookup": lookup,
}
SOURCES: Mapping[str, Source] = {**BUGLOCAL, **WORKLOADS}

__all__ = [
    "BUGLOCAL",
    "SOURCES",
    "WORKLOADS",
    "Request",
    "Source",
    "agents",
    "episodes",
    "logs",
    "lookup",
    "mdqa",
    "pairs",
    "retrieval",
    "shifted",
]
