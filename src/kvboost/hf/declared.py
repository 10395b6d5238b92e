"""What a config declares about its rotary embedding: problems are named by field."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kvboost.hf import compat

REQUIRED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "proportional": (),
}
USUAL_BASES = (10_000.0, 500_000.0, 1_000_000.0)


def rope_sections(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(label, parameters) of every rotary section that a config declares; several when layer types differ."""
    parameters = compat.rope_parameters(config)
    nested = {k: v for k, v in parameters.items() if isinstance(v, Mapping)}
    if nested:
        yield from ((f"rope_parameters.{k}", dict(v)) for k, v in nested.items())
    elif parameters:
        yield "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling", parameters


def rope_types(config: Any) -> set[str]:
    """Every declared `rope_type`."""
    return {_rope_type(p) for _, p in rope_sections(config)}


def original_max_positions(config: Any) -> int:
    """Length up to which a scaled rotary embedding behaves as in training."""
    for _, parameters in rope_sections(config):
        if parameters.get("original_max_position_embeddings"):
            return int(parameters["original_max_position_embeddings"])
    declared = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
    return int(declared)


def max_positions(config: Any) -> int | None:
    """The longest sequence that the config admits, None if it does not say."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(limit) if limit else None


def problems(config: Any) -> list[str]:
    """Inconsistent rotary declarations, each a sentence that names the field."""
    found: list[str] = []
    for label, parameters in rope_sections(config):
        kind = _rope_type(parameters)
        if kind not in REQUIRED_FIELDS:
            found.append(f"{label}.rope_type is {kind!r}, which is none of {', '.join(REQUIRED_FIELDS)}")
            continue
        fallback = vars(config)
        missing = [f for f in REQUIRED_FIELDS[kind] if parameters.get(f) is None and fallback.get(f) is None]
        found += [f"{label} declares rope_type {kind!r} without {field}" for field in missing]
        found += _filled_in(config, label, kind, parameters)
    return found


def _filled_in(config: Any, label: str, kind: str, parameters: Mapping[str, Any]) -> list[str]:
    """Transformers 5 replaces a missing original length by the longest one; a stretched model cannot mean that."""
    original = parameters.get("original_max_position_embeddings")
    stretched = float(parameters.get("factor") or 1.0) > 1.0
    if kind not in ("yarn", "llama3") or not stretched or original is None or original != max_positions(config):
        return []
    return [
        f"{label} declares rope_type {kind!r} without original_max_position_embeddings, or with the same value as "
        f"max_position_embeddings ({original})"
    ]


def base_of(inv_freq: torch.Tensor) -> float:
    """The base whose plain rotary embedding has these frequencies, [R/2] with at least two; from the second one."""
    return math.exp(-math.log(max(abs(inv_freq[1].item()), 1e-30)) * len(inv_freq))


def base_mismatch(config: Any, inv_freq: torch.Tensor) -> str | None:
    """Compares a probed frequency vector [R/2] of a plain rotary embedding with the declared bases.

    Returns a sentence naming the field if no declared base explains it, or if a custom base stands alone.
    """
    if rope_types(config) - {"default"} or len(inv_freq) < 2:
        return None
    probed = base_of(inv_freq)
    declared = [
        (f"{label}.rope_theta", float(p["rope_theta"])) for label, p in rope_sections(config) if "rope_theta" in p
    ]
    local = getattr(config, "rope_local_base_freq", None)
    if local:
        declared.append(("rope_local_base_freq", float(local)))
    if declared and not any(math.isclose(probed, value, rel_tol=1e-2) for _, value in declared):
        fields = ", ".join(f"{name} = {value:g}" for name, value in declared)
        return f"keys rotate with base {probed:.6g}, but the config declares {fields}"
    return None


def custom_base(config: Any) -> str | None:
    """Names a base that is not a usual one and is declared without any scaling, a frequent deployment mistake."""
    for label, parameters in rope_sections(config):
        base = float(parameters.get("rope_theta") or USUAL_BASES[0])
        if _rope_type(parameters) == "default" and base not in USUAL_BASES:
            return f"{label}.rope_theta is {base:g} and no scaling is declared: right only if the model was trained so"
    return None


def _rope_type(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")
