"""Every difference between the supported versions of transformers (4.57 to 5.x), in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

__all__ = ["Cache", "DynamicCache", "PreTrainedModel"]

VERSION = Version(transformers.__version__)
MAJOR = VERSION.major

CACHE_ARGUMENT = "cache" if Version("5.24") <= VERSION else "past_key_values"
"""Name of the cache argument of forward and generate, and of the attribute of their outputs; renamed in 5.24."""

CACHE_ARGUMENTS = frozenset({"cache", "past_key_values"})


def forward(model: torch.nn.Module, cache: Cache, **inputs: Any) -> Any:
    """Calls `model` with `cache`, which it fills in place; returns the model's output."""
    return model(**inputs, **{CACHE_ARGUMENT: cache}, use_cache=True, return_dict=True)


def make_dynamic_cache(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> DynamicCache:
    """A plain cache that holds the given rows, `[1, H, n, D]` per layer, without copying them.

    Plain layers on purpose, for sliding layers too: they keep every row, and HF's masks restrict what is seen.
    """
    cache = DynamicCache()
    for k, v in zip(keys, values, strict=True):
        layer = DynamicLayer()
        layer.dtype, layer.device = k.dtype, k.device
        layer.keys, layer.values = k, v
        layer.is_initialized = True
        cache.layers.append(layer)
    return cache


def rope_parameters(config: Any) -> dict[str, Any]:
    """The declared rotary settings of a config, `rope_type`, `rope_theta`, ...; in 5.x one dict per layer type."""
    declared = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parameters = dict(declared)
    if "rope_theta" not in parameters and getattr(config, "rope_theta", None) is not None:
        parameters["rope_theta"] = config.rope_theta
    return parameters


def set_attention(configs: Sequence[Any], names: Sequence[str | None]) -> list[str | None]:
    """Sets the attention implementation that each config names; returns the former names."""
    former = [config._attn_implementation for config in configs]
    for config, name in zip(configs, names, strict=True):
        config._attn_implementation_internal = name
    return former


def decoder(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its language-model head."""
    return cast(torch.nn.Module, model.base_model)
