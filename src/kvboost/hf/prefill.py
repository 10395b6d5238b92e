"""The stock forwards of a request, and the lock of its model. The selective forward is `kvboost.hf.assembly`."""

from __future__ import annotations

import inspect
import threading
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvboost.hf import compat

_locks: WeakKeyDictionary[torch.nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


def model_lock(model: PreTrainedModel) -> threading.RLock:
    """The one lock of a model, shared by every engine on it: selective forwards of one model never overlap."""
    with _locks_guard:
        return _locks.setdefault(model, threading.RLock())


def stock_prefill(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache, stop: int, *, block_tokens: int
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


def last_logits(model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Logits after the last of the tokens `input_ids` [1, m] that follow `cache`, which grows by them: float32 [V]."""
    names = inspect.signature(model.forward).parameters
    keep = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
    with torch.no_grad():
        logits: torch.Tensor = compat.forward(model, cache, input_ids=input_ids, **keep).logits[0, -1]
    return logits.float()


def peek_logits(model: PreTrainedModel, input_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Logits of the last of the tokens `input_ids` [1, T], of which `cache` holds the first: float32 [V].

    The cache is left as it was.
    """
    held = cache.get_seq_length()
    last = continuation_logits(model, input_ids[:, held:], cache)[-1]
    cache.crop(held - input_ids.shape[1])
    return last
