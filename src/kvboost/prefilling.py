"""From a plan and its records to a cache that `model.generate` continues.

plan reuses a prefix only   load -> stock forward over what is new
plan moves rows             load, shift -> mend (select, one forward, judge) -> or give the moved rows up
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kvboost.config import Settings
from kvboost.hf import compat
from kvboost.hf.assembly import Assembly
from kvboost.hf.compat import Cache, DynamicCache, PreTrainedModel
from kvboost.hf.correction import Correction
from kvboost.hf.load import load_rows
from kvboost.hf.prefill import model_lock, stock_prefill
from kvboost.hf.support import ModelSupport
from kvboost.keys import KeySpace
from kvboost.repair import STRATEGIES
from kvboost.repair.gate import bound
from kvboost.repair.mending import Mended, mend
from kvboost.types import ChunkHeader, ChunkKV, ReusePlan, ReuseReport

GIVEN_UP = "the estimated error of moved text is above the bound"


@dataclass(frozen=True, slots=True)
class Filled:
    """What a prefill served, the cache that it made, and its report so far."""

    plan: ReusePlan
    cache: Cache
    report: ReuseReport
    correction: Correction | None = None  # what was added to moved rows
    logits: torch.Tensor | None = None  # float32 [V]: of the last row, where moved rows were served


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A filled cache, and what is needed to store its rows later."""

    filled: Filled
    keys: KeySpace
    sources: Mapping[bytes, ChunkHeader]  # headers of the records served
    report: ReuseReport
    drawn: bool = False  # for a check by a full prefill
    drawn_logits: torch.Tensor | None = None  # float32 [V]: of the last token, if drawn and they were computed


@dataclass(frozen=True, slots=True, eq=False)
class Prefilling:
    """One prompt `input_ids` [1, T] and the records that its plan may use.

    With `prefix_only` nothing is computed behind an unmoved prefix: whoever asked computes the rest.
    """

    model: PreTrainedModel
    support: ModelSupport
    input_ids: torch.Tensor
    records: Mapping[bytes, ChunkKV]
    settings: Settings
    prefix_only: bool = False

    def fill(self, plan: ReusePlan) -> Filled:
        """A cache of as much of the prompt as the plan allows, at most of all tokens but the last."""
        return self._continue_prefix(plan) if plan.is_prefix_only else self._move(plan)

    def _continue_prefix(self, plan: ReusePlan) -> Filled:
        """The reused prefix, and whole blocks behind it by the stock forward; the rest is left to `model.generate`."""
        layout, start = self.support.require_layout(), plan.prefix_tokens
        payload, times = load_rows(plan, self.records, layout, self.support.regime(plan.num_tokens), start)
        began = time.perf_counter()
        cache = compat.make_dynamic_cache(*layout.per_layer(payload)) if start else DynamicCache()
        block = self.support.block_tokens(plan.num_tokens, self.settings, behind=start)
        whole = 0 if self.prefix_only else (plan.num_tokens - start - 1) // block * block
        if whole:
            stock_prefill(self.model, self.input_ids, cache, start + whole, block_tokens=block)
        prefill_s = time.perf_counter() - began
        report = replace(ReuseReport.of(plan), load_s=times.load_s, shift_s=times.shift_s, prefill_s=prefill_s)
        return Filled(plan, cache, report)

    def _move(self, plan: ReusePlan) -> Filled:
        """All tokens but the last: moved rows shifted, some repaired, fresh ones computed."""
        layout = self.support.require_layout()
        regime = self.support.regime(plan.num_tokens)
        payload, times = load_rows(plan, self.records, layout, regime, plan.num_tokens)
        block = self.settings.query_block_tokens
        assembly = Assembly(self.model, self.support, self.input_ids, plan, payload, block)
        with model_lock(self.model):
            mended = mend(assembly, STRATEGIES[self.settings.recompute_strategy], self.settings)
        if mended.risk is not None and mended.risk > bound(self.settings):
            return self._give_up(plan, mended)
        keys, values = layout.per_layer(payload)
        cache = compat.make_dynamic_cache([k[:, :, :-1] for k in keys], [v[:, :, :-1] for v in values])
        report = replace(
            ReuseReport.of(mended.plan, mended.probed_rows),
            load_s=times.load_s,
            shift_s=times.shift_s,
            select_s=mended.select_s,
            prefill_s=mended.prefill_s,
            risk=mended.risk,
            signs=mended.signs.as_dict() if mended.signs is not None else {},
            escalations=mended.attempts - 1,
            strategy=self.settings.recompute_strategy,
        )
        return Filled(mended.plan, cache, report, mended.correction, mended.logits)

    def _give_up(self, plan: ReusePlan, mended: Mended) -> Filled:
        """The prefix and a full prefill, since the estimated error of the moved rows is above the bound."""
        filled = self._continue_prefix(plan.prefix_only())
        wasted_rows = mended.probed_rows + len(mended.plan.computed_rows(plan.num_tokens))
        report = replace(
            ReuseReport.of(filled.plan, wasted_rows),
            load_s=filled.report.load_s,
            select_s=mended.select_s + mended.prefill_s,
            prefill_s=filled.report.prefill_s,
            risk=0.0,
            signs=mended.signs.as_dict() if mended.signs is not None else {},
            escalations=mended.attempts,
            fallback=GIVEN_UP,
        )
        return Filled(filled.plan, filled.cache, report)
