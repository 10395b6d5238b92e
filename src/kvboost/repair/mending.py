"""From an assembled cache to one that answers: choose rows, run the one forward, judge, and try again with more.

select -> forward -> estimate the risk -> good enough | once more with a larger budget | not good enough
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvboost.config import Settings
from kvboost.hf.assembly import Assembly
from kvboost.hf.correction import Correction, Sample, correcting_layers
from kvboost.hf.signals import Glance, glance
from kvboost.repair import gate
from kvboost.repair.guided import question, sample
from kvboost.repair.selection import Selection, Strategy, positions_of
from kvboost.types import Int32Array, Kind, ReusePlan

EVIDENCE_ROWS = 8  # that the gate judges by at least; a step of the sample is shorter in a short text


@dataclass(frozen=True, slots=True, eq=False)
class Mended:
    """The plan with its repaired rows, after every row of the assembly was filled; and what that took."""

    plan: ReusePlan
    logits: torch.Tensor  # float32 [V]: of the last row
    correction: Correction | None
    signs: gate.Signs | None  # None without the gate
    probed_rows: float  # rows x layers that were computed besides the plan's own, over the layers
    select_s: float
    prefill_s: float
    attempts: int = 1

    @property
    def risk(self) -> float | None:
        """Estimated KL of the answer, nat; None without the gate."""
        return None if self.signs is None else gate.estimate(self.signs)


def mend(assembly: Assembly, strategy: Strategy, settings: Settings) -> Mended:
    """Fills the assembly: rows that `strategy` chooses and rows that are fresh are computed at their true positions.

    With the gate, the budget grows until the estimated risk is within the bound. A risk above it in what is returned
    means that the largest budget worth trying was not enough either, and that the prompt must be prefilled.
    """
    mended = attempt(assembly, strategy, settings)
    for ratio in gate.budgets(settings, assembly.plan)[1:]:
        if mended.risk is None or mended.risk <= gate.bound(settings) or not gate.promising(mended.plan, ratio):
            break
        larger = settings.model_copy(update={"recompute_ratio": ratio})
        again = attempt(replace(assembly, plan=mended.plan, filled=True), strategy, larger, mended.signs)
        mended = joined(mended, again)
    return mended


def attempt(assembly: Assembly, strategy: Strategy, settings: Settings, known: gate.Signs | None = None) -> Mended:
    """One choice of rows and one forward; rows that were repaired before stay so.

    The gate needs the question's attention and a sample of rows: a strategy that has not looked is charged for both.
    `known` are the signs of an earlier attempt.
    """
    began = time.perf_counter()
    selection = strategy(assembly, settings)
    if settings.gate:
        selection = _with_evidence(selection, assembly, settings)
    selected = time.perf_counter()
    rows = np.union1d(positions_of(assembly.plan, Kind.FRESH), selection.rows)
    logits, correction = compute(assembly, rows, selection.sampled, correct=selection.corrects)
    plan = replace(assembly.plan, repaired=np.union1d(assembly.plan.repaired, selection.rows).astype(np.int32))
    signs = _signs(plan, selection.seen, correction, known) if settings.gate else None
    twice = len(selection.rows) - (len(plan.repaired) - len(assembly.plan.repaired)) + 1  # the last row is run again
    ended = time.perf_counter()
    kept = correction if selection.corrects else None
    return Mended(plan, logits, kept, signs, selection.probed_rows + twice, selected - began, ended - selected)


def joined(first: Mended, second: Mended) -> Mended:
    """The second attempt, over what the first one left: rows are corrected already, fresh ones are computed again."""
    both = first.correction.plus(second.correction) if first.correction and second.correction else None
    return replace(
        second,
        correction=both or first.correction or second.correction,
        probed_rows=first.probed_rows + second.probed_rows + second.plan.count(Kind.FRESH),
        select_s=first.select_s + second.select_s,
        prefill_s=first.prefill_s + second.prefill_s,
        attempts=first.attempts + 1,
    )


def compute(
    assembly: Assembly, rows: Int32Array, sampled: Int32Array, *, correct: bool = True
) -> tuple[torch.Tensor, Correction | None]:
    """One forward over `rows`; corrects the moved rows that are not among them by what `sampled` ones learnt.

    Returns the logits of the last row, float32 [V], and what was added; without `correct` the sample is measured only.
    """
    at = assembly.positions(rows)
    layers = assembly.splice_layers(at)
    chunks = assembly.plan.spans(Kind.MOVED)
    drawn = Sample.of(rows, sampled, assembly.plan.repaired, chunks, at.device) if len(sampled) else None
    if drawn is None:
        return assembly.logits(at, layers), None
    num_tokens = assembly.plan.num_tokens
    regime = assembly.support.regime(num_tokens)
    correcting, added = correcting_layers(assembly.layout, layers, drawn, regime, num_tokens, correct=correct)
    logits = assembly.logits(at, correcting)
    return logits, Correction(chunks, added, torch.stack([la.unexplained for la in correcting]).tolist())


def _with_evidence(selection: Selection, assembly: Assembly, settings: Settings) -> Selection:
    """The selection, with a look at the question's attention and a sample to measure by, if it has none or a poor one.

    Without evidence every risk is the highest, and what is fresh would be computed once more for nothing.
    """
    if selection.seen is None:
        seen = glance(assembly, assembly.positions(question(assembly.plan)))
        selection = replace(selection, seen=seen, probed_rows=selection.probed_rows + seen.charged_rows)
    plan = assembly.plan
    if len(np.intersect1d(selection.sampled, selection.rows)) < EVIDENCE_ROWS:
        step = min(settings.sample_step, max(1, plan.count(Kind.MOVED) // EVIDENCE_ROWS))
        drawn = sample(plan, step, plan.num_tokens)
        selection = replace(selection, rows=np.union1d(selection.rows, drawn).astype(np.int32), sampled=drawn)
    return selection


def _signs(
    plan: ReusePlan, seen: Glance | None, correction: Correction | None, known: gate.Signs | None
) -> gate.Signs | None:
    if seen is None:
        return None
    inexact = np.setdiff1d(positions_of(plan, Kind.MOVED), plan.repaired)
    mass = seen.mass[torch.from_numpy(inexact).long().to(seen.mass.device)].sum() / seen.mass.sum()
    if correction is None and known is not None:
        return gate.Signs(float(mass), known.unexplained)
    left = correction.unexplained if correction is not None else [1.0]
    return gate.Signs(float(mass), sum(left) / len(left))
