"""Names of text: keyed BLAKE3 hashes that no other model, namespace or secret can produce.

Identity is a history of token ids, never the chunker's boundaries: `prefix_hash` of `tokens[:stop]` is the same
however the tokens are cut. Every name is keyed by a *root* = H(secret, format, fingerprint, namespace, regime).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvboost.types import DECLARED, NO_SESSION, Int32Array

FORMAT_VERSION = 1
HASH_BYTES = 32
ANCHOR_BYTES = 16
OWNER_BYTES = 8
ANCHOR_TOKENS = 16  # length of the token window that an anchor names
ANCHOR_WINDOW = 16  # one anchor is chosen of every 16 neighbouring windows: a common run of 31 tokens always shares one

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def token_bytes(tokens: Int32Array) -> bytes:
    """Tokens as little-endian 32-bit integers; the same on every machine."""
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


class KeySpace:
    """All names under one root. Two key spaces with different roots share no name."""

    def __init__(self, *, secret: str, fingerprint: bytes, namespace: str, regime: str = "", session: str = "") -> None:
        key = blake3(secret.encode()).digest()
        hasher = blake3(key=key)
        for part in (FORMAT_VERSION.to_bytes(4, "little"), fingerprint, namespace.encode(), regime.encode()):
            hasher.update(len(part).to_bytes(8, "little"))
            hasher.update(part)
        self.root: bytes = hasher.digest()
        self.owner = blake3(b"owner" + namespace.encode(), key=key).digest(OWNER_BYTES) if namespace else b""
        self.session = NO_SESSION
        """Whose text records are captured behind: no part of a name, since equal histories are shared."""
        if session:
            self.session = blake3(b"session" + session.encode(), key=self.root).digest(len(NO_SESSION))

    def declared(self) -> KeySpace:
        """The same names, for text that is nobody's own."""
        shared = copy.copy(self)
        shared.session = DECLARED
        return shared

    def content_hash(self, tokens: Int32Array) -> bytes:
        """Name of a text, wherever it stands."""
        return blake3(b"content" + token_bytes(tokens), key=self.root).digest()

    def history(self, tokens: Int32Array) -> History:
        """Incremental prefix hashes of `tokens`."""
        return History(self.root, tokens)

    def anchors(self, tokens: Int32Array) -> list[tuple[int, bytes]]:
        """A content-defined sample of the token windows of a text: (offset, name), by offset.

        Winnowing (Schleimer, Wilkerson, Aiken 2003): of every `ANCHOR_WINDOW` neighbouring windows the one with the
        least rolling hash is chosen, so two texts that share a long enough run choose the same windows inside it.
        """
        data = token_bytes(tokens)
        return [
            (i, blake3(b"anchor" + data[4 * i : 4 * (i + ANCHOR_TOKENS)], key=self.root).digest(ANCHOR_BYTES))
            for i in _winnow(tokens).tolist()
        ]


class History:
    """Prefix hashes of one token sequence, computed incrementally and in any order."""

    def __init__(self, root: bytes, tokens: Int32Array) -> None:
        self._data = token_bytes(tokens)
        self._states = {0: blake3(b"prefix", key=root)}

    def prefix_hash(self, stop: int) -> bytes:
        """Name of `tokens[:stop]`."""
        if stop not in self._states:
            start = max(s for s in self._states if s < stop)
            state = self._states[start].copy()
            state.update(self._data[4 * start : 4 * stop])
            self._states[stop] = state
        return bytes(self._states[stop].digest())

    def prefix_hashes(self, stops: Sequence[int]) -> list[bytes]:
        """Names of several prefixes."""
        return [self.prefix_hash(stop) for stop in stops]


def _winnow(tokens: Int32Array) -> npt.NDArray[np.intp]:
    """Offsets of the chosen windows, ascending and unique."""
    num_windows = len(tokens) - ANCHOR_TOKENS + 1
    if num_windows < 1:
        return np.empty(0, np.intp)
    ids = tokens.astype(np.uint64) + np.uint64(1)
    rolling = np.zeros(num_windows, np.uint64)
    for j in range(ANCHOR_TOKENS):
        rolling = rolling * _MULTIPLIER + ids[j : j + num_windows]
    rolling ^= rolling >> np.uint64(29)
    rolling *= np.uint64(0xBF58476D1CE4E5B9)
    rolling ^= rolling >> np.uint64(32)
    width = min(ANCHOR_WINDOW, num_windows)
    least = np.lib.stride_tricks.sliding_window_view(rolling, width).argmin(axis=1)
    return np.unique(least + np.arange(len(least)))
