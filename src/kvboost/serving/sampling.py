"""Draws the tokens of one job from its logits, as `model.generate` would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost.errors import InputError
from kvboost.hf.processors import make_processors, make_warpers
from kvboost.serving.job import Sampling

LEAST_TEMPERATURE = 1e-6  # a smaller one draws the same, until it divides by what float32 holds as zero
LARGEST_SCORE = 1e30  # a tiny repetition penalty makes infinities, between which nothing can be drawn


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token; with logprobs asked for, its log-probability and the most likely tokens with theirs."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def check_sampling(sampling: Sampling, vocabulary: int, *, has_text: bool) -> None:
    """Raises `InputError` for what cannot be honoured here."""
    if sampling.max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {sampling.max_new_tokens}; ask for at least one token")
    outside = [i for i in sampling.logit_bias if not 0 <= i < vocabulary]
    if outside:
        raise InputError(f"logit_bias names token {outside[0]}, outside of the model's vocabulary of {vocabulary}")
    if sampling.stop and not has_text:
        raise InputError("stop strings need a tokenizer, and this engine was made without one")
    if "" in sampling.stop:
        raise InputError("a stop string is empty; it would end every answer at once")


class Sampler:
    """The random state and the history of one job."""

    def __init__(
        self, sampling: Sampling, prompt_ids: Sequence[int], eos_ids: Sequence[int], device: torch.device
    ) -> None:
        self._sampling = sampling
        self._processors = make_processors(
            len(prompt_ids),
            device,
            eos_ids=eos_ids,
            min_new_tokens=sampling.min_new_tokens,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=sampling.logit_bias,
        )
        temperature = max(sampling.temperature, LEAST_TEMPERATURE)
        self._warpers = make_warpers(temperature, sampling.top_k, sampling.top_p)
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed % 2**64)
        self._history = torch.tensor([list(prompt_ids)], device=device)

    def draw(self, logits: torch.Tensor) -> Drawn:
        """The next token from raw `logits`, float32 [V]. Log-probabilities are those of the model, before any penalty.

        Raises `RuntimeError` if the model gave no distribution.
        """
        scores = logits[None]
        if self._processors:
            scores = self._processors(self._history, scores.clone()).clamp(max=LARGEST_SCORE)
        if self._sampling.temperature == 0:
            chosen = scores.argmax(-1)
        else:
            probabilities = self._warpers(self._history, scores).softmax(-1)
            chosen = torch.multinomial(probabilities, 1, generator=self._generator)[0]
        if self._processors:
            self._history = torch.cat([self._history, chosen[None]], 1)
        return self._told(int(chosen), logits)

    def _told(self, token: int, logits: torch.Tensor) -> Drawn:
        if self._sampling.logprobs is None:
            return Drawn(token)
        logprobs = logits.log_softmax(-1)
        best = logprobs.topk(min(self._sampling.logprobs, len(logprobs)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Drawn(token, float(logprobs[token]), top)
