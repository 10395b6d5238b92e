"""Sampling of OpenAI's requests: one per choice, with seeds of its own."""

from __future__ import annotations

from blake3 import blake3

from kvboost.server.backend import Backend
from kvboost.server.schemas import Drawing
from kvboost.serving import Sampling


def samplings(backend: Backend, asked: Drawing, max_new_tokens: int, logprobs: int | None) -> list[Sampling]:
    """How each of the `n` answers is drawn. `top_p` of 0 leaves one token, so it is greedy."""
    return [
        Sampling(
            max_new_tokens=max_new_tokens,
            temperature=asked.temperature if asked.top_p > 0 else 0.0,
            top_p=asked.top_p if asked.top_p > 0 else 1.0,
            top_k=asked.top_k,
            seed=choice_seed(asked.seed, i),
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=backend.logit_bias(asked.logit_bias),
            logprobs=logprobs,
            stop=asked.stops,
            min_new_tokens=min(asked.min_tokens, max_new_tokens),
            ignore_eos=asked.ignore_eos,
        )
        for i in range(asked.n)
    ]


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of a choice, 0 to 2**63 - 1; the first one's is the request's own."""
    if seed is None:
        return None
    own = seed % 2**63
    if choice == 0:
        return own
    name = own.to_bytes(8, "little") + choice.to_bytes(4, "little")
    return int.from_bytes(blake3(name).digest(8), "little") >> 1
