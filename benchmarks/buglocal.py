"""Bug localization: time to first token, choices and KL of all systems on reports that share code context.

    kvboost bench buglocal [--requests 500] [--gemma] [--shard 0/2] [--out FILE] [--report FILES --plot docs/buglocal]

Two traffics from a committed seed. *pairs*: three reports over the same excerpts in the same order, the first COLD, two
WARM: they share a prefix. *shifted*: every request has a head of its own, another order and other neighbours; it is
WARM if all of its excerpts were seen. Four functions may be the answer, the most likely one is chosen. Reports that
name the function are left out. Systems other than `guided` run without the gate, so that it hides nothing of them.

Lines of `--dtype bfloat16 --systems "full prefill"`, reported together with float32 ones (those first), are the
yardstick for agreement.
"""

from __future__ import annotations

import json

from serving import arguments, environment, results_of
from serving_report import plot, report
from traffic import BUGLOCAL


def main() -> None:
    """Runs or reports, and ends with one JSON line."""
    parser = arguments(__doc__)
    parser.add_argument("--traffic", nargs="+", default=list(BUGLOCAL), choices=list(BUGLOCAL))
    given = parser.parse_args()
    results = results_of(given, {name: BUGLOCAL[name] for name in given.traffic})
    if given.plot:
        plot(results, given.plot)
    print(json.dumps({**report(results, "buglocal"), **environment(given, results)}))


if __name__ == "__main__":
    main()
