"""`enable` and `disable`: the cache behind a model's own `generate`."""

from __future__ import annotations

from typing import Any

from kvboost.engine import KVBoost
from kvboost.hf.compat import PreTrainedModel


class CachedGenerate:
    """The `generate` of an enabled model. A copied or unpickled model gets transformers' own again."""

    def __init__(self, engine: KVBoost, former: Any) -> None:
        self.engine = engine
        self.former = former

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate(...)` through the cache."""
        return self.engine.generate_like_transformers(args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return PlainGenerate, (), {"model": self.engine.model}


class PlainGenerate:
    """transformers' own `generate` for the model that it was copied with."""

    model: PreTrainedModel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the model's class."""
        return type(self.model).generate(self.model, *args, **kwargs)


def enable(model: PreTrainedModel, tokenizer: Any = None, **flags: Any) -> KVBoost:
    """Lets `model.generate(...)` use the cache; returns the engine behind it.

    Sets one attribute of the instance, `generate`; nothing else of the model changes. Enabling an enabled model is a
    no-op that returns its engine. Wrappers that call this model's `generate` use the cache too.
    """
    current = getattr(model, "__dict__", {}).get("generate")
    if isinstance(current, CachedGenerate):
        return current.engine
    engine = KVBoost(model, tokenizer, **flags)
    if current is not None:
        engine.plain_generate = current
    model.generate = CachedGenerate(engine, current)
    return engine


def disable(model: PreTrainedModel) -> None:
    """Restores the `generate` that the model had. A no-op for a model that is not enabled."""
    current = vars(model).get("generate")
    if not isinstance(current, CachedGenerate):
        return
    if current.former is None:
        del model.generate
    else:
        model.generate = current.former
