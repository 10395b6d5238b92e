"""Measures what a model's cache holds and how it uses it. Nothing is looked up by model name.

Rotary: with one-token prompts attention has nothing to mix, so every layer's key depends on the token and, through the
rotation alone, on the position: `K(position) == R(position) K(0)`. One batch of one-token prompts at several positions
therefore shows each layer's rotation. Windows: while a short forward runs, our mask function receives the model's own
mask rule for every layer and asks it how far back a query may look.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvboost.errors import UnsupportedModel
from kvboost.hf import attention, compat, splice
from kvboost.hf.layout import KVLayout, LayerLayout, group_layers
from kvboost.rotary import Fit, RotarySpec, fit_rotation

NUM_SAMPLES = 4  # tokens whose keys are compared at every position
POSITIONS = (0, 1, 7, 50, 350, 2400)
ROTATION_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
COARSE_TOLERANCE = 3e-2  # 16-bit keys


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """Every distinct config object through which a module of the model looks up its attention implementation."""
    configs = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]
    return list({id(c): c for c in configs}.values())


def run(model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> DynamicCache:
    """Runs the decoder on `input_ids` [B, T] with a plain cache, which is returned."""
    cache = DynamicCache()
    extra = {} if position_ids is None else {"position_ids": position_ids}
    with torch.no_grad():
        compat.forward(compat.decoder(model), cache, input_ids=input_ids, **extra)
    return cache


def run_hidden(model: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Last hidden states [1, T, hidden] of a stock forward."""
    with torch.no_grad():
        hidden: torch.Tensor = compat.forward(compat.decoder(model), DynamicCache(), input_ids=input_ids)[0]
    return hidden


def run_continued(model: PreTrainedModel, input_ids: torch.Tensor, split: int) -> torch.Tensor:
    """Last hidden states [1, T, hidden] when the tokens behind `split` continue the cache of those before."""
    cache = DynamicCache()
    with torch.no_grad():
        parts = [
            compat.forward(compat.decoder(model), cache, input_ids=ids)[0]
            for ids in (input_ids[:, :split], input_ids[:, split:])
        ]
    return torch.cat(parts, 1)


def cache_windows(config: Any, num_layers: int) -> list[int | None]:
    """Per layer, beyond which distance transformers' own cache drops rows; None if it keeps all."""
    layers = DynamicCache(config=config).layers[:num_layers]
    windows = [getattr(la, "sliding_window", None) if getattr(la, "is_sliding", False) else None for la in layers]
    return windows + [None] * (num_layers - len(windows))


def check_plain_cache(model: PreTrainedModel) -> DynamicCache:
    """Four tokens through a plain cache. Raises `UnsupportedModel` unless every layer keeps one K/V row per token."""
    _refuse_index_keys(model.config)
    ids = torch.arange(4, device=model.device)[None]
    try:
        cache = run(model, ids)
    except Exception as error:
        raise UnsupportedModel(
            f"it does not run with a plain key/value cache ({type(error).__name__}: {error})"
        ) from error
    for i, layer in enumerate(cache.layers):
        keys = getattr(layer, "keys", None)
        plain = isinstance(keys, torch.Tensor) and keys.dim() == 4 and keys.shape[0] == 1 and keys.shape[2] == 4
        if not plain:
            raise UnsupportedModel(f"layer {i} does not keep one key and value row per token (recurrent state)")
    expected = getattr(model.config.get_text_config(), "num_hidden_layers", len(cache.layers))
    if len(cache.layers) != expected:
        raise UnsupportedModel(f"it has {expected} layers but only {len(cache.layers)} with a key/value cache")
    return cache


def _refuse_index_keys(config: Any) -> None:
    """Raises `UnsupportedModel` if transformers' own cache for the model also holds index keys of sparse attention.

    Those choose which rows a query may see. They are not stored, so not even an exact prefix could be continued.
    """
    for i, layer in enumerate(DynamicCache(config=config).layers):
        if hasattr(layer, "indexer_keys"):
            raise UnsupportedModel(
                f"the sparse attention of layer {i} keeps index keys beside keys and values, and these are not stored"
            )


def shapes(cache: DynamicCache) -> list[LayerLayout]:
    """Shapes of the layers of a filled cache."""
    return [LayerLayout(la.keys.shape[1], la.keys.shape[3], la.values.shape[3]) for la in cache.layers]


def probe_windows(model: PreTrainedModel, num_layers: int) -> list[int | None]:
    """The sliding window of each layer. Raises `UnsupportedModel` if a layer's attention is not reached."""
    rows = torch.arange(3, device=model.device)
    job = attention.Job(rows=rows, windows=None)
    with torch.no_grad(), attention.attend_as(job, attention_configs(model)):
        compat.forward(compat.decoder(model), DynamicCache(), input_ids=rows[None], position_ids=rows[None])
    masks = dict(job.seen)
    missing = [i for i in range(num_layers) if masks.get(i, -1) < 0]
    if missing:
        raise UnsupportedModel(
            f"the attention of layer {missing[0]} does not go through transformers' attention and mask registries"
        )
    windows = {rule: attention.window_of(job.rules[rule]) for rule in set(masks.values())}
    return [windows[masks[i]] for i in range(num_layers)]


def probe_rotary(model: PreTrainedModel, layers: Sequence[LayerLayout], first: int, limit: int) -> list[RotarySpec]:
    """Each layer's rotation. Positions stay below `limit`; with `first` > 0 one row stands there, to enter that regime.

    Raises `UnsupportedModel` naming the layer if its keys are no rotation of one another.
    """
    positions = [p for p in POSITIONS if p < limit]
    keys, values = _measure(model, positions, first)
    candidates = list(_known_frequencies(model))
    tolerance = ROTATION_TOLERANCE.get(model.dtype, COARSE_TOLERANCE)
    specs = []
    for i in range(len(layers)):
        in_keys = fit_rotation(keys[i], positions, candidates, tolerance)
        in_values = fit_rotation(values[i], positions, candidates, tolerance)
        specs.append(_choose(i, in_keys, in_values))
    return specs


def _choose(layer: int, in_keys: Fit | None, in_values: Fit | None) -> RotarySpec:
    if in_keys is None or in_values is None:
        raise UnsupportedModel(f"the keys of layer {layer} depend on the position by something other than a rotation")
    if in_values.spec.style != "none":  # latent attention keeps its rotated part in the values slot
        if in_keys.spec.style != "none":
            raise UnsupportedModel(f"layer {layer} rotates both its keys and its values")
        spec = in_values.spec
        return RotarySpec(spec.style, spec.inv_freq, spec.start, "values")
    return in_keys.spec


def _measure(
    model: PreTrainedModel, positions: Sequence[int], first: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One-token prompts at every position: per layer float32 [P, samples * H, D] for keys and values, on the CPU."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.linspace(1, vocabulary - 1, NUM_SAMPLES).long()
    where = torch.tensor([*positions, first])
    ids = tokens.repeat(len(where))[:, None].to(model.device)
    cache = run(model, ids, where.repeat_interleave(NUM_SAMPLES)[:, None].to(model.device))

    def arrange(x: torch.Tensor) -> torch.Tensor:
        x = x.float().cpu().reshape(len(where), -1, x.shape[-1])
        return x[: len(positions)]

    return [arrange(la.keys) for la in cache.layers], [arrange(la.values) for la in cache.layers]


def _known_frequencies(model: PreTrainedModel) -> Iterator[torch.Tensor]:
    """Frequency vectors that the model's modules hold, each once."""
    seen: list[torch.Tensor] = []
    for module in model.modules():
        held = {**module._buffers, **{k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}}
        for name, tensor in held.items():
            if "inv_freq" in name and tensor is not None and tensor.dim() == 1:
                frequency = tensor.detach().float().cpu()
                if not any(torch.equal(frequency, s) for s in seen):
                    seen.append(frequency)
                    yield frequency


def make_layout(
    model: PreTrainedModel,
    layers: Sequence[LayerLayout],
    windows: Sequence[int | None],
    rotary: Sequence[Sequence[RotarySpec]],
) -> KVLayout:
    """Puts the measurements together. `rotary[regime][layer]`."""
    full = tuple(
        LayerLayout(la.num_kv_heads, la.key_dim, la.value_dim, windows[i], tuple(r[i] for r in rotary))
        for i, la in enumerate(layers)
    )
    return KVLayout(full, group_layers(full), model.dtype, model.device)


def recompute_all(
    model: PreTrainedModel, layout: KVLayout, input_ids: torch.Tensor, honour_softcap: bool
) -> torch.Tensor:
    """Last hidden states [1, T, hidden] when every row goes through the selective path, on top of rows of zeros."""
    rows = torch.arange(input_ids.shape[1], device=model.device)
    payload = layout.allocate(len(rows))
    for group in payload:
        group.keys.zero_()
        group.values.zero_()
    cache = compat.Cache(layers=splice.make_splice_layers(*layout.per_layer(payload), rows))
    job = attention.Job(rows=rows, windows=layout.windows, block=16, honour_softcap=honour_softcap)
    with torch.no_grad(), attention.attend_as(job, attention_configs(model)):
        hidden: torch.Tensor = compat.forward(
            compat.decoder(model), cache, input_ids=input_ids, position_ids=rows[None]
        )[0]
    return hidden
