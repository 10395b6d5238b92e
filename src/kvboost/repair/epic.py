"""The first rows of every moved run: there the attention of a wrong neighbourhood is strongest.

After EPIC (Hu et al. 2024, "Efficient Position-Independent Caching"), which recomputes the first tokens of each chunk;
here of each *run*, since chunks that were neighbours when captured have no seam between them.
"""

import numpy as np

from kvboost.config import Settings
from kvboost.types import Int32Array, ReusePlan


def select_run_heads(plan: ReusePlan, settings: Settings) -> Int32Array:
    """The first `recompute_head_tokens` positions of every run."""
    heads = [np.arange(r.start, min(r.stop, r.start + settings.recompute_head_tokens)) for r in plan.runs]
    return np.concatenate([np.empty(0, np.int32), *heads]).astype(np.int32)
