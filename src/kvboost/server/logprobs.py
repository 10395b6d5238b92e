"""Log-probabilities of generated tokens as the clients want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvboost.serving import Token

IMPOSSIBLE = -9999.0  # JSON has no minus infinity; this is what OpenAI sends


def finite(logprob: float | None) -> float:
    """A number that JSON can hold."""
    return IMPOSSIBLE if logprob is None else max(IMPOSSIBLE, logprob)


def of_chat(tokens: Sequence[Token]) -> dict[str, Any]:
    """`logprobs` of a chat's choice or chunk."""
    return {
        "content": [
            {**_named(t.text, t.logprob), "top_logprobs": [_named(text, logprob) for _, text, logprob in t.top]}
            for t in tokens
        ],
        "refusal": None,
    }


def of_completion(tokens: Sequence[Token], offset: int, top: int) -> dict[str, Any]:
    """`logprobs` of a completion's choice or chunk; `offset` counts the characters before its first token."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [t.text for t in tokens],
        "token_logprobs": [finite(t.logprob) for t in tokens],
        "top_logprobs": [{text: finite(logprob) for _, text, logprob in t.top} for t in tokens] if top else None,
        "text_offset": offsets,
    }


def _named(text: str, logprob: float | None) -> dict[str, Any]:
    """A token; one that is a part of a character has no bytes of its own."""
    return {"token": text, "logprob": finite(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}
