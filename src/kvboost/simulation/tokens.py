"""Texts to pieces: the blocks of a prefix cache, and the chunks that can be found anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from blake3 import blake3

from kvboost.chunking import Chunker
from kvboost.keys import token_bytes
from kvboost.simulation.trace import Piece, Trace
from kvboost.types import Int32Array

BLOCK_TOKENS = 16  # of a prefix cache; vLLM's default
NAME_BYTES = 16

Encode = Callable[[str], Sequence[int]]

_PIECE = re.compile(r"<\|\w{1,20}\|>|\n+|[^\S\n]?[^\W\d_]{1,6}|\d{1,3}|[^\S\n]+|_|[^\w\s]")
_TURN = "<|im_start|>"


class WordPieces:
    """Splits text into short pieces where no tokenizer is given: at most six letters, three digits, or one sign.

    It learns its vocabulary as it goes. Counts are near those of real tokenizers for English and code, not equal.
    """

    chat_template = _TURN
    all_special_tokens: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._ids: dict[str, int] = {_TURN: 0}

    def __len__(self) -> int:
        return len(self._ids)

    def __call__(self, text: str) -> list[int]:
        """Ids of a text."""
        ids = self._ids
        return [ids.setdefault(piece, len(ids)) for piece in _PIECE.findall(text)]

    @property
    def added_tokens_decoder(self) -> dict[int, str]:
        """The piece that opens a message."""
        return {0: _TURN}

    def get_vocab(self) -> dict[str, int]:
        """All pieces seen so far."""
        return self._ids


def encode_all(prompts: Sequence[str], encode: Encode) -> list[Int32Array]:
    """Token ids of every prompt."""
    return [np.array(encode(prompt), np.int32) for prompt in prompts]


def prefix_trace(name: str, prompts: Sequence[Int32Array]) -> Trace:
    """What a prefix cache sees: blocks named by all that stands before and in them. A shorter last one counts too."""
    requests = []
    for tokens in prompts:
        state, data = blake3(), token_bytes(tokens)
        pieces = []
        for start in range(0, len(tokens), BLOCK_TOKENS):
            state.update(data[4 * start : 4 * (start + BLOCK_TOKENS)])
            pieces.append(Piece(state.digest(NAME_BYTES), min(BLOCK_TOKENS, len(tokens) - start)))
        requests.append(pieces)
    return Trace(name, "prefix", requests)


def chunk_trace(name: str, prompts: Sequence[Int32Array], chunker: Chunker) -> Trace:
    """What chunk reuse sees: chunks named by their own text. KVBoost finds more: sampled windows, parts of chunks."""
    requests = []
    for tokens in prompts:
        data = token_bytes(tokens)
        spans = chunker.split(tokens)
        requests.append([Piece(blake3(data[4 * s.start : 4 * s.stop]).digest(NAME_BYTES), len(s)) for s in spans])
    return Trace(name, "anywhere", requests)
