"""Loads a model and its tokenizer, with errors that say what is wrong with the path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvboost.errors import ModelError


def load_model(name: str | Path, *, dtype: str | torch.dtype = "auto", device: str | None = None) -> tuple[Any, Any]:
    """The causal language model and tokenizer of a directory or hub name, in evaluation mode.

    Raises `ModelError` if the path is not a model, or the tokenizer cannot be loaded.
    """
    path = Path(name)
    if not path.exists() and (path.is_absolute() or len(path.parts) > 2 or str(name).startswith(".")):
        raise ModelError(
            f"there is no directory {str(name)!r}. Give a directory saved by save_pretrained, or a hub name"
        )
    if path.exists() and not (path / "config.json").is_file():
        raise ModelError(
            f"{str(name)!r} is not a model directory: it has no config.json. Give a directory saved by "
            "save_pretrained, or a hub name"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load a causal language model from {str(name)!r}: {error}") from error
    return model.to(device or "cpu").eval(), tokenizer


def check_model(model: object) -> None:
    """Raises `ModelError` for what is no model: a name, as `from_pretrained` takes, or None."""
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"{model!r} is no model; `KVBoost.from_pretrained` loads one by directory or name")


def check_tokenizer(model: PreTrainedModel, tokenizer: Any) -> None:
    """Raises `ModelError` if the tokenizer can emit ids that the model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens but the model embeds only {rows}: they do not belong together. "
            "Load both from the same directory"
        )
