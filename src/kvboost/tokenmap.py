"""Where the key/value rows of one prompt came from, token by token, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.types import Kind, ReusePlan, Span

REPAIRED = "repaired"
MEANING = {
    Kind.EXACT.value: "same history: the very rows that were computed",
    Kind.CONTINUED.value: "same history, built on moved text: served as kept",
    Kind.MOVED.value: "same text elsewhere: keys rotated to the new position",
    REPAIRED: "moved text whose rows were computed again",
    Kind.FRESH.value: "new text: computed",
}
LETTER = {kind: kind[0].upper() for kind in MEANING}  # for those who see no colours


@dataclass(frozen=True, slots=True)
class MappedToken:
    """One token: its text as it appears in the prompt (empty inside a character of several tokens), and its kind."""

    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class MappedChunk:
    """One segment of the plan. `source` is the position at which its first row was computed."""

    span: Span
    kind: str
    source: int
    tokens: tuple[MappedToken, ...]

    @property
    def shift(self) -> int:
        """Positions by which the chunk moved."""
        return self.span.start - self.source

    @property
    def repaired(self) -> int:
        """Tokens of the chunk that were computed again."""
        return sum(t.kind == REPAIRED for t in self.tokens)

    @property
    def text(self) -> str:
        """The chunk's text."""
        return "".join(t.text for t in self.tokens)

    def describe(self) -> str:
        """Kind, place, source and shift in a sentence."""
        where = f"{self.kind}, tokens {self.span.start}-{self.span.stop - 1}"
        if self.kind == Kind.FRESH.value:
            return f"{where}: computed for this prompt"
        if self.kind != Kind.MOVED.value:
            return f"{where}: computed at position {self.source}, not moved"
        again = f"; {self.repaired} computed again" if self.repaired else ""
        return f"{where}: computed at position {self.source}, moved by {self.shift:+d}{again}"


def make_token_map(plan: ReusePlan, token_ids: Sequence[int], tokenizer: Any) -> tuple[MappedChunk, ...]:
    """The chunks of a plan with the text of every token. `token_ids` are the prompt's, one per row of the plan."""
    if len(token_ids) != plan.num_tokens:
        raise ValueError(f"the plan has {plan.num_tokens} tokens, but {len(token_ids)} token ids were given")
    texts = token_texts(token_ids, tokenizer)
    repaired = set(plan.repaired.tolist())
    return tuple(
        MappedChunk(
            s.span,
            s.kind.value,
            s.source_position,
            tuple(
                MappedToken(texts[i], REPAIRED if i in repaired else s.kind.value)
                for i in range(s.span.start, s.span.stop)
            ),
        )
        for s in plan
    )


def token_texts(token_ids: Sequence[int], tokenizer: Any) -> list[str]:
    """What each token adds to the decoded text; a character of several tokens belongs to its last one.

    Decodes a short window around each token, since a token decoded alone may lose its leading space.
    """
    texts: list[str] = []
    start = read = 0  # ids[start:read] are decoded as context for what follows
    for stop in range(1, len(token_ids) + 1):
        known = _decode(tokenizer, token_ids[start:read])
        text = _decode(tokenizer, token_ids[start:stop])
        if text.endswith("\ufffd") and stop < len(token_ids) and stop - read < 8:
            texts.append("")
            continue
        texts.append(text[len(known) :])
        start, read = read, stop
    return texts


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    return text
