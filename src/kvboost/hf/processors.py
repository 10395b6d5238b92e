"""Logits processors of one sequence: transformers' own, and the two kinds that it does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class CountPenalty(LogitsProcessor):
    """Subtracts from the logits of every generated token: `presence` once, and `frequency` for every time."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self.prompt_tokens, self.presence, self.frequency = prompt_tokens, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """`input_ids` [1, T] and `scores` [1, V] to scores."""
        counts = torch.bincount(input_ids[0, self.prompt_tokens :], minlength=scores.shape[1])[: scores.shape[1]]
        return scores - self.presence * (counts > 0) - self.frequency * counts


class LogitBias(LogitsProcessor):
    """Adds a constant to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self.ids = torch.tensor(list(bias), device=device)
        self.values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """`scores` [1, V] to scores."""
        return scores.index_add(1, self.ids, self.values[None])


def make_processors(
    prompt_tokens: int,
    device: torch.device,
    *,
    eos_ids: Sequence[int],
    min_new_tokens: int = 0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
) -> LogitsProcessorList:
    """What changes logits whether a token is drawn or the most likely one taken, in the order of `generate`."""
    chosen = LogitsProcessorList()
    if repetition_penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if min_new_tokens and eos_ids:
        chosen.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, min_new_tokens, list(eos_ids), str(device)))
    if presence_penalty or frequency_penalty:
        chosen.append(CountPenalty(prompt_tokens, presence_penalty, frequency_penalty))
    if logit_bias:
        chosen.append(LogitBias(logit_bias, device))
    return chosen


def make_warpers(temperature: float, top_k: int, top_p: float) -> LogitsProcessorList:
    """What shapes the distribution that a token is drawn from, in the order of `generate`."""
    chosen = LogitsProcessorList()
    if temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(temperature))
    if top_k:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chosen.append(TopPLogitsWarper(top_p))
    return chosen


def eos_ids_of(model: PreTrainedModel) -> tuple[int, ...]:
    """The ids that end an answer, by the model's generation config."""
    eos = model.generation_config.eos_token_id
    return () if eos is None else tuple(torch.as_tensor(eos).reshape(-1).tolist())
