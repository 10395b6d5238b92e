"""One job that the model works on: its prompt a block at a time, then its tokens, then what is kept of it."""

from __future__ import annotations

import time

import torch

from kvboost.engine import KVBoost
from kvboost.hf.crowd import Slot
from kvboost.hf.processors import eos_ids_of
from kvboost.hf.stepwise import Stepwise
from kvboost.request import OpenRequest
from kvboost.serving.job import FinishReason, Piece, Token
from kvboost.serving.sampling import Drawn, Sampler
from kvboost.serving.stream import Ticket
from kvboost.serving.text import TextStream, TokenTexts


class Answer:
    """Used by the worker thread alone. `finish_reason` is set once the answer is complete; `close` must follow."""

    def __init__(self, engine: KVBoost, ticket: Ticket, texts: TokenTexts | None, max_new_tokens: int) -> None:
        self.ticket = ticket
        self.finish_reason: FinishReason | None = None
        self.tokens: list[int] = []  # drawn so far
        self._engine = engine
        self._texts = texts
        self._sampling = ticket.job.sampling
        self._max_new_tokens = max_new_tokens
        self._eos_ids = eos_ids_of(engine.model)
        self._prompt_ids = list(ticket.job.input_ids)
        self._sampler = Sampler(self._sampling, self._prompt_ids, self._eos_ids, engine.model.device)
        self._text = TextStream(self._decode, self._sampling.stop, keep_stop=self._sampling.keep_stop)
        self._request: OpenRequest | None = None
        self._stepwise: Stepwise | None = None
        self._first_token_at: float | None = None
        self.began_at = time.perf_counter()

    @property
    def is_decoding(self) -> bool:
        """True once the prompt is computed."""
        return bool(self.tokens)

    @property
    def slot(self) -> Slot | None:
        """Where the sequence's rows are, for a joint step; None if only `step_alone` can decode it."""
        return None if self._request is None else self._request.slot

    def advance_prompt(self, block_tokens: int) -> None:
        """Opens the request; on later calls computes the next block. Behind the last one the first token is told."""
        if self._request is None:
            self._open()
        elif self._request.slot is None:
            self._stepwise = Stepwise(self._engine.plain_generate, self._request.input_ids, self._max_new_tokens + 1)
            self.take(self._stepwise.step(None))
        else:
            request = self._request
            logits = self._engine.with_memory(lambda: request.extend(block_tokens))
            if logits is not None:
                self.take(logits)

    def step_alone(self) -> None:
        """Decodes a token of a model that only its own `generate` can decode."""
        if self._stepwise is None:
            raise RuntimeError("an answer with a slot is decoded by the crowd")
        self.take(self._stepwise.step(self.tokens[-1]))

    def take(self, logits: torch.Tensor) -> None:
        """Draws the next token from `logits` [V], and tells it."""
        drawn = self._sampler.draw(logits)
        self._first_token_at = self._first_token_at or time.perf_counter()
        self.tokens.append(drawn.id)
        if self.slot is not None:
            self.slot.ids.append(drawn.id)
        text = self._text.push(drawn.id)
        self.finish_reason = self._why_finished(drawn.id)
        if self.finish_reason is not None:
            text += self._text.finish()
            if self._text.stopped:
                self.finish_reason = "stop"
        self.ticket.send(Piece(text, (self._told(drawn),)))

    def close(self, reason: FinishReason | None) -> Piece:
        """Stores what is worth keeping and frees the slot; returns the last piece. `reason` None: the answer failed."""
        if self._stepwise is not None:
            self._stepwise.close()
        request, self._request = self._request, None
        if request is None:
            return Piece("", finish_reason=reason)
        kept = self.tokens[: self._text.kept_tokens]
        report = self._engine.close_request(request, self._prompt_ids + kept, self._first_token_at)
        return Piece(self._text.finish(), finish_reason=reason, report=report, plan=request.plan)

    def _open(self) -> None:
        job = self.ticket.job
        ids = torch.tensor([self._prompt_ids], device=self._engine.model.device)
        self._request = self._engine.open_request(
            ids, new_tokens=self._max_new_tokens, started=self.ticket.submitted_at, **job.settings
        )

    def _why_finished(self, token: int) -> FinishReason | None:
        if self._text.stopped:
            return "stop"
        if token in self._eos_ids and not self._sampling.ignore_eos:
            return "eos"
        return "length" if len(self.tokens) >= self._max_new_tokens else None

    def _decode(self, ids: list[int]) -> str:
        tokenizer = self._engine.tokenizer
        return tokenizer.decode(ids, skip_special_tokens=True) if tokenizer is not None else ""

    def _told(self, drawn: Drawn) -> Token:
        def text(token: int) -> str:
            return "" if self._texts is None else self._texts.of(token)

        return Token(drawn.id, text(drawn.id), drawn.logprob, tuple((i, text(i), p) for i, p in drawn.top))
