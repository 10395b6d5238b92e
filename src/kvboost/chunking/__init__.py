"""Token ids to chunks.

separators.py   which tokens of a vocabulary mark a boundary
boundaries.py   chooses cuts among candidates, locally
content.py      the default: separators, then a rolling hash
semantic.py     separators, then changes of topic (extra `semantic`)
fixed.py        every k tokens
explicit.py     boundaries given by the caller
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from kvboost.chunking.content import ContentChunker
from kvboost.chunking.explicit import ExplicitChunker, token_offsets
from kvboost.chunking.fixed import FixedChunker
from kvboost.chunking.separators import Separators
from kvboost.config import Settings
from kvboost.types import Int32Array, Span

__all__ = ["Chunker", "Separators", "make_chunker", "token_offsets"]


class Chunker(Protocol):
    """Cuts a prompt into chunks, the units that are stored and found again."""

    def split(self, input_ids: Int32Array) -> list[Span]:
        """A partition of `[0, n)` into non-empty spans, in order; empty for n = 0. Equal ids give equal spans."""
        ...


def make_chunker(
    settings: Settings,
    separators: Separators,
    *,
    tokenizer: Any | None = None,
    boundaries: Iterable[int] | None = None,
) -> Chunker:
    """The chunker that the settings name; with `boundaries` (token offsets) those come first and it cuts between them.

    `semantic` reads sentences, so it needs the tokenizer. Raises `SettingsError` if that, or its extra, is missing.
    """
    sizes = settings.chunk_min_tokens, settings.chunk_avg_tokens, settings.chunk_max_tokens
    chunker: Chunker
    if settings.chunker == "fixed":
        chunker = FixedChunker(settings.chunk_avg_tokens)
    elif settings.chunker == "semantic":
        from kvboost.chunking.semantic import SemanticChunker  # its dependencies belong to an extra

        chunker = SemanticChunker(separators, tokenizer, *sizes)
    else:
        chunker = ContentChunker(separators, *sizes)
    return chunker if boundaries is None else ExplicitChunker(boundaries, chunker, settings.chunk_max_tokens)
