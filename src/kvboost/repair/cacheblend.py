"""Rows that changed most at an early layer: those change most at the later ones too.

After CacheBlend (Yao et al. 2025, "Fast Large Language Model Serving for RAG with Cached Knowledge Fusion"). All moved
rows are computed up to the check layer, where they are only projected; the rows that deviate most are then recomputed
in every layer. The rows below the check layer, which are fresh by then, stay in the cache.
"""

import numpy as np
import torch

from kvboost.config import Settings
from kvboost.hf.assembly import Assembly
from kvboost.hf.signals import attention_change, value_change
from kvboost.repair.selection import Selection, moved_positions, no_rows, top
from kvboost.types import Int32Array, Kind


def select_deviating(assembly: Assembly, settings: Settings) -> Selection:
    """Per chunk at most `recompute_topk` rows above `deviation_threshold`, or the top `recompute_ratio` of all."""
    moved = moved_positions(assembly.plan)
    ratio = settings.recompute_ratio
    if not len(moved) or ratio == 1:
        return Selection(moved)
    score, probed = deviation(assembly, moved, settings)
    if ratio is not None:
        return Selection(top(moved, score, ratio * len(moved) - probed), probed_rows=probed)
    chosen = [
        top(moved[inside], score[torch.from_numpy(inside)], settings.recompute_topk)
        for s in assembly.plan.spans(Kind.MOVED)
        if len(inside := np.flatnonzero((moved >= s.start) & (moved < s.stop)))
    ]
    above = moved[(score > settings.deviation_threshold).cpu().numpy()]
    return Selection(np.intersect1d(np.concatenate([no_rows(), *chosen]), above), probed_rows=probed)


def deviation(assembly: Assembly, moved: Int32Array, settings: Settings) -> tuple[torch.Tensor, float]:
    """Score of every moved row at the check layer, float32 [m]; and the rows x layers it cost, over the layers.

    Fresh rows in front of the last moved one are computed along: the moved rows attend to them.
    """
    fresh = np.flatnonzero(assembly.fresh_positions().cpu().numpy()).astype(np.int32)
    rows = np.union1d(moved, fresh)
    layer = min(settings.check_layer, assembly.num_layers - 1)
    measure = attention_change if settings.deviation_score == "attention" else value_change
    score, probed = measure(assembly, assembly.positions(rows), layer)
    score = score[torch.from_numpy(np.searchsorted(rows, moved)).to(score.device)]
    if settings.deviation_score == "values":
        score = score / score.mean().clamp_min(1e-12)
    return score, probed
