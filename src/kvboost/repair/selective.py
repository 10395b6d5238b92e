"""Rows near the ends of a moved run that attend widely: what they say depends on text that may be gone.

A row whose attention is spread (entropy near log n) gathers from all of its context; one that attends to few rows near
it does not care where its chunk stands. The entropy is measured on first use, at one early layer, for these rows only.
"""

import numpy as np

from kvboost.config import Settings
from kvboost.hf.assembly import Assembly
from kvboost.hf.signals import attention_entropy
from kvboost.repair.selection import Selection, moved_positions, no_rows, top
from kvboost.types import Int32Array, Span

ENTROPY_LAYER = 1  # layer 0 attends by token identity alone


def select_wide_boundaries(assembly: Assembly, settings: Settings) -> Selection:
    """Boundary rows above `entropy_threshold`; with `recompute_ratio` the widest of that share of the moved rows."""
    runs, ratio = assembly.plan.runs, settings.recompute_ratio
    if ratio == 1:
        return Selection(moved_positions(assembly.plan))
    moved = sum(map(len, runs))
    width = settings.recompute_boundary_tokens
    if ratio is not None:
        width = max(width, int(np.ceil(ratio * moved / max(1, len(runs)))))
    positions = boundaries(runs, width)
    if not len(positions):
        return Selection()
    entropy, probed = attention_entropy(
        assembly, assembly.positions(positions), min(ENTROPY_LAYER, assembly.num_layers - 1)
    )
    if ratio is not None:
        return Selection(top(positions, entropy, ratio * moved - probed), probed_rows=probed)
    return Selection(positions[(entropy > settings.entropy_threshold).cpu().numpy()], probed_rows=probed)


def boundaries(runs: list[Span], width: int) -> Int32Array:
    """The first and last `width` positions of every run, sorted."""
    inside = [np.arange(r.start, r.stop, dtype=np.int32) for r in runs]
    ends = [np.union1d(p[:width], p[len(p) - min(width, len(p)) :]) for p in inside]
    return np.concatenate([no_rows(), *ends])
