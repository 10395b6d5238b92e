"""`enable` and `disable`: the cache behind a model's own `generate`."""

from __future__ import annotations

import functools
from typing import Any

from kvboost.engine import KVBoost
from kvboost.hf.compat import PreTrainedModel

_ENGINE = "_kvboost_engine"
_FORMER = "_kvboost_former"


def enable(model: PreTrainedModel, tokenizer: Any = None, **flags: Any) -> KVBoost:
    """Lets `model.generate(...)` use the cache; returns the engine behind it.

    Sets one attribute of the instance, `generate`; nothing else of the model changes. Enabling an enabled model is a
    no-op that returns its engine. Wrappers that call this model's `generate` use the cache too.
    """
    current = model.__dict__.get("generate")
    if hasattr(current, _ENGINE):
        engine: KVBoost = getattr(current, _ENGINE)
        return engine
    engine = KVBoost(model, tokenizer, **flags)

    @functools.wraps(type(model).generate)
    def generate(*args: Any, **kwargs: Any) -> Any:
        return engine.generate_like_transformers(args, kwargs)

    vars(generate).update({_ENGINE: engine, _FORMER: current})
    model.generate = generate
    return engine


def disable(model: PreTrainedModel) -> None:
    """Restores the `generate` that the model had. A no-op for a model that is not enabled."""
    current = model.__dict__.get("generate")
    if not hasattr(current, _ENGINE):
        return
    former = vars(current)[_FORMER]
    if former is None:
        del model.generate
    else:
        model.generate = former
