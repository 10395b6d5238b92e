"""What quantizing costs a model, measured once on its own keys and values: which layers stay as computed, and why.

A few hundred varied tokens are prefilled, packed and unpacked again. A layer of which a head's keys come back below 50
dB, or its values below 30 dB, is kept plain. The figures are what `kvboost_quant_error_psnr` is compared with later.

A peak signal to noise ratio forgives what few large channels do to the others of a token. So the last tokens are also
computed twice, behind the rows as computed and behind the packed ones, and the KL divergence of their logits decides
whether the model is packed at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from kvboost.codec import SLOTS, Codec, Packer, pack, psnr_db
from kvboost.hf import compat, declared, probe
from kvboost.hf.compat import Cache
from kvboost.hf.layout import KVLayout
from kvboost.hf.prefill import continuation_logits
from kvboost.hf.support import ModelSupport
from kvboost.rotary import RotarySpec, Slot
from kvboost.types import LayerKV

PROBE_TOKENS = 392
CHUNK_TOKENS = 128
TAIL_TOKENS = 32  # of them, whose logits are compared
MOST_KL = 0.05  # nat per token: real models are far below, see `docs/log.md`
LEAST_DB: Mapping[Slot, float] = {"keys": 50.0, "values": 30.0}


@dataclass(frozen=True, slots=True)
class QuantProbe:
    """The result of `probe_quantization`.

    `psnr_db[slot][layer][head]` is the worst of the probe's chunks, without layers kept plain for their sake.
    """

    codec: Codec
    refused: str | None = None  # why nothing is packed for this model
    plain_layers: frozenset[int] = frozenset()  # of the model
    psnr_db: Mapping[Slot, tuple[tuple[float, ...], ...]] = field(default_factory=dict)
    kl: float = 0.0  # KL(plain || packed) of the logits behind packed rows, nat per token

    def packer(self, layout: KVLayout, regime: int) -> Packer | None:
        """Packs records of prompts of one rotary regime; None if the model is refused."""
        if self.refused is not None:
            return None
        plain = [[i for i, layer in enumerate(g.layers) if layer in self.plain_layers] for g in layout.groups]
        return Packer(self.codec, [g.rotary[regime] for g in layout.groups], plain)


def probe_quantization(model: PreTrainedModel, support: ModelSupport, codec: Codec) -> QuantProbe:
    """Runs one forward of `model` and measures what `codec` loses. The caller holds the model's lock."""
    refused = _refusal(model, support)
    if refused is not None:
        return QuantProbe(codec, refused)
    layout = support.require_layout()
    ids = _varied_ids(model, support)
    cache = probe.run(model, ids)
    psnr = _worst_psnr(layout, cache, ids.shape[1], codec)
    plain = frozenset(i for slot in SLOTS for i, heads in enumerate(psnr[slot]) if not min(heads) >= LEAST_DB[slot])
    found = QuantProbe(codec, None, plain, psnr)
    kl = _tail_kl(model, layout, ids, cache, found)
    if not kl <= MOST_KL:
        refused = f"{codec} rows change its answers by {kl:.2g} nat per token (at most {MOST_KL} is allowed)"
        return replace(found, refused=refused, kl=kl)
    return replace(found, kl=kl)


def _worst_psnr(
    layout: KVLayout, cache: Cache, num_tokens: int, codec: Codec
) -> dict[Slot, tuple[tuple[float, ...], ...]]:
    """Per slot, layer and head in dB: the least of all chunks of the probe."""
    worst: dict[Slot, list[torch.Tensor]] = {
        slot: [torch.full((layer.num_kv_heads,), torch.inf) for layer in layout.layers] for slot in SLOTS
    }
    for start in range(0, num_tokens - CHUNK_TOKENS // 2, CHUNK_TOKENS):
        for i, group in enumerate(layout.gather(cache, start, min(start + CHUNK_TOKENS, num_tokens))):
            measured = _measure(group, layout.groups[i].rotary[0], start, codec)
            for slot in SLOTS:
                for layer, found in zip(layout.groups[i].layers, measured[slot], strict=True):
                    worst[slot][layer] = torch.minimum(worst[slot][layer], found)
    return {slot: tuple(tuple(heads.tolist()) for heads in worst[slot]) for slot in SLOTS}


def _tail_kl(model: PreTrainedModel, layout: KVLayout, ids: torch.Tensor, cache: Cache, found: QuantProbe) -> float:
    """Mean KL of the logits of the last tokens, behind rows as computed and behind packed ones."""
    start = ids.shape[1] - TAIL_TOKENS
    packer = found.packer(layout, 0)
    rows = layout.gather(cache, 0, start)
    if packer is None or start < CHUNK_TOKENS // 2:
        return 0.0
    logits = []
    for payload in (rows, [packer.round_trip(i, group, 0) for i, group in enumerate(rows)]):
        behind = compat.make_dynamic_cache(*layout.per_layer(payload))
        # in float64: a KL of 1e-8 nat is lost in the rounding of float32, and may come out below zero
        logits.append(continuation_logits(model, ids[:, start:], behind).cpu().double().log_softmax(-1))
    plain, packed = logits
    return (plain.exp() * (plain - packed)).sum(-1).mean().item()


def _measure(group: LayerKV, spec: RotarySpec, start: int, codec: Codec) -> dict[Slot, torch.Tensor]:
    """Per slot dB [L, H] on the CPU; NaN for a layer that cannot be packed."""
    packed = pack(group, spec, start, codec)
    if packed is not None:
        return {slot: found.cpu() for slot, found in psnr_db(group, packed, spec, start).items()}
    if len(group.keys) == 1:
        return {slot: torch.full(group.keys.shape[:2], torch.nan) for slot in SLOTS}
    parts = []
    for i in range(len(group.keys)):  # one layer spoils the whole group: which one?
        own = replace(spec, inv_freq=spec.inv_freq[i]) if spec.inv_freq.dim() == 2 else spec
        parts.append(_measure(LayerKV(group.keys[i : i + 1], group.values[i : i + 1]), own, start, codec))
    return {slot: torch.cat([p[slot] for p in parts]) for slot in SLOTS}


def _refusal(model: PreTrainedModel, support: ModelSupport) -> str | None:
    """Why nothing of this model is packed, or None."""
    if support.refused is not None:
        return support.refused
    sinks = [name for name, _ in model.named_parameters() if "sink" in name.rpartition(".")[2]]
    if sinks:
        return f"it has learned attention sinks ({sinks[0]}), and what errors of keys do beside them was not measured"
    if support.moved_refused is not None:
        return f"keys are packed before rotation, and how it rotates them is not known: {support.moved_refused}"
    return None


def _varied_ids(model: PreTrainedModel, support: ModelSupport) -> torch.Tensor:
    """Random token ids [1, n] behind the token with which the model's sequences begin; in the first rotary regime."""
    config = model.config.get_text_config()
    limits = (declared.max_positions(config), support.regime_boundary)
    size = min([PROBE_TOKENS, *(limit for limit in limits if limit is not None)])
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (1, size), generator=torch.Generator().manual_seed(0))
    if isinstance(config.bos_token_id, int):
        ids[0, 0] = config.bos_token_id
    return ids.to(model.device)
