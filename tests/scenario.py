"""Prompts and engines that the tests share: documents of random tokens that can be put in any order."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from families import random_ids
from kvboost import KVBoost

SMALL = {"chunk_min_tokens": 8, "chunk_avg_tokens": 16, "chunk_max_tokens": 32}
SYSTEM = random_ids(40, seed=1)
DOCUMENTS = [random_ids(45 + 3 * i, seed=10 + i) for i in range(4)]
QUESTION = random_ids(9, seed=2)


def join(*parts: torch.Tensor) -> torch.Tensor:
    """Parts one after another, [1, T]."""
    return torch.cat(parts, 1)


def prompt(order: str = "0123", *, head: torch.Tensor = SYSTEM, question: torch.Tensor = QUESTION) -> torch.Tensor:
    """Head, the documents named by the digits of `order`, question."""
    return join(head, *(DOCUMENTS[int(i)] for i in order), question)


def engine(model: PreTrainedModel, **flags: Any) -> KVBoost:
    """An engine with small chunks, no cap on what is moved, and the plainest repair, never judged."""
    plain = {"min_moved_share": 0.0, "recompute_strategy": "epic", "gate": False}
    return KVBoost(model, **{**SMALL, **plain, **flags})


def plain_logits(model: PreTrainedModel, input_ids: torch.Tensor, new_tokens: int = 6) -> torch.Tensor:
    """Greedy logits of transformers alone, [new_tokens, vocabulary]."""
    return logits(greedy(model.generate, input_ids, new_tokens))


def greedy(generate: Any, input_ids: torch.Tensor, new_tokens: int = 6, **kwargs: Any) -> Any:
    """Calls `generate` greedily with a fixed number of new tokens and its raw logits kept."""
    return generate(
        input_ids,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **kwargs,
    )


def logits(output: Any) -> torch.Tensor:
    """Raw logits of every step, float32 [steps, vocabulary]."""
    return torch.cat(output.logits).float()


def relative_error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference over the largest logit."""
    return ((ours - truth).abs().max() / truth.abs().max()).item()
