"""A request that is open: a part of its prompt is in a cache, and the rest is computed a block at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from kvboost.config import Settings
from kvboost.hf.compat import Cache, PreTrainedModel
from kvboost.hf.crowd import Slot, make_slot, truncate
from kvboost.hf.prefill import last_logits, model_lock, stock_prefill
from kvboost.hf.support import ModelSupport
from kvboost.prefilling import Prefilled
from kvboost.types import ReusePlan


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Made by `KVBoost.open_request` and ended by `KVBoost.close_request`. Of use in one thread at a time.

    `slot` is None for a model without plain cache rows, which only its own `generate` can decode.
    """

    model: PreTrainedModel
    support: ModelSupport
    input_ids: torch.Tensor  # [1, T]
    settings: Settings
    started: float
    slot: Slot | None = None
    prefilled: Prefilled | None = None  # None: the cache does not serve it, and `fallback` says why
    fallback: str | None = None
    computed_s: float = 0.0  # in `extend`
    logits: torch.Tensor | None = None  # float32 [V]: after the prompt, once all of it is computed

    @property
    def plan(self) -> ReusePlan:
        """What is reused."""
        size = self.input_ids.shape[1]
        return ReusePlan.nothing(size) if self.prefilled is None else self.prefilled.filled.plan

    @property
    def held_tokens(self) -> int:
        """Tokens of the prompt whose rows are there."""
        return 0 if self.slot is None else self.slot.cache.get_seq_length()

    def make_slot(self, rows: Cache | None, new_tokens: int) -> None:
        """A slot of its own for the sequence, with a copy of `rows`."""
        num_layers = len(self.support.require_layout().layers)
        self.slot = make_slot(num_layers, self.input_ids[0].tolist(), rows, new_tokens)

    def begin(self, prefilled: Prefilled | str) -> None:
        """Takes what the cache served, or why it serves nothing."""
        if isinstance(prefilled, str):
            self.fallback = prefilled
        elif self.slot is not None:  # rows that are stored later are read from where they grow
            self.prefilled = replace(prefilled, filled=replace(prefilled.filled, cache=self.slot.cache))

    def extend(self, block_tokens: int) -> torch.Tensor | None:
        """Computes the next `block_tokens` rows of the prompt; once it is complete, the logits after it [V].

        The last block is up to a quarter larger where the settings allow it: a small rest costs as much as a block.
        If the forward fails, nothing has changed.
        """
        if self.slot is None:
            raise RuntimeError("a model without plain cache rows cannot be prefilled in blocks")
        began, held, size = time.perf_counter(), self.held_tokens, self.input_ids.shape[1]
        own = self.support.block_tokens(size, self.settings, behind=self.plan.prefix_tokens)
        block = own if self.support.regime(size) else min(block_tokens, own)
        try:
            with model_lock(self.model):
                if size - held <= min(block + block // 4, own):
                    self.logits = last_logits(self.model, self.input_ids[:, held:], self.slot.cache)
                else:
                    stock_prefill(self.model, self.input_ids, self.slot.cache, held + block, block_tokens=block)
        except BaseException:
            truncate(self.slot.cache, held)
            raise
        finally:
            self.computed_s += time.perf_counter() - began
        return self.logits
