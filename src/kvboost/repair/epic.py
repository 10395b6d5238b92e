"""The first rows of every moved run: there the attention of a wrong neighbourhood is strongest.

After EPIC (Hu et al. 2024, "Efficient Position-Independent Caching"), which recomputes the first tokens of each chunk;
here of each *run*, since chunks that were neighbours when captured have no seam between them.
"""

import math

from kvboost.config import Settings
from kvboost.hf.assembly import Assembly
from kvboost.repair.selection import Selection, heads


def select_run_heads(assembly: Assembly, settings: Settings) -> Selection:
    """The first `recompute_head_tokens` positions of every run, or `recompute_ratio` of each run."""
    runs, ratio = assembly.plan.runs, settings.recompute_ratio
    sizes = [settings.recompute_head_tokens if ratio is None else math.ceil(ratio * len(run)) for run in runs]
    return Selection(heads(runs, sizes))
