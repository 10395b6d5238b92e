"""Tiny random models of many families, 2 to 4 layers: real architectures, no downloads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvboost.hf import compat

VOCABULARY = 199
WINDOW = 24
LONGROPE_BOUNDARY = 384

COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Family:
    """One architecture: its config, and which reuse it supports."""

    name: str
    model_type: str
    options: Mapping[str, Any] = field(default_factory=dict)
    reuse: str = "moved"  # moved | exact | none
    since: str = "4.57"  # older transformers have no attention registry in this family
    attention: tuple[str, ...] = ("sdpa", "eager")
    window: int | None = None


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_scaling": parameters, "rope_theta": 10000.0}


MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 48}
PER_TYPE = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
}
INDEXER = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 4}

FAMILIES = [
    Family("llama", "llama"),
    Family("llama-linear", "llama", _rope(rope_type="linear", factor=4.0)),
    Family(
        "llama3-scaled",
        "llama",
        _rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    Family("yarn", "qwen2", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)),
    Family(
        "longrope-phi3",
        "phi3",
        {
            "rope_theta": 10000.0,
            "original_max_position_embeddings": LONGROPE_BOUNDARY,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + 0.3 * i for i in range(8)],
            },
        },
    ),
    Family("mistral-window", "mistral", {"sliding_window": WINDOW}, window=WINDOW),
    Family("mixtral", "mixtral", MOE),
    Family("qwen2", "qwen2"),
    Family("qwen3", "qwen3", {"head_dim": 16}),
    Family("qwen3-moe", "qwen3_moe", {**MOE, "head_dim": 16, "decoder_sparse_step": 1}),
    Family("gemma", "gemma", {"head_dim": 16}),
    Family("gemma2", "gemma2", {"head_dim": 16, **PER_TYPE}, attention=("eager",), window=WINDOW),
    Family(
        "gemma3",
        "gemma3_text",
        {"head_dim": 16, **PER_TYPE, "rope_local_base_freq": 10000.0, "rope_theta": 1e6},
        window=WINDOW,
    ),
    Family("phi", "phi", {"partial_rotary_factor": 0.5}),
    Family("gpt-neox", "gpt_neox", {"rotary_pct": 0.25}),
    Family(
        "gptj", "gptj", {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 512}, since="5.24"
    ),
    Family("cohere", "cohere"),
    Family("cohere2", "cohere2", {**PER_TYPE, "head_dim": 16}, window=WINDOW),
    Family("stablelm", "stablelm", {"partial_rotary_factor": 0.25}, since="5.16"),
    Family("olmo2", "olmo2"),
    Family("smollm3", "smollm3", {"no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2}),
    Family("glm", "glm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    Family("granite", "granite", {"attention_multiplier": 0.25, "residual_multiplier": 0.5}),
    Family("deepseek-v3", "deepseek_v3", MLA),
    Family("llama-dynamic", "llama", _rope(rope_type="dynamic", factor=2.0), reuse="exact"),
    Family("gpt2", "gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}, reuse="exact"),
    Family("opt", "opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}, reuse="exact"),
    Family("bloom", "bloom", {"n_layer": 3, "n_head": 4}, reuse="exact", attention=("eager",)),
    Family("mamba", "mamba", {"state_size": 8}, reuse="none", attention=("eager",)),
    Family("deepseek-v3.2", "deepseek_v32", {**MLA, **INDEXER}, reuse="none", since="5.16"),
    Family("glm-dsa", "glm_moe_dsa", {**MLA, **INDEXER}, reuse="none", since="5.16"),
]
BY_NAME = {f.name: f for f in FAMILIES}
SUPPORTED_HERE = [f for f in FAMILIES if Version(f.since) <= compat.VERSION]
MOVABLE = [f for f in SUPPORTED_HERE if f.reuse == "moved"]


@functools.cache
def build(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The family's model with weights from a fixed seed, in evaluation mode. Cached: do not change it."""
    return build_fresh(name, attention, dtype)


def build_fresh(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """As `build`, but a model of the caller's own."""
    family = BY_NAME[name]
    config = AutoConfig.for_model(family.model_type, **{**COMMON, **family.options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(2.0)  # sharper attention than the usual initialisation, so that mistakes show
    return model.to(dtype).eval()


def random_ids(num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Random token ids, int64 [1, num_tokens], special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, num_tokens), generator=generator)
