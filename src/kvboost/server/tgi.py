"""TGI's routes: POST /generate, /generate_stream and /, GET /info. Refusals are 422s in TGI's shape."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from kvboost import __version__
from kvboost.server import logprobs
from kvboost.server.answering import backend_of, json_of, streamed, whole
from kvboost.server.backend import Backend, Ids, Steering
from kvboost.server.running import Answer, Run
from kvboost.server.sse import event
from kvboost.server.tgi_schemas import MAX_STOPS, GenerateRequest, Parameters
from kvboost.serving import Piece, Sampling, Token

router = APIRouter(tags=["tgi"])

USUAL_TOKENS = 100  # where a request does not say, as at TGI


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, its prompt as the model gets it, and how it is drawn."""

    backend: Backend
    body: GenerateRequest
    ids: Ids
    sampling: Sampling

    @property
    def parameters(self) -> Parameters:
        return self.body.parameters

    def full_text(self, generated: str) -> str:
        """What is returned as the text."""
        return (self.body.inputs if self.parameters.return_full_text else "") + generated

    def details(self, answer: Answer) -> dict[str, Any]:
        """What both kinds of `details` begin with."""
        drawn = self.sampling.temperature > 0
        return {
            "finish_reason": _finish_reason(answer),
            "generated_tokens": len(answer.tokens),
            "seed": self.sampling.seed if drawn else None,
        }

    def token(self, token: Token, text: str) -> dict[str, Any]:
        """A token as TGI tells it."""
        special = token.id in self.backend.special_ids
        return {"id": token.id, "text": text, "logprob": logprobs.finite(token.logprob), "special": special}

    def top(self, token: Token) -> list[dict[str, Any]]:
        """The most likely tokens in its place."""
        special = self.backend.special_ids
        return [
            {"id": i, "text": text, "logprob": logprobs.finite(logprob), "special": i in special}
            for i, text, logprob in token.top
        ]


@router.post("/generate")
async def generate(body: GenerateRequest, request: Request) -> Response:
    """The continuation of a text."""
    asked, run = await _begin(body, request)
    return json_of(await _generated(request, asked, run))


@router.post("/generate_stream")
async def generate_stream(body: GenerateRequest, request: Request) -> Response:
    """The continuation of a text, one event per token."""
    asked, run = await _begin(body, request)
    return await streamed(request, _events(asked, run))


@router.post("/")
async def compatible(body: GenerateRequest, request: Request) -> Response:
    """Either of the two, by `stream`; the whole answer comes in a list, as its clients expect here."""
    asked, run = await _begin(body, request)
    if body.stream:
        return await streamed(request, _events(asked, run))
    return json_of([await _generated(request, asked, run)])


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    """What is served, and its limits."""
    backend = backend_of(request)
    model = backend.kv.model
    most = backend.max_positions
    return {
        "model_id": backend.options.model_name,
        "model_sha": None,
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "model_device_type": model.device.type,
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": backend.service.stats().slots,
        "max_best_of": 1,
        "max_stop_sequences": MAX_STOPS,
        "max_input_tokens": None if most is None else most - 1,
        "max_total_tokens": most,
        "router": "kvboost",
        "version": __version__,
    }


async def _begin(body: GenerateRequest, request: Request) -> tuple[_Asked, Run]:
    backend = backend_of(request)
    ids = await _prompt(backend, body)
    room = backend.room(len(ids), body.parameters.max_new_tokens, "max_new_tokens", USUAL_TOKENS)
    sampling = _sampling(body.parameters, room)
    steering = Steering(body.kvboost.chosen() if body.kvboost else {}, body.cache_salt)
    return _Asked(backend, body, ids, sampling), await backend.run(request, ids, [sampling], steering)


async def _prompt(backend: Backend, body: GenerateRequest) -> Ids:
    """The prompt's last `truncate` tokens."""
    most = body.parameters.truncate
    if most is None:
        return await backend.encode(body.inputs, "inputs")
    return await backend.encode_end(body.inputs, most)


def _sampling(asked: Parameters, max_new_tokens: int) -> Sampling:
    """Greedy, unless sampling or anything that shapes it is asked for."""
    shaped = any(value is not None for value in (asked.temperature, asked.top_k, asked.top_p))
    drawn = asked.do_sample or shaped
    seed = asked.seed if asked.seed is not None else secrets.randbits(32)
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=(asked.temperature or 1.0) if drawn else 0.0,
        top_p=asked.top_p or 1.0,
        top_k=asked.top_k or 0,
        seed=seed % 2**63 if drawn else None,
        repetition_penalty=asked.repetition_penalty or 1.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        logprobs=asked.top_n_tokens or 0,
        stop=tuple(asked.stop),
        keep_stop=True,
    )


async def _generated(request: Request, asked: _Asked, run: Run) -> dict[str, Any]:
    answer = (await whole(request, run))[0]
    generated: dict[str, Any] = {"generated_text": asked.full_text(answer.text)}
    if asked.parameters.details:
        tokens = [asked.token(t, t.text) for t in answer.tokens]
        top = [asked.top(t) for t in answer.tokens] if asked.parameters.top_n_tokens else None
        generated["details"] = {**asked.details(answer), "prefill": [], "tokens": tokens, "top_tokens": top}
    return generated


async def _events(asked: _Asked, run: Run) -> AsyncGenerator[bytes, None]:
    """One event per token. Its text is what the answer grew by, so the texts of all events joined are the answer.

    The last token waits for the end, since its event tells how the answer ended.
    """
    waiting: list[tuple[Token, str]] = []
    index = 0
    pieces = run.pieces()
    try:
        async for _, piece in pieces:
            waiting = _appended(waiting, piece)
            for token, text in waiting[:-1]:
                index += 1
                yield event(_token_event(asked, index, token, text))
            waiting = waiting[-1:]
        answer = run.answers[0]
        token, text = waiting[0] if waiting else (Token(_end_of_text(asked.backend), "", 0.0), answer.text)
        last = _token_event(asked, index + 1, token, text)
        last["generated_text"] = asked.full_text(answer.text)
        last["details"] = {**asked.details(answer), "input_length": len(asked.ids)}
        yield event(last)
    finally:
        await pieces.aclose()


def _appended(waiting: Sequence[tuple[Token, str]], piece: Piece) -> list[tuple[Token, str]]:
    """Tokens with the text that goes with each: a piece's text goes with its last token, else with the one before."""
    grown = [*waiting, *((t, "") for t in piece.tokens)]
    if grown:
        grown[-1] = (grown[-1][0], grown[-1][1] + piece.text)
    return grown


def _token_event(asked: _Asked, index: int, token: Token, text: str) -> dict[str, Any]:
    told: dict[str, Any] = {"index": index, "token": asked.token(token, text)}
    if asked.parameters.top_n_tokens:
        told["top_tokens"] = asked.top(token)
    return {**told, "generated_text": None, "details": None}


def _finish_reason(answer: Answer) -> str:
    return {"length": "length", "stop": "stop_sequence"}.get(answer.finish_reason or "", "eos_token")


def _end_of_text(backend: Backend) -> int:
    return int(getattr(backend.kv.tokenizer, "eos_token_id", None) or 0)
