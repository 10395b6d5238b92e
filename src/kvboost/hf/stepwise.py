"""`model.generate` one token at a time, for models that only it can decode: recurrent ones, or over several devices.

generate runs in a thread of its own. A logits processor hands its logits out and waits for the token that is to follow.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

NO_TOKEN = -1  # an id that no model draws, so that only the caller ends the answer


class _Closed(Exception):
    """Ends a generate that nobody wants any more."""


class _Exchange(LogitsProcessor):
    def __init__(self, logits: SimpleQueue[Any], tokens: SimpleQueue[int | None]) -> None:
        self.logits, self.tokens = logits, tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """Scores that leave only the token that was chosen outside."""
        self.logits.put(scores[0].float())
        token = self.tokens.get()
        if token is None:
            raise _Closed
        only = torch.full_like(scores, -torch.inf)
        only[0, token] = 0.0
        return only


class Stepwise:
    """One answer of `generate`, a call of a model's own generate. Between two steps nothing is computed."""

    def __init__(self, generate: Callable[..., Any], input_ids: torch.Tensor, max_new_tokens: int) -> None:
        self._logits: SimpleQueue[Any] = SimpleQueue()
        self._tokens: SimpleQueue[int | None] = SimpleQueue()
        options: dict[str, Any] = {
            "generation_config": GenerationConfig(
                max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0
            ),
            "attention_mask": torch.ones_like(input_ids),
            "logits_processor": LogitsProcessorList([_Exchange(self._logits, self._tokens)]),
        }
        if "use_model_defaults" in inspect.signature(generate).parameters:
            options["use_model_defaults"] = False
        self._thread = threading.Thread(
            target=self._run, args=(generate, input_ids, options), name="kvboost-generate", daemon=True
        )

    def step(self, token: int | None) -> torch.Tensor:
        """Logits behind `token`, behind the prompt if it is None: float32 [V]. Raises what generate raises."""
        if token is None:
            self._thread.start()
        else:
            self._tokens.put(token)
        got = self._logits.get()
        if isinstance(got, BaseException):
            raise got
        logits: torch.Tensor = got
        return logits

    def close(self) -> None:
        """Ends the generate that waits for a token."""
        self._tokens.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self, generate: Callable[..., Any], input_ids: torch.Tensor, options: dict[str, Any]) -> None:
        try:
            generate(inputs=input_ids, **options)
        except _Closed:
            pass
        except BaseException as error:
            self._logits.put(error)
        else:
            self._logits.put(RuntimeError("generate ended before it was told to"))
