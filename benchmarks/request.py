"""One request of a generated traffic, and what its sources share: token ids, and what was seen before."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from prompts import DATA, encode

SEED = 20261129


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and what is known of its answer.

    Requests of one `episode` follow one another on one cache, which starts empty: an episode can be measured alone.
    """

    source: str
    episode: int
    number: int  # in the episode
    warm: bool  # by construction: what it is made of was seen earlier in the episode
    ids: torch.Tensor  # [1, T]
    options: tuple[torch.Tensor, ...] = ()  # [1, m] each: what may follow the prompt
    right: int | None = None  # index of the right option
    mentioned: tuple[int, ...] = ()  # options whose name the question gives away
    expected: tuple[str, ...] = ()  # texts that are a right continuation of the prompt

    @property
    def name(self) -> str:
        """Identity in a results file."""
        return f"{self.source}/{self.episode}/{self.number}"


Source = Callable[[Any, int], list[Request]]
"""From a tokenizer, the first so many requests of a traffic."""


def episodes(requests: Iterable[Request]) -> list[list[Request]]:
    """Requests by episode, in order."""
    return [list(group) for _, group in itertools.groupby(requests, key=lambda r: (r.source, r.episode))]


class Writer:
    """Turns texts into ids of one tokenizer; pieces are encoded alone, so a piece is the same wherever it stands."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        starts = bos is not None and tokenizer("x").input_ids[:1] == [bos]
        self._start = torch.tensor([[bos] if starts else []], dtype=torch.long)
        self._known: dict[str, torch.Tensor] = {}

    def encode(self, text: str) -> torch.Tensor:
        """Ids [1, n] without special tokens."""
        if text not in self._known:
            self._known[text] = encode(text, self.tokenizer).long()
        return self._known[text]

    def cut(self, text: str, limit: int) -> torch.Tensor:
        """At most `limit` ids of a text."""
        return self.encode(text)[:, :limit]

    def sizes(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text."""
        return [len(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False).input_ids] if texts else []

    def prompt(self, system: str, *pieces: torch.Tensor) -> torch.Tensor:
        """Ids [1, T] from the first position on."""
        return torch.cat([self._start, self.encode(system), *pieces], 1)

    def system_tokens(self, system: str) -> int:
        """Tokens that all prompts with this system text begin with."""
        return self.prompt(system).shape[1]


class Seen:
    """The pieces that an episode has shown so far."""

    def __init__(self) -> None:
        self._pieces: set[Any] = set()

    def share(self, pieces: Sequence[Any]) -> float:
        """Share of `pieces` that earlier requests showed; from now on all of them are seen."""
        share = sum(p in self._pieces for p in pieces) / len(pieces)
        self._pieces.update(pieces)
        return share


def rows(*path: str) -> Iterator[Any]:
    """The records of a JSONL file of the shared data. Ends the program if it is not there."""
    place = DATA.joinpath(*path)
    if not place.exists():
        raise SystemExit(f"{place.name} is missing: this benchmark reads the shared data folder beside the project")
    with place.open(encoding="utf-8") as file:
        yield from map(json.loads, file)
