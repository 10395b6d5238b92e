"""From what a caller passes to token ids: text, ids, chat messages, documents to warm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvboost.errors import InputError
from kvboost.hf import declared
from kvboost.hf.compat import PreTrainedModel

_MARK = "\u2063kvboost\u2063"  # stands for the document while a template is rendered
NEEDED = ("role", "content")  # of a message, by nearly every template
_FILLER = "The following text may be needed later. Read it with care and remember what it says, word by word. "


def encode(prompt: Any, tokenizer: Any, model: PreTrainedModel) -> torch.Tensor:
    """Token ids int64 [1, T] on the model's device.

    Text is tokenized with the tokenizer's own special tokens; messages are rendered by the chat template, which brings
    them itself. Raises `InputError` if there is nothing to answer, too much of it, or an id is out of range.
    """
    if isinstance(prompt, str):
        ids = _require(tokenizer)(_utf8(prompt)).input_ids
    elif isinstance(prompt, torch.Tensor):
        if prompt.dim() > 2 or (prompt.dim() == 2 and prompt.shape[0] != 1):
            raise InputError(f"a tensor prompt holds one sequence, [T] or [1, T], not {tuple(prompt.shape)}")
        ids = prompt.reshape(-1).tolist()
    elif isinstance(prompt, Sequence) and all(isinstance(m, Mapping) for m in prompt) and prompt:
        ids = tokenize(tokenizer, render(prompt, tokenizer))
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and all(isinstance(i, int) for i in prompt):
        ids = list(prompt)
    else:
        raise InputError(f"a prompt is text, a list of token ids, or a list of chat messages, not {_kind(prompt)}")
    return checked(ids, model)


def _kind(prompt: Any) -> str:
    """What was passed for a prompt and is none; of a list of mixed things all kinds."""
    given = type(prompt).__name__
    if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)) and prompt:
        given += f" of {' and '.join(sorted({type(item).__name__ for item in prompt}))}"
    return given


def render(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None
) -> str:
    """Chat messages as text that ends where the answer begins; `tools` are JSON schemas of functions.

    Raises `InputError` without a chat template.
    """
    if not getattr(_require(tokenizer), "chat_template", None):
        raise InputError("this tokenizer has no chat template, so messages cannot be rendered; pass text instead")
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates raise what they like: of the message, or of jinja
        lacking = (f"message {i} has no {key}" for i, m in enumerate(messages) for key in NEEDED if key not in m)
        raise InputError(f"the chat template cannot render these messages: {next(lacking, error)}") from error
    return text


def encode_document(
    text: str, context: str | None, tokenizer: Any, model: PreTrainedModel, min_context_tokens: int
) -> torch.Tensor:
    """`text` behind `context` or the template's default system prompt: ids int64 [1, T].

    The document starts at `min_context_tokens` or later: the first rows of a prompt carry the attention sink, and
    a document captured there could never be moved. Raises `InputError` for an empty or too long text.
    """
    if not text.strip():
        raise InputError("there is no text to warm; pass a document with at least one word")
    head = _require(tokenizer)(context).input_ids if context else _default_context(tokenizer)
    filler = tokenize(tokenizer, _FILLER)
    while len(head) < min_context_tokens:
        head = head + filler
    return checked(head + tokenize(tokenizer, text), model)


def _default_context(tokenizer: Any) -> list[int]:
    """Everything that the template puts before a first user message."""
    if getattr(tokenizer, "chat_template", None):
        rendered = render([{"role": "user", "content": _MARK}], tokenizer)
        if _MARK in rendered:
            return tokenize(tokenizer, rendered[: rendered.index(_MARK)])
    ids: list[int] = tokenizer("").input_ids
    return ids


def tokenize(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that holds its special tokens already. Raises `InputError` for what is no text."""
    ids: list[int] = _require(tokenizer)(_utf8(text), add_special_tokens=False).input_ids
    return ids


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("the prompt holds half of a surrogate pair, which is no text") from None
    return text


def _require(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise InputError("text and messages need a tokenizer, and this engine was made without one; pass token ids")
    return tokenizer


def checked(ids: list[int], model: PreTrainedModel) -> torch.Tensor:
    """Token ids as int64 [1, T] on the model's device. Raises `InputError` if the model cannot take them."""
    limit = declared.max_positions(model.config.get_text_config())
    rows = model.get_input_embeddings().weight.shape[0]
    if not ids:
        raise InputError("the prompt is empty; pass at least one token")
    if limit is not None and len(ids) >= limit:
        raise InputError(f"the prompt has {len(ids)} tokens, but the model takes fewer than {limit}; shorten it")
    if min(ids) < 0 or max(ids) >= rows:
        raise InputError(
            f"token id {max(ids) if max(ids) >= rows else min(ids)} is outside of the model's vocabulary of {rows}; "
            "was the prompt made with another model's tokenizer?"
        )
    return torch.tensor([ids], device=model.device)
