"""What `kvboost doctor` finds out about a model, as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvboost.cli.breakeven import break_even, measure_costs
from kvboost.cli.models import verdict
from kvboost.hf import declared
from kvboost.hf.support import COARSE_TOLERANCE, TOLERANCE

if TYPE_CHECKING:
    from kvboost.codec import Codec
    from kvboost.engine import KVBoost
    from kvboost.hf.layout import LayerLayout
    from kvboost.hf.quant_probe import QuantProbe
    from kvboost.rotary import RotarySpec

CODECS: tuple[Codec, ...] = ("int8", "k8v4")


@dataclass(slots=True)
class Diagnosis:
    """The findings. `reuses` is a verdict; `limited` tells that something is refused, and `reason` what and why."""

    model: str
    architecture: str
    parameters: int
    dtype: str
    device: str
    attention: str
    reuses: str
    limited: bool
    reason: str | None
    max_tokens: int | None
    length_limits: list[str]
    bytes_per_token: int | None
    layers: list[dict[str, Any]]
    declared_rotary: dict[str, Any]
    self_check: dict[str, float]
    self_check_tolerance: float
    warnings: list[str]
    notes: list[str]
    min_run_tokens: int  # the setting: shorter moved runs are computed
    break_even_tokens: int | None = None
    run_costs: list[dict[str, float]] = field(default_factory=list)  # what `break_even_tokens` was found from
    quantization: dict[str, dict[str, Any]] = field(default_factory=dict)  # by codec: dB, nat, plain layers, refusal


def diagnose(kv: KVBoost, name: str) -> Diagnosis:
    """Collects what the engine measured at load, and measures the break-even length."""
    support, model, config = kv.support, kv.model, kv.model.config.get_text_config()
    layout = support.layout
    found = Diagnosis(
        model=name,
        architecture=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        attention=str(getattr(config, "_attn_implementation", None) or "eager"),
        reuses=verdict(kv),
        limited=support.moved_refused is not None,
        reason=support.refused or support.moved_refused,
        max_tokens=declared.max_positions(config),
        length_limits=_length_limits(kv),
        bytes_per_token=layout.bytes_per_token if layout else None,
        layers=_layers(layout.layers, probed=support.moved_refused is None) if layout else [],
        declared_rotary=_declared_rotary(config),
        self_check=dict(support.errors),
        self_check_tolerance=TOLERANCE.get(model.dtype, COARSE_TOLERANCE),
        warnings=list(support.warnings),
        notes=list(support.notes),
        min_run_tokens=kv.settings().min_run_tokens,
    )
    if support.refused is None:
        found.quantization = {codec: _quantization(kv.quantization.measure(codec)) for codec in CODECS}
    if not found.limited:
        costs = measure_costs(kv)
        found.break_even_tokens = break_even(costs)
        found.run_costs = [{"tokens": c.tokens, "compute_s": c.compute_s, "reuse_s": c.reuse_s} for c in costs]
    return found


def _quantization(probe: QuantProbe) -> dict[str, Any]:
    worst = {slot: min(min(heads) for heads in layers) for slot, layers in probe.psnr_db.items()}
    return {
        "refused": probe.refused,
        "least_db": {slot: round(db, 1) for slot, db in worst.items()},
        "kl": probe.kl,
        "plain_layers": sorted(probe.plain_layers),
    }


def _length_limits(kv: KVBoost) -> list[str]:
    limits = []
    if kv.support.regime_boundary is not None:
        limits.append(f"prompts up to {kv.support.regime_boundary} tokens and longer ones share nothing (longrope)")
    if kv.support.exact_limit_tokens is not None:
        limits.append(f"prompts longer than {kv.support.exact_limit_tokens} tokens reuse nothing (dynamic scaling)")
    return limits


def _layers(layers: Iterable[LayerLayout], *, probed: bool) -> list[dict[str, Any]]:
    """Layers that are alike, together. Windows and rotary are unknown if the model was not probed to the end."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for i, layer in enumerate(layers):
        rotary = _rotary(layer.rotary[0]) if probed else ("not probed", None, None)
        kinds.setdefault((layer.window, layer.num_kv_heads, layer.key_dim, layer.value_dim, *rotary), []).append(i)
    names = ("window", "kv_heads", "key_dim", "value_dim", "rotary", "rotated_dims", "base")
    return [{"layers": ranges(members), **dict(zip(names, kind, strict=True))} for kind, members in kinds.items()]


def _rotary(spec: RotarySpec) -> tuple[str, str | None, float | None]:
    if spec.style == "none":
        return "none", None, None
    where = f"{spec.start}-{spec.stop - 1} of {spec.slot}"
    base = declared.base_of(spec.inv_freq) if len(spec.inv_freq) > 1 else None
    return spec.style, where, base and float(f"{base:.4g}")


def _declared_rotary(config: Any) -> dict[str, Any]:
    fields = {f"{label}.{k}": v for label, section in declared.rope_sections(config) for k, v in section.items()}
    local = getattr(config, "rope_local_base_freq", None)
    return fields | ({"rope_local_base_freq": local} if local else {})


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as ranges: `0-4, 6-10`."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [[n for _, n in run] for _, run in runs]
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in ends)
