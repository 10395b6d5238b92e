"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from kvboost.server import logprobs
from kvboost.server.answering import backend_of, check_model, json_of, streamed, whole
from kvboost.server.backend import Steering
from kvboost.server.drawing import samplings
from kvboost.server.errors import bad
from kvboost.server.running import Answer, Run
from kvboost.server.schemas import CompletionRequest
from kvboost.server.sse import DONE, event
from kvboost.serving import Token

router = APIRouter()

USUAL_TOKENS = 16  # where a request does not say, as at OpenAI


@router.post("/v1/completions", tags=["openai"])
async def completions(body: CompletionRequest, request: Request) -> Response:
    """The continuation of one prompt, whole or as a stream."""
    backend = backend_of(request)
    check_model(request, body.model)
    _refuse(body)
    prompt = _only(body.prompt)
    ids = await backend.encode(prompt, "prompt")
    room = backend.room(len(ids), body.max_tokens, "max_tokens", USUAL_TOKENS)
    drawn = samplings(backend, body, room, body.logprobs)
    steering = Steering(body.kvboost.chosen() if body.kvboost else {}, body.cache_salt, body.user)
    run = await backend.run(request, ids, drawn, steering)
    head = {
        "id": f"cmpl-{request.state.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": backend.options.model_name,
        "system_fingerprint": request.app.state.fingerprint,
    }
    echoed = "" if not body.echo else prompt if isinstance(prompt, str) else backend.decode(ids)
    if body.stream:
        return await streamed(request, _chunks(head, body, run, echoed))
    answers = await whole(request, run)
    choices = [_choice(body, i, echoed + a.text, a.tokens, _finish_reason(a)) for i, a in enumerate(answers)]
    return json_of({**head, "choices": choices, "usage": run.usage()})


def _refuse(body: CompletionRequest) -> None:
    """Raises a 400 for what this server does not do."""
    if body.best_of is not None and body.best_of != body.n:
        raise bad("best_of must equal n: all answers are returned, none is chosen", "best_of", "unsupported_value")
    if body.echo and body.logprobs is not None:
        raise bad("echo with logprobs needs those of the prompt, whose rows come from the cache", "logprobs")


def _only(prompt: str | Sequence[Any]) -> str | list[int]:
    """The one prompt of a request. Raises a 400 for several."""
    if isinstance(prompt, str):
        return prompt
    if not prompt or isinstance(prompt[0], int):
        return list(prompt)
    if len(prompt) > 1:
        raise bad("send one request per prompt; the server decodes them together", "prompt", "unsupported_value")
    first = prompt[0]
    return first if isinstance(first, str) else list(first)


def _finish_reason(answer: Answer) -> str:
    return "length" if answer.finish_reason == "length" else "stop"


def _choice(
    body: CompletionRequest, index: int, text: str, tokens: Sequence[Token], reason: str | None, offset: int = 0
) -> dict[str, Any]:
    told = None if body.logprobs is None else logprobs.of_completion(tokens, offset, body.logprobs)
    return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}


async def _chunks(head: dict[str, Any], body: CompletionRequest, run: Run, echoed: str) -> AsyncGenerator[bytes, None]:
    usage = {"usage": None} if body.include_usage else {}
    offsets = [0] * len(run.answers)
    begun: set[int] = set()
    pieces = run.pieces()
    try:
        async for i, piece in pieces:
            text = piece.text if i in begun else echoed + piece.text
            begun.add(i)
            reason = _finish_reason(run.answers[i]) if piece.finish_reason is not None else None
            if text or piece.tokens or reason:
                choice = _choice(body, i, text, piece.tokens, reason, offsets[i])
                yield event({**head, "choices": [choice], **usage})
            offsets[i] += sum(len(t.text) for t in piece.tokens)
        if body.include_usage:
            yield event({**head, "choices": [], "usage": run.usage()})
        yield DONE
    finally:
        await pieces.aclose()
