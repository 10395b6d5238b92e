"""What a model supports, decided once at load by measuring it; and why not, in words that a user reads.

Three outcomes: all kinds of reuse; EXACT reuse only (`moved_refused` says why); none (`refused` says why). A self-check
compares our path with the model's own: recomputing every row must give a plain prefill's last hidden states, and the
first layer's keys of a moved chunk must be the keys that the model computes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost.config import Settings
from kvboost.errors import UnsupportedModel
from kvboost.hf import attention, declared, probe
from kvboost.hf.layout import KVLayout
from kvboost.rotary import NO_ROTATION, RotarySpec, shift

CHECK_TOKENS = 96
CHECK_SHIFT = 37
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
COARSE_TOLERANCE = 5e-2  # 16-bit models: about twice what eager and SDPA differ by
PROBE_LIMIT = 4096
STOCK_ATTENTION = ("sdpa", "eager")


@dataclass(slots=True)
class ModelSupport:
    """The result of `inspect_model`."""

    configs: list[Any]
    layout: KVLayout | None = None  # None: nothing can be reused
    refused: str | None = None
    moved_refused: str | None = None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing, not worth a log line
    regime_boundary: int | None = None  # longrope: prompts longer than this use other frequencies
    exact_limit_tokens: int | None = None  # dynamic scaling: longer prompts are not reusable at all
    attention: str = "sdpa"  # the implementation that was measured
    errors: dict[str, float] = field(default_factory=dict)  # self-check, relative

    def require_layout(self) -> KVLayout:
        """The layout of a model that supports reuse; raises `UnsupportedModel` otherwise."""
        if self.layout is None:
            raise UnsupportedModel(self.refused or "no reuse is possible")
        return self.layout

    @property
    def honour_softcap(self) -> bool:
        """SDPA in transformers 4.57 ignores a soft cap, and then so must we; every other implementation applies it."""
        return self.attention != "sdpa"

    def outdated(self, model: PreTrainedModel) -> str | None:
        """Why the measurements no longer describe `model`, or None."""
        layout = self.layout
        if layout is not None and (model.dtype != layout.dtype or model.device != layout.device):
            return (
                f"the model was cast or moved since it was inspected (now {model.dtype} on {model.device}); "
                "make a new engine"
            )
        now = _implementation(model)
        return None if now == self.attention else f"its attention was changed to {now!r}; make a new engine"

    @staticmethod
    def tolerance(dtype: torch.dtype) -> float:
        """The largest relative error that a self-check lets pass."""
        return TOLERANCE.get(dtype, COARSE_TOLERANCE)

    def regime(self, num_tokens: int) -> int:
        """Index of the rotary regime in which a prompt of this length is computed."""
        return int(self.regime_boundary is not None and num_tokens > self.regime_boundary)

    def refuses_length(self, num_tokens: int) -> str | None:
        """Why a prompt of this length cannot be reused, or None."""
        if self.exact_limit_tokens is not None and num_tokens >= self.exact_limit_tokens:
            return f"dynamic rotary scaling changes all keys from {self.exact_limit_tokens} tokens on"
        return None

    def allows_moved(self, num_tokens: int) -> bool:
        """Whether a prompt of this length may reuse moved rows.

        With one token more than the boundary of longrope, a forward of all rows but the last would still be in the
        short regime, while a full prefill is in the long one.
        """
        crosses = self.regime_boundary is not None and num_tokens == self.regime_boundary + 1
        return self.moved_refused is None and not crosses

    def block_tokens(self, num_tokens: int, settings: Settings, behind: int = 0) -> int:
        """Size of prefill blocks of a prompt, smaller `behind` rows that are reused.

        In the long regime of longrope one forward must see the last position.
        """
        if self.regime(num_tokens):
            return num_tokens
        largest = settings.prefill_block_tokens
        return min(largest, settings.continuation_block_tokens) if behind else largest


def inspect_model(model: PreTrainedModel) -> ModelSupport:
    """Measures and self-checks `model` with a few short forwards; never raises for a model that is unsupported."""
    support = ModelSupport(configs=probe.attention_configs(model), attention=_implementation(model))
    text_config = model.config.get_text_config()
    support.warnings += declared.problems(text_config)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        _inspect(model, support, text_config)
    finally:
        for module, training in modes.items():
            module.training = training
    return support


def _inspect(model: PreTrainedModel, support: ModelSupport, config: Any) -> None:
    try:
        _require_one_plain_model(model)
        layers = probe.shapes(probe.check_plain_cache(model))
        _check_continuation(model, support, config)
    except UnsupportedModel as error:
        support.refused = support.moved_refused = str(error)
        return
    except Exception as error:
        support.refused = support.moved_refused = f"it could not be probed ({type(error).__name__}: {error})"
        return
    types = declared.rope_types(config)
    if "dynamic" in types:
        support.exact_limit_tokens = declared.original_max_positions(config)
    support.layout = probe.make_layout(model, layers, [None] * len(layers), [[NO_ROTATION] * len(layers)])
    try:
        _require_stock_attention(model, types)
        windows = probe.probe_windows(model, len(layers))
        if probe.cache_windows(config, len(layers)) not in ([None] * len(layers), windows):
            support.layout = None
            support.refused = "its attention window is enforced by dropping cache rows, not by its mask"
            raise UnsupportedModel(support.refused)
        rotary = _probe_regimes(model, support, layers, types, config)
        support.layout = probe.make_layout(model, layers, windows, rotary)
        _self_check(model, support)
        _compare_with_declared(support, config, rotary[0])
    except UnsupportedModel as error:
        support.moved_refused = str(error)
    except Exception as error:
        support.moved_refused = f"it could not be probed ({type(error).__name__}: {error})"


def _require_one_plain_model(model: PreTrainedModel) -> None:
    if model.config.is_encoder_decoder:
        raise UnsupportedModel("it is an encoder-decoder model")
    if len({p.device for p in model.parameters()}) > 1:
        raise UnsupportedModel("its parameters are spread over several devices")
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise UnsupportedModel("it is compiled")


def _require_stock_attention(model: PreTrainedModel, rope_types: set[str]) -> None:
    if "dynamic" in rope_types:
        raise UnsupportedModel("rope_type 'dynamic' changes the frequencies with the length of the prompt")
    implementation = _implementation(model)
    if implementation not in STOCK_ATTENTION:
        raise UnsupportedModel(f"attention implementation {implementation!r} cannot express scattered rows; use 'sdpa'")
    if getattr(model, "is_quantized", False):
        raise UnsupportedModel("its weights are quantized, so the path cannot be checked against a full prefill")


def _implementation(model: PreTrainedModel) -> str:
    return attention.original_name(model.config.get_text_config()._attn_implementation)


def _probe_regimes(
    model: PreTrainedModel, support: ModelSupport, layers: Sequence[Any], types: set[str], config: Any
) -> list[list[RotarySpec]]:
    limit = min(PROBE_LIMIT, declared.max_positions(config) or PROBE_LIMIT)
    if "longrope" not in types:
        return [probe.probe_rotary(model, layers, 0, limit)]
    boundary = declared.original_max_positions(config)
    support.regime_boundary = boundary
    near = min(limit, boundary)
    short = probe.probe_rotary(model, layers, 0, near)
    far = probe.probe_rotary(model, layers, boundary, near)
    probe.run(model, torch.zeros(1, 1, dtype=torch.long, device=model.device))  # leaves the module in the short regime
    return [short, far]


def _check_ids(model: PreTrainedModel, config: Any) -> torch.Tensor:
    num_tokens = min(CHECK_TOKENS, declared.max_positions(config) or CHECK_TOKENS)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (1, num_tokens), generator=generator).to(model.device)


def _check_continuation(model: PreTrainedModel, support: ModelSupport, config: Any) -> None:
    """A prefix from a cache must give what a plain prefill gives, or not even exact reuse is sound."""
    ids = _check_ids(model, config)
    error = _hidden_error(probe.run_continued(model, ids, ids.shape[1] // 2), probe.run_hidden(model, ids))
    tolerance = support.tolerance(model.dtype)
    support.errors["continuation"] = error
    if not error <= tolerance:
        raise UnsupportedModel(
            f"a continued cache is off a plain prefill by {error:.1e} (at most {tolerance:.0e} is allowed)"
        )


def _self_check(model: PreTrainedModel, support: ModelSupport) -> None:
    layout = support.require_layout()
    ids = _check_ids(model, model.config.get_text_config())
    plain = probe.run_hidden(model, ids)
    ours = probe.recompute_all(model, layout, ids, support.honour_softcap)
    tolerance = support.tolerance(model.dtype)
    support.errors["recompute"] = _hidden_error(ours, plain)
    support.errors["shift"] = _shift_error(model, layout, ids)
    for name, error in sorted(support.errors.items()):
        if not error <= tolerance:
            raise UnsupportedModel(f"the {name} self-check is off by {error:.1e} (at most {tolerance:.0e} is allowed)")


def _shift_error(model: PreTrainedModel, layout: KVLayout, ids: torch.Tensor) -> float:
    """First layer: rows moved by `CHECK_SHIFT` against rows computed there."""
    moved_ids = torch.cat([ids[:, :CHECK_SHIFT], ids], 1)[:, : ids.shape[1]]
    size = ids.shape[1] - CHECK_SHIFT
    near, far = (probe.run(model, i).layers[0] for i in (ids, moved_ids))
    spec = layout.layers[0].rotary[0]
    source, target = (getattr(c, spec.slot)[0] for c in (near, far))
    old = torch.arange(size, device=ids.device)
    out = torch.empty_like(source[:, :size])
    shift(source[:, :size], old, old + CHECK_SHIFT, spec, out)
    return _relative(out, target[:, CHECK_SHIFT:])


def _hidden_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Error of hidden states [1, T, hidden]. In 16 bit of all rows but a tenth: a mixture's router may break ties."""
    rows = (ours.float() - truth.float()).abs().amax(-1).flatten() / truth.float().abs().max().clamp_min(1e-20)
    return rows.max().item() if ours.dtype in TOLERANCE else rows.quantile(0.9).item()


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.float() - b.float()).abs().max() / b.float().abs().max().clamp_min(1e-20)).item()


def _compare_with_declared(support: ModelSupport, config: Any, rotary: Sequence[RotarySpec]) -> None:
    for spec in {id(s.inv_freq): s for s in rotary if s.style != "none"}.values():
        mismatch = declared.base_mismatch(config, spec.inv_freq)
        if mismatch is not None and mismatch not in support.warnings:
            support.warnings.append(mismatch)
    custom = declared.custom_base(config)
    if custom is not None:
        support.notes.append(custom)
