"""Prompts of real text at a wanted length: a system prompt, documents that can be reordered, a question."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
SYSTEM = (
    "You are a careful software engineer. Several source files of one code base follow, each behind its number. "
    "Read all of them, then answer the question at the end in one short sentence.\n\n"
)
ORDER_QUESTION = "Question: name the files above in the order in which they stand, and what each is for.\nAnswer: 1."
QUESTION = "Question: which of the files above reports errors to the caller, and how?\nAnswer:"


@dataclass(frozen=True)
class DocumentSet:
    """Documents of about equal length as token ids, and the pieces around them; every piece is [1, n]."""

    system: torch.Tensor
    documents: list[torch.Tensor]
    question: torch.Tensor

    def prompt(
        self, order: list[int], head: torch.Tensor | None = None, question: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Token ids [1, T] of the documents in the given order."""
        front = [head] if head is not None else []
        asked = self.question if question is None else question
        return torch.cat([*front, self.system, *(self.documents[i] for i in order), asked], 1)

    def quote(self, rng: random.Random, tokenizer: Any, size: int = 16) -> torch.Tensor:
        """A question that only the documents answer: how does a passage, quoted from one of them, go on?"""
        document = rng.choice(self.documents)
        start = rng.randrange(30, document.shape[1] - 3 * size)
        asked = encode("Question: how does the file go on after this passage?\nPassage: ", tokenizer)
        return torch.cat([asked, document[:, start : start + size]], 1)


def encode(text: str, tokenizer: Any) -> torch.Tensor:
    """Token ids [1, n] without special tokens."""
    return torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])


def document_sets(
    tokenizer: Any, num_tokens: int, document_tokens: int, count: int, seed: int = 0
) -> list[DocumentSet]:
    """`count` sets of different source files, each set about `num_tokens` long in `prompt()`."""
    path = DATA / "buglocal.jsonl"
    if not path.exists():
        raise SystemExit(f"{path.name} is missing: this benchmark reads the shared data folder beside the project")
    with path.open() as file:
        sources = [json.loads(line)["buggy_source"] for line in file]
    random.Random(seed).shuffle(sources)
    system, question = encode(SYSTEM, tokenizer), encode(QUESTION, tokenizer)
    bos = tokenizer.bos_token_id
    if bos is not None and tokenizer("x").input_ids[0] == bos:
        system = torch.cat([torch.tensor([[bos]]), system], 1)
    per_set = max(2, round((num_tokens - system.shape[1] - question.shape[1]) / document_tokens))
    long_enough = (s for s in sources if len(s) > 6 * document_tokens)
    sets = []
    for _ in range(count):
        documents = []
        for number in range(per_set):
            ids = encode(f"File [{number + 1}]\n{next(long_enough)}", tokenizer)[:, : document_tokens - 2]
            documents.append(torch.cat([ids, encode("\n\n", tokenizer)], 1))
        sets.append(DocumentSet(system, documents, question))
    return sets


def shuffled(count: int, rng: random.Random) -> list[int]:
    """An order in which no document keeps the neighbour that it has in the natural order."""
    order = list(range(count))
    for _ in range(1000):
        rng.shuffle(order)
        if all(b != a + 1 for a, b in itertools.pairwise(order)) and order[0] != 0:
            break
    return order
