"""Which model a command runs: the one that was asked for, else the small one of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvboost.cli.console import note, step
from kvboost.config import from_environment, resolve
from kvboost.errors import InputError

if TYPE_CHECKING:
    from kvboost.engine import KVBoost

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

ModelOption = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME", help="Model directory or hub name. Default: SmolLM2-135M-Instruct."),
]
DTypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(metavar="auto|float32|bfloat16|float16", help="Type of the weights; auto: as stored."),
]


def open_engine(model: str | None, dtype: str = "auto", **flags: Any) -> KVBoost:
    """An engine on `model`, or on SmolLM2: from the Hugging Face cache if it is there, else the embedded one.

    Tells steps and the model's limits on stderr. Raises `ModelError` if the model cannot be had.
    """
    if "settings_file" not in {**flags, **from_environment()}:  # a file may overrule what is wrong here
        resolve(flags)  # a mistake is told before anything is loaded
    with step("starting torch and transformers") as tell:
        from kvboost.engine import KVBoost

        source = _source(model, tell)
        tell(f"loading and checking {model or Path(source).name}")
        kv = KVBoost.from_pretrained(source, dtype=dtype, **flags)
    for warning in kv.support.warnings:
        note(f"warning: {warning}")
    if kv.support.moved_refused is not None:
        note(f"note: this model reuses {verdict(kv)}: {kv.support.moved_refused}")
    return kv


def verdict(kv: KVBoost) -> str:
    """What of the cache the model can use."""
    if kv.support.refused is not None:
        return "nothing"
    return "exact prefixes only" if kv.support.moved_refused is not None else "text at any position"


def converse(kv: KVBoost, user: str, system: str | None = None) -> str | list[Mapping[str, str]]:
    """A prompt of the user's text: chat messages, or plain text for a model without a chat template."""
    if not getattr(kv.tokenizer, "chat_template", None):
        return "\n\n".join(part for part in (system, user) if part)
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": user}]


def read_texts(paths: Sequence[Path]) -> list[str]:
    """The files' texts. Raises `InputError` that names the first file that is no readable text."""
    return [_read_text(path) for path in paths]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read {str(path)!r}: {reason}") from None


def _source(model: str | None, tell: Any) -> str:
    """The model asked for, else the small one; that is also meant by the name that the help gives it."""
    if model and (model != Path(HUB_NAME).name or Path(model).exists()):
        return model
    return str(_cached_on_hub() or _embedded(tell))


def _cached_on_hub() -> Path | None:
    """The original model's directory in the Hugging Face cache, if it is complete. Asks no network."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(HUB_NAME, f) for f in ("config.json", "tokenizer.json", "model.safetensors")]
    return Path(found[0]).parent if all(isinstance(f, str) for f in found) and isinstance(found[0], str) else None


def _embedded(tell: Any) -> Path:
    from kvboost.hf.embedded import SMOLLM2, ensure

    return ensure(SMOLLM2, progress=tell)
