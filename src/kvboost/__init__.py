"""KVBoost: reuse the KV cache of text that a Hugging Face model has seen, wherever it stands in a new prompt."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvboost.config import Settings
    from kvboost.enabling import disable, enable
    from kvboost.engine import Generation, KVBoost
    from kvboost.errors import InputError, KVBoostError, ModelError, SettingsError
    from kvboost.types import ReusePlan, ReuseReport

__version__ = "0.1.0"

_HOMES = {  # imported on first use: `import kvboost` loads neither torch nor transformers
    "KVBoost": "engine",
    "Generation": "engine",
    "enable": "enabling",
    "disable": "enabling",
    "Settings": "config",
    "ReusePlan": "types",
    "ReuseReport": "types",
    "KVBoostError": "errors",
    "SettingsError": "errors",
    "InputError": "errors",
    "ModelError": "errors",
}

__all__ = [
    "Generation",
    "InputError",
    "KVBoost",
    "KVBoostError",
    "ModelError",
    "ReusePlan",
    "ReuseReport",
    "Settings",
    "SettingsError",
    "disable",
    "enable",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvboost' has no attribute {name!r}")
    return getattr(import_module(f"kvboost.{_HOMES[name]}"), name)
