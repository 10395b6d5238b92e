"""What the clients of `load` ask: a seeded mix of documents in changing order, repeats, new text, and broken bodies.

shared   some of a few documents, in any order, half of the time behind a line of its own: text that moved
repeat   one of a few prompts, word for word: exact hits
fresh    text that nobody else asks about
broken   what must be refused, with the status that says why
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SHARES = {"shared": 0.55, "repeat": 0.2, "fresh": 0.25}
BROKEN_SHARE, LEAVING_SHARE, STREAM_SHARE, CHAT_SHARE, EXACT_SHARE = 0.03, 0.06, 0.6, 0.5, 0.4
REPEATS = 12
INTRO = "Files of one code base follow. Read them and answer the question.\n\n"
QUESTIONS = (
    "Question: what do these files have in common?\nAnswer:",
    "Question: which of them reports errors to the caller?\nAnswer:",
    "Question: what would you test first?\nAnswer:",
    "Question: name the functions above.\nAnswer:",
)


@dataclass(frozen=True)
class Ask:
    """One request. A client that `leaves_after` goes behind so many events, or so many tenths of a second."""

    kind: str
    path: str
    body: Mapping[str, Any] = field(default_factory=dict)
    raw: bytes | None = None  # sent instead of the body
    expected: int = 200
    leaves_after: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        """What is sent."""
        return json.dumps(self.body).encode() if self.raw is None else self.raw

    @property
    def streams(self) -> bool:
        """Whether the answer comes in events."""
        return bool(self.body.get("stream"))

    @property
    def is_exact(self) -> bool:
        """Whether nothing inexact may be served."""
        return bool(self.body.get("kvboost", {}).get("fidelity") == "exact")

    @property
    def key(self) -> str:
        """Equal for asks whose exact answers are equal."""
        how = ("stream", "stream_options", "kvboost")
        return self.path + json.dumps({k: v for k, v in self.body.items() if k not in how}, sort_keys=True)

    def alone(self) -> Ask:
        """The same, asked for at once and without the cache."""
        body = {k: v for k, v in self.body.items() if k not in ("stream", "stream_options")}
        return replace(self, body=body, leaves_after=None, headers={"x-kvboost-enabled": "false"})


@dataclass(frozen=True)
class Mix:
    """Draws asks; equal mixes draw the same for a client. `text` is cut into what is fresh."""

    documents: Sequence[str]
    text: str
    new_tokens: tuple[int, int] = (8, 32)
    per_prompt: int = 3  # documents
    max_body_bytes: int = 4 << 20
    seed: int = 0

    def asks(self, client: int) -> Iterator[Ask]:
        """Without end."""
        rng = random.Random(f"{self.seed}/{client}")
        for number in itertools.count():
            yield self._draw(rng, f"{client}-{number}")

    @functools.cached_property
    def repeats(self) -> list[tuple[str, str, int]]:
        """Prompts that come again and again: path, text, new tokens."""
        rng = random.Random(f"{self.seed}/repeats")
        texts = [self._shared_text(rng, f"repeat {i}") for i in range(REPEATS)]
        return [(rng.choice((COMPLETIONS, CHAT)), text, rng.randint(*self.new_tokens)) for text in texts]

    @functools.cached_property
    def broken(self) -> list[Ask]:
        """Bodies that must be refused."""
        plain = {"model": "served", "prompt": "x", "max_tokens": 1}
        wrong = [({"temperature": "hot"}, 400), ({"max_tokens": -1}, 400), ({"shape": 1}, 400), ({"model": "y"}, 404)]
        wrong += [({"prompt": "word " * 60_000}, 400), ({"max_tokens": 10**9}, 400), ({"prompt": "\ud800"}, 400)]
        raw = [(b'{"model": "served", "messages": [', 400), (b'{"model": "served", "prompt": "\xff\xfe"}', 400)]
        raw += [(b" " * (self.max_body_bytes + 1), 413), (b"[]", 400)]
        asks = [Ask("broken", COMPLETIONS, {**plain, **fields}, expected=status) for fields, status in wrong]
        return asks + [Ask("broken", CHAT, raw=content, expected=status) for content, status in raw]

    def streams(self, count: int, new_tokens: int) -> list[Ask]:
        """Fresh asks that stream a fixed number of tokens."""
        rng = random.Random(f"{self.seed}/streams")
        body = {"max_tokens": new_tokens, "ignore_eos": True, "stream": True}
        texts = [self._fresh_text(rng, f"stream {i}") for i in range(count)]
        return [Ask("fresh", COMPLETIONS, {**request(COMPLETIONS, text, 1), **body}) for text in texts]

    def _draw(self, rng: random.Random, tag: str) -> Ask:
        if rng.random() < BROKEN_SHARE:
            return rng.choice(self.broken)
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        path, new_tokens = CHAT if rng.random() < CHAT_SHARE else COMPLETIONS, rng.randint(*self.new_tokens)
        if kind == "repeat":
            path, text, new_tokens = rng.choice(self.repeats)
        else:
            text = self._shared_text(rng, tag) if kind == "shared" else self._fresh_text(rng, tag)
        body = request(path, text, new_tokens)
        if rng.random() < STREAM_SHARE:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if rng.random() < EXACT_SHARE:
            body["kvboost"] = {"fidelity": "exact"}
        leaves_after = rng.randint(1, 4) if rng.random() < LEAVING_SHARE else None
        return Ask(kind, path, body, leaves_after=leaves_after)

    def _shared_text(self, rng: random.Random, tag: str) -> str:
        chosen = rng.sample(range(len(self.documents)), min(self.per_prompt, len(self.documents)))
        head = f"[{tag}] " if rng.random() < 0.5 else ""
        return head + INTRO + "".join(f"{self.documents[i]}\n\n" for i in chosen) + rng.choice(QUESTIONS)

    def _fresh_text(self, rng: random.Random, tag: str) -> str:
        size = self.per_prompt * len(self.documents[0])
        start = rng.randrange(len(self.text) - size)
        return f"[{tag}] {self.text[start : start + size]}\n\n{rng.choice(QUESTIONS)}"


def request(path: str, text: str, new_tokens: int) -> dict[str, Any]:
    """The body of a greedy request that tells the two most likely tokens of every step."""
    if path == CHAT:
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": new_tokens}
        return {"model": "served", "temperature": 0, "logprobs": True, "top_logprobs": 2, **chat}
    return {"model": "served", "temperature": 0, "logprobs": 2, "prompt": text, "max_tokens": new_tokens}
