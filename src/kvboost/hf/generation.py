"""`model.generate`, seen from outside: what our cache can serve, and when the first token came."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from kvboost.hf import compat

# arguments of generate that neither change what the prompt's rows are nor who owns the cache
HARMLESS = frozenset(
    {"inputs", "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria"}
    | {"prefix_allowed_tokens_fn", "synced_gpus", "streamer", "tokenizer", "use_model_defaults", "use_cache"}
    | {"negative_prompt_ids", "negative_prompt_attention_mask", "return_dict", "trust_remote_code"}
)
UNSERVED_OPTIONS = {
    "num_beams": "beam search",
    "num_return_sequences": "several sequences per prompt",
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa decoding",
    "prompt_lookup_num_tokens": "assisted decoding",
    "assistant_early_exit": "assisted decoding",
    "use_mtp": "assisted decoding",
    "cache_implementation": "another cache implementation",
    "prefill_chunk_size": "chunked prefill by transformers",
    "output_attentions": "attention weights of all prompt rows",
    "output_hidden_states": "hidden states of all prompt rows",
    "low_memory": "low-memory search",
    "guidance_scale": "classifier-free guidance",
}

DEFAULTS = GenerationConfig()


class FirstTokenClock(LogitsProcessor):
    """Notes when the first token's logits arrive; changes nothing."""

    def __init__(self) -> None:
        self.first_token_at: float | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Returns `scores` untouched."""
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        return scores


def with_clock(kwargs: Mapping[str, Any], clock: FirstTokenClock) -> dict[str, Any]:
    """The arguments of generate with `clock` after the caller's own logits processors."""
    return {**kwargs, "logits_processor": LogitsProcessorList([*(kwargs.get("logits_processor") or []), clock])}


def with_mask(input_ids: torch.Tensor, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with a mask over the whole prompt, which generate needs once a cache is given."""
    absent = {"attention_mask", "input_ids", "inputs", *compat.CACHE_ARGUMENTS}
    given = {k: v for k, v in kwargs.items() if v is not None or k not in absent}
    return {"attention_mask": torch.ones_like(input_ids), **given}


def sequences(output: Any) -> torch.Tensor:
    """Prompt and answer in what generate returned."""
    ids: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
    return ids


def find_input_ids(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The prompt of a call of generate, wherever it was passed."""
    if args:
        return args[0]
    return kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs.get("inputs")


def unserved_reason(model: PreTrainedModel, input_ids: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Why a call of generate must go to transformers unchanged; None if the cache can serve it."""
    if model.training:
        return "the model is in train mode"
    if any(kwargs.get(name) is not None for name in compat.CACHE_ARGUMENTS):
        return "the caller brings a cache"
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        return "the prompt is not a tensor of token ids"
    if input_ids.shape[0] != 1:
        return "batch size is not 1"
    if input_ids.shape[1] < 2:
        return "the prompt has fewer than two tokens"
    if "prepare_inputs_for_generation" in vars(model):
        return "a wrapper prepares the model's inputs (prompt tuning)"
    if torch.is_autocast_enabled(input_ids.device.type):
        return "autocast is on"
    if _is_padded(model, input_ids, kwargs):
        return "the prompt is padded"
    return _unserved_option(model, kwargs)


def _is_padded(model: PreTrainedModel, input_ids: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Without a mask transformers takes every pad token for padding, unless that token also ends a text."""
    mask = kwargs.get("attention_mask")
    if mask is not None:
        return mask.shape != input_ids.shape or not bool(mask.bool().all())
    pad, eos = (_effective(model, kwargs, name) for name in ("pad_token_id", "eos_token_id"))
    ends = set(torch.as_tensor(eos).reshape(-1).tolist()) if eos is not None else set()
    return pad is not None and int(pad) not in ends and bool((input_ids == int(pad)).any())


def _effective(model: PreTrainedModel, kwargs: Mapping[str, Any], name: str) -> Any:
    """The value that generate will use: argument, then the given config, then the model's own.

    A config that leaves an option at its default does not decide it: transformers then asks the next one.
    """
    if name in kwargs:
        return kwargs[name]
    default = getattr(DEFAULTS, name, None)
    configs = (kwargs.get("generation_config"), model.generation_config)
    values = (getattr(config, name, None) for config in configs if config is not None)
    return next((v for v in values if v is not None and v != default), default)


def _unserved_option(model: PreTrainedModel, kwargs: Mapping[str, Any]) -> str | None:
    known = set((kwargs.get("generation_config") or model.generation_config).to_dict()) | HARMLESS
    for name, value in kwargs.items():
        if name not in known and value is not None:
            return f"argument {name!r} is not understood by the cache"
    if _effective(model, kwargs, "use_cache") is False:
        return "use_cache is False"
    option = {name: _effective(model, kwargs, name) for name in UNSERVED_OPTIONS}
    return next((UNSERVED_OPTIONS[n] for n, v in option.items() if v is True or v not in (None, False, 0, 1)), None)
