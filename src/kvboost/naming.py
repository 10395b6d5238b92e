"""From token ids to every name under which their rows are kept and looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvboost.chunking import Chunker, Separators, make_chunker
from kvboost.chunking.explicit import ExplicitChunker
from kvboost.config import Settings
from kvboost.keys import KeySpace
from kvboost.planning import Prompt
from kvboost.types import Int32Array

MAX_CHUNKERS = 8  # kept at a time, one per chunker and sizes that requests ask for


class Naming:
    """Cuts and names the prompts of a model: `fingerprint` is its own now, `regime` that of a prompt of a length."""

    def __init__(self, tokenizer: Any, fingerprint: Callable[[], bytes], regime: Callable[[int], int]) -> None:
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._regime = regime
        self._separators = Separators.from_tokenizer(tokenizer)
        self._chunkers: dict[tuple[object, ...], Chunker] = {}

    def keys(self, num_tokens: int, settings: Settings) -> KeySpace:
        """The names that a prompt of `num_tokens` may use: of this model, these weights, the request's namespace."""
        return KeySpace(
            secret=settings.hash_secret.get_secret_value(),
            fingerprint=self._fingerprint(),
            namespace=settings.cache_salt,
            regime=str(self._regime(num_tokens)),
            session=settings.session,
        )

    def prompt(self, tokens: Int32Array, settings: Settings, keys: KeySpace) -> Prompt:
        """`tokens`, cut into chunks and named."""
        return Prompt(tokens, self._chunker(settings).split(tokens), keys, anchors=settings.anchors)

    def _chunker(self, settings: Settings) -> Chunker:
        if settings.chunk_boundaries:
            inner = self._chunker(settings.model_copy(update={"chunk_boundaries": ()}))
            return ExplicitChunker(settings.chunk_boundaries, inner, settings.chunk_max_tokens)
        wanted = (settings.chunker, settings.chunk_min_tokens, settings.chunk_avg_tokens, settings.chunk_max_tokens)
        if wanted not in self._chunkers:
            if len(self._chunkers) >= MAX_CHUNKERS:
                self._chunkers = {}
            self._chunkers[wanted] = make_chunker(settings, self._separators, tokenizer=self._tokenizer)
        return self._chunkers[wanted]
