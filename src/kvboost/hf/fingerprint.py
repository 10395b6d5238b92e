"""Which model computed a row: weights, config, dtype, attention, tokenizer, and the adapters active right now."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import torch
from blake3 import blake3
from transformers import PreTrainedModel

from kvboost.hf.attention import original_name

SAMPLES_PER_PARAMETER = 1024
VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "output_attentions"}


class Fingerprint:
    """The identity of a model, cheap to ask for at every request.

    Weights are sampled when this is made and again whenever a parameter's storage or version counter has changed, so
    an optimizer step, `load_state_dict` or a new adapter is noticed, and from then on nothing is shared with other
    processes. Writes through `.data` are not noticed: call `renew`.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        self._model = model
        self._tokenizer = _hash_tokenizer(tokenizer)
        self._state: tuple[object, ...] = ()
        self._weights = b""

    def current(self) -> bytes:
        """32 bytes. Costs about a millisecond when nothing changed."""
        state = tuple((t.data_ptr(), -1 if t.is_inference() else t._version) for _, t in _tensors(self._model))
        if state != self._state:
            changed = bool(self._state)
            self.refresh()
            self._state = state
            if changed:
                self._make_unique()
        attention = original_name(self._model.config.get_text_config()._attn_implementation)
        parts = (self._weights, self._tokenizer, json.dumps(_adapters(self._model)), attention)
        hasher = blake3()
        for part in parts:
            data = part if isinstance(part, bytes) else part.encode()
            hasher.update(len(data).to_bytes(8, "little") + data)
        return hasher.digest()

    def renew(self) -> None:
        """Samples the weights anew; nothing older is ever found again."""
        self.refresh()
        self._make_unique()

    def _make_unique(self) -> None:
        """A sample may miss what was written."""
        self._weights = blake3(self._weights + os.urandom(32)).digest()

    def refresh(self) -> None:
        """Samples the weights anew."""
        hasher = blake3(_config_json(self._model).encode())
        for name, tensor in _tensors(self._model):
            hasher.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}{tensor.device.type}".encode())
            hasher.update(_sample(tensor))
        self._weights = hasher.digest()


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers. Rotary frequencies are left out: models exchange them by prompt length."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if "inv_freq" not in name)


def _sample(parameter: torch.Tensor) -> bytes:
    flat = parameter.detach().reshape(-1)
    stride = max(1, flat.numel() // SAMPLES_PER_PARAMETER)
    return flat[::stride].contiguous().view(torch.uint8).cpu().numpy().tobytes()


def _config_json(model: PreTrainedModel) -> str:
    content = {k: v for k, v in model.config.to_dict().items() if k not in VOLATILE}
    return json.dumps(content, sort_keys=True, default=str)


def _hash_tokenizer(tokenizer: Any) -> bytes:
    if tokenizer is None:
        return b""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return blake3(text.encode()).digest()


def _adapters(model: PreTrainedModel) -> list[Any]:
    """State of every adapter layer (PEFT): which adapters act, how strongly, merged or switched off."""
    return [
        [
            name,
            list(module.active_adapters),
            bool(getattr(module, "disable_adapters", False)),
            list(getattr(module, "merged_adapters", [])),
            sorted((k, repr(v)) for k, v in getattr(module, "scaling", {}).items()),
        ]
        for name, module in model.named_modules()
        if isinstance(getattr(type(module), "active_adapters", None), property)
    ]
