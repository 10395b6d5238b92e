"""Retrieval, multi-document questions, logs, agents and key-value look-up: the figures of `buglocal` on other traffic.

    kvboost bench workloads --source retrieval mdqa logs agents lookup [--requests 200] [--gemma] [--out FILE]

Where an answer is known, *match* is the share of requests for which greedy decoding gives exactly that text. COLD and
WARM are explained in `traffic_text.py`. Options are those of `kvboost bench buglocal`.
"""

from __future__ import annotations

import json

from serving import arguments, environment, results_of
from serving_report import plot, report
from traffic import WORKLOADS


def main() -> None:
    """Runs or reports, and ends with one JSON line."""
    parser = arguments(__doc__)
    parser.add_argument("--source", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    given = parser.parse_args()
    results = results_of(given, {name: WORKLOADS[name] for name in given.source})
    if given.plot:
        plot(results, given.plot)
    print(json.dumps({**report(results, "workloads"), **environment(given, results)}))


if __name__ == "__main__":
    main()
