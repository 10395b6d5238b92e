"""Boundaries that authors and chat templates put into text, known at token level.

Vocabularies differ, so a tokenizer's tokens are read once as text and classified; a prompt is then searched by table
look-up. Markers that take several tokens (`Document [`) are confirmed by joining the few tokens behind a line start.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvboost.chunking.boundaries import Positions
from kvboost.types import Int32Array

MARKERS = (  # text that opens a document or a section when it stands at the start of a line
    *(level * "#" + " " for level in range(1, 7)),
    *("---", "```", "~~~", "<document", "<doc ", "<doc>", "<file", "<source", "<context"),
    *("Document [", "Document:", "Document ", "[Document", "Passage ", "Passage:", "Title:", "Source:", "File:"),
    *("diff --git", "Traceback (", "[INST]", "<|user|>", "<|system|>", "<|assistant|>"),
    *("User:", "USER:", "Human:", "Assistant:", "ASSISTANT:", "System:", "SYSTEM:", "Question:", "Context:"),
)
_MARKER_TOKENS = 12  # no marker with its number takes more tokens in any vocabulary of interest
_CUT_SHORT = "\0"  # stands for the rest of a token that runs past the end of a marker
_NUMBERED = re.compile(f"(?:{'|'.join(map(re.escape, MARKERS))}) ?([0-9]*)")

_STARTS_TURN = re.compile(r"start|begin|bos|^<s>$|user|system|assistant|human|tool|inst|turn|file_sep|repo_name", re.I)
_NEVER_STARTS = re.compile(
    r"end|/|eos|eot|eom|pad|unk|mask|unused|reserved|fim|vision|image|video|audio|box|quad|object_ref|think"
    r"|channel|message|^<[^|]+\|>$",  # the last form closes what `<|name>` opened
    re.I,
)

_TURN, _BLANK, _ENDS_LINE, _ONLY_LINES, _OPENS_MARKER, _ENDS_SENTENCE, _ENDS_WIDE, _SPACED = (1 << b for b in range(8))
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
_SPELLINGS = (("Ġ", " "), ("Ċ", "\n"), ("č", "\r"), ("ĉ", "\t"), ("▁", " "))  # byte-level's, then SentencePiece's
_WIDE_ENDS = (
    "\u3002",
    "\uff01",
    "\uff1f",
    "ãĢĤ",
    "ï¼ģ",
    "ï¼Ł",
)  # CJK, no space follows; then as byte-level spells them

Flags = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """Where a text may be cut, as sorted positions of the first token behind the cut; never 0."""

    turns: Positions  # before the special token that opens a message
    markers: Positions  # before a heading, fence, or document marker at the start of a line
    numbers: Positions  # behind the number of a marker: documents that trade places trade numbers, not text
    blanks: Positions  # behind the last newline of one or more blank lines
    soft: Positions  # line starts and sentence starts


@dataclass(frozen=True, slots=True, eq=False)
class Separators:
    """What each token of a vocabulary says about boundaries. Without a tokenizer: nothing, so no separators."""

    flags: Flags = field(default_factory=lambda: np.zeros(1, np.uint8))  # [vocabulary + 1], the last for unknown ids
    pieces: tuple[str, ...] = ()  # per id: its text, as far as it can be part of a marker

    @classmethod
    def from_tokenizer(cls, tokenizer: Any | None) -> Separators:
        """Read the vocabulary of any Hugging Face tokenizer, once: later calls are answered from memory.

        A tokenizer that has gained tokens since is read again.
        """
        if tokenizer is None:
            return cls()
        size, known = len(tokenizer), _KNOWN.get(tokenizer)
        if known is None or known[0] != size:
            known = _KNOWN[tokenizer] = (size, cls._read(tokenizer))
        return known[1]

    @classmethod
    def _read(cls, tokenizer: Any) -> Separators:
        vocabulary: dict[str | bytes, int] = tokenizer.get_vocab()
        size = max(vocabulary.values(), default=-1) + 1
        flags, pieces = bytearray(size + 1), [""] * size
        for token, index in vocabulary.items():
            text = _plain(token)
            flags[index] = _text_flags(text)
            if piece := _marker_piece(text):
                pieces[index] = piece
                flags[index] |= _OPENS_MARKER if piece.rstrip(_CUT_SHORT) in _OPENINGS else 0
        for index in _turn_starts(tokenizer):
            flags[index] |= _TURN
        return cls(np.frombuffer(flags, np.uint8), tuple(pieces))

    def find(self, input_ids: Int32Array) -> Marks:
        """All boundaries of a text. Each depends on at most two tokens before it and twelve behind it."""
        known = np.asarray(input_ids, np.int32).view(np.uint32)  # a negative id becomes a large one: unknown
        flags = self.flags[np.minimum(known, len(self.flags) - 1)]
        before = np.concatenate((np.zeros(2, np.uint8), flags))  # before[i] = flags[i - 2]
        last, last_but_one = before[1:-1], before[:-2]
        in_line = (flags & _ONLY_LINES) == 0  # cut behind all blank lines, not between them
        line = in_line & _has(last, _ENDS_LINE)
        blank = in_line & (_has(last, _BLANK) | (_has(last, _ONLY_LINES) & _has(last_but_one, _ENDS_LINE)))
        sentence = in_line & (_has(last, _ENDS_WIDE) | (_has(last, _ENDS_SENTENCE) & _has(flags, _SPACED)))
        turn = _has(flags, _TURN) & ~_has(last, _TURN)  # of consecutive ones the first
        opens = np.flatnonzero(line & _has(flags, _OPENS_MARKER)).tolist()
        sizes = [self._marker_size(known[i : i + _MARKER_TOKENS].tolist()) for i in opens]
        markers = [i for i, (size, _) in zip(opens, sizes, strict=True) if size]
        numbers = [i + size for i, (size, numbered) in zip(opens, sizes, strict=True) if numbered]
        return Marks(_inner(turn), _positions(markers), _positions(numbers), _inner(blank), _inner(line | sentence))

    def _marker_size(self, ids: list[int]) -> tuple[int, bool]:
        """Tokens that a marker and its number take at the start of `ids`, 0 if there is none; and if it has a number.

        A token that runs past the end of the marker counts.
        """
        pieces = [self.pieces[i] if i < len(self.pieces) else "" for i in ids]
        match = _NUMBERED.match("".join(piece or _CUT_SHORT for piece in pieces))
        if match is None:
            return 0, False
        ends = list(accumulate(len(piece or _CUT_SHORT) for piece in pieces))
        return bisect_left(ends, match.end()) + 1, bool(match[1])


def _positions(values: list[int]) -> Positions:
    return np.array(values, np.int64)


def _has(flags: Flags, bits: int) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (flags & np.uint8(bits)) != 0
    return found


def _inner(mask: npt.NDArray[np.bool_]) -> Positions:
    mask[:1] = False
    return np.flatnonzero(mask)


def _plain(token: str | bytes) -> str:
    """Text of a vocabulary entry of a byte-level, SentencePiece or raw-bytes vocabulary, where it matters here."""
    if isinstance(token, bytes):
        return token.decode("utf-8", "replace")
    if token.isascii():
        return "\n" if token == "<0x0A>" else token
    for spelling, char in _SPELLINGS:  # not str.translate: five times slower, and a vocabulary has 262,144 entries
        if spelling in token:
            token = token.replace(spelling, char)
    return token


def _text_flags(text: str) -> int:
    flags = _SPACED if text[:1].isspace() else 0
    if "\n" in text:
        flags |= _ENDS_LINE if text[-1] == "\n" else 0
        flags |= _BLANK if _BLANK_LINE.search(text) else 0
        flags |= _ONLY_LINES if text.isspace() else 0
    if not text[-1:].isalnum():
        bare = text.rstrip("\"')]*")
        flags |= _ENDS_SENTENCE if bare.endswith((".", "!", "?")) else 0
        flags |= _ENDS_WIDE if bare.endswith(_WIDE_ENDS) else 0
    return flags


def _marker_piece(text: str) -> str:
    """What a token can contribute to a marker or its number: all of it, or what lies before the marker's end.

    The latter only if that beginning is no letter or digit: `:/` ends `File:`, but `documents` is no `document`.
    """
    if text in _SUBSTRINGS or text.strip().isdecimal():
        return text
    for ending in _ENDINGS.get(text[:1], ()):
        if text.startswith(ending):
            return ending + _CUT_SHORT
    return ""


def _endings() -> dict[str, list[str]]:
    """Proper and improper endings of markers that begin with punctuation or a space, by first character."""
    endings = {marker[i:] for marker in MARKERS for i in range(len(marker)) if not marker[i].isalnum()}
    by_first: dict[str, list[str]] = {}
    for ending in sorted(endings, key=len, reverse=True):
        by_first.setdefault(ending[0], []).append(ending)
    return by_first


_OPENINGS = frozenset(m[:j] for m in MARKERS for j in range(1, len(m) + 1))
_SUBSTRINGS = frozenset(m[i:j] for m in MARKERS for i in range(len(m)) for j in range(i + 1, len(m) + 1))
_ENDINGS = _endings()


def _turn_starts(tokenizer: Any) -> Iterator[int]:
    """Ids of the added tokens that open a message: by name, by use in the chat template, or as the text's beginning."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    added = {index: str(token) for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
    special = getattr(tokenizer, "all_special_tokens", [])
    added |= dict(zip(tokenizer.convert_tokens_to_ids(special), special, strict=True)) if special else {}
    bos = getattr(tokenizer, "bos_token_id", None)
    for index, token in added.items():
        named = _STARTS_TURN.search(token) or token in template
        if index == bos or (named and not _NEVER_STARTS.search(token)):
            yield index


_KNOWN: WeakKeyDictionary[Any, tuple[int, Separators]] = WeakKeyDictionary()
