"""The forwards of a request: the stock one over a suffix, and the selective one over scattered rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvboost.hf import attention, compat, splice
from kvboost.hf.support import ModelSupport
from kvboost.types import LayerKV

_locks: WeakKeyDictionary[torch.nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


def model_lock(model: PreTrainedModel) -> threading.RLock:
    """The one lock of a model, shared by every engine on it: selective forwards of one model never overlap."""
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


def selective_prefill(
    model: PreTrainedModel,
    support: ModelSupport,
    input_ids: torch.Tensor,
    rows: torch.Tensor,
    payload: Sequence[LayerKV],
    *,
    query_block_tokens: int,
) -> DynamicCache:
    """Computes `rows` (int64 [m], sorted positions) of `input_ids` [1, T] over preloaded rows, in one forward.

    `payload` holds T rows per layer group; those of `rows` may hold anything and are overwritten in place. Every query
    row attends with an exact causal (or sliding) mask by true position. Returns a plain cache over `payload`.
    """
    layout = support.require_layout()
    keys, values = layout.per_layer(payload)
    if len(rows):
        job = attention.Job(
            rows=rows, windows=layout.windows, block=query_block_tokens, honour_softcap=support.honour_softcap
        )
        with torch.no_grad(), attention.attend_in_blocks(support.configs, job):
            compat.forward(
                compat.decoder(model),
                splice.make_splice_cache(keys, values, rows),
                input_ids=input_ids[:, rows],
                position_ids=rows[None],
            )
    return compat.make_dynamic_cache(keys, values)


def stock_prefill(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: DynamicCache, stop: int, *, block_tokens: int
) -> None:
    """Extends `cache` to the first `stop` tokens of `input_ids` [1, T] with the stock forward, block by block."""
    start = cache.get_seq_length()
    while start < stop:
        end = min(stop, start + block_tokens)
        with torch.no_grad():
            compat.forward(compat.decoder(model), cache, input_ids=input_ids[:, start:end])
        start = end


def continuation_logits(model: PreTrainedModel, input_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Logits after each of the tokens `input_ids` [1, m] that follow `cache`, which grows by them: float32 [m, V]."""
    with torch.no_grad():
        logits: torch.Tensor = compat.forward(model, cache, input_ids=input_ids).logits[0]
    return logits.float()
