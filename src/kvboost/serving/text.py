r"""From token ids to text as they come: no character is split, and a stop string is seen across tokens.

tokens    He | llo | wor | ld\n | \nQ | :          stop: "\n\nQ:"
told      He   Hello ...  Hello world                 "\n", "\n\nQ" are held: they may become the stop string
at the end: text and tokens behind "world" are cut
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what an incomplete character decodes to
MAX_INCOMPLETE_TOKENS = 8  # held back at most: so many bytes are no character


class TextStream:
    """The text of one answer. `decode` makes text of ids and leaves out special tokens."""

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str] = (), *, keep_stop: bool = False
    ) -> None:
        self._decode = decode
        self._stop = stop
        self._keep_stop = keep_stop
        self._ids: list[int] = []
        self._start = 0  # of the ids that are decoded together, so that what stands between tokens is seen
        self._read = 0  # ids whose text is complete
        self._ends: list[int] = []  # characters of the answer up to each of them
        self._held = ""  # may be the beginning of a stop string
        self._told = 0  # characters
        self.stopped = False  # True once a stop string came; then nothing may follow

    @property
    def kept_tokens(self) -> int:
        """Tokens whose text is a part of the answer: fewer than were pushed if a stop string cut it."""
        return sum(end <= self._told for end in self._ends) if self.stopped else len(self._ids)

    def push(self, token: int) -> str:
        """Takes the next token; returns the text that is certain now."""
        self._ids.append(token)
        return self._tell(self._complete(final=False), final=False)

    def finish(self) -> str:
        """The text that was held back."""
        return "" if self.stopped else self._tell(self._complete(final=True), final=True)

    def _complete(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        open_tokens = len(self._ids) - self._read
        if now.endswith(REPLACEMENT) and open_tokens < MAX_INCOMPLETE_TOKENS and not final:
            return ""
        new = now[len(before) :]
        if new:
            self._start = self._read
        self._read = len(self._ids)
        self._ends += [self._told + len(self._held) + len(new)] * open_tokens
        return new

    def _tell(self, new: str, *, final: bool) -> str:
        text = self._held + new
        found = [(text.index(s) + len(s), -len(s)) for s in self._stop if s in text]
        if found:
            end, negative_length = min(found)
            self.stopped, self._held = True, ""
            certain = text[: end if self._keep_stop else end + negative_length]
        else:
            held = 0 if final else max((_overlap(text, s) for s in self._stop), default=0)
            certain, self._held = text[: len(text) - held], text[len(text) - held :]
        self._told += len(certain)
        return certain


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class TokenTexts:
    """The text of single tokens, with the space that they bring, special ones too."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._anchor: list[int] = tokenizer("a", add_special_tokens=False).input_ids[-1:]
        self._anchor_text: str = self._decode(self._anchor)
        self.of = functools.lru_cache(maxsize=65536)(self._of)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _of(self, token: int) -> str:
        """Behind another token, since a tokenizer may leave out the space of the first one."""
        return self._decode([*self._anchor, token])[len(self._anchor_text) :]
