"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from kvboost.server import logprobs
from kvboost.server.answering import backend_of, check_model, json_of, streamed, whole
from kvboost.server.backend import Steering
from kvboost.server.drawing import samplings
from kvboost.server.errors import SHOWN_CHARS, bad
from kvboost.server.running import Answer, Run
from kvboost.server.schemas import ChatRequest
from kvboost.server.sse import DONE, event
from kvboost.server.tools import ToolCallReader

router = APIRouter()

NOT_CONSTRAINED = "decoding is not constrained by a grammar, and asking the model in words would promise too much"


@dataclass(frozen=True, slots=True)
class _Head:
    """What every object of one response begins with, and what was asked for."""

    id: str
    created: int
    model: str
    fingerprint: str
    asked: ChatRequest

    def of(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A response object or chunk."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }

    def reader(self) -> ToolCallReader | None:
        """What finds calls in an answer, if there may be any."""
        if not self.asked.tools or self.asked.tool_choice == "none":
            return None
        names = {t.function.name for t in self.asked.tools}
        return ToolCallReader(names, several=self.asked.parallel_tool_calls)


@router.post("/v1/chat/completions", tags=["openai"])
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """An answer to a chat, whole or as a stream of chunks."""
    backend = backend_of(request)
    check_model(request, body.model)
    _refuse(body)
    tools = body.tools if body.tools and body.tool_choice != "none" else []
    ids = await backend.encode_chat(body.messages, tools)
    limit, param = body.max_completion_tokens, "max_completion_tokens"
    if limit is None:
        limit, param = body.max_tokens, "max_tokens"
    top = (body.top_logprobs or 0) if body.logprobs else None
    drawn = samplings(backend, body, backend.room(len(ids), limit, param), top)
    steering = Steering(body.kvboost.chosen() if body.kvboost else {}, body.cache_salt, body.user)
    run = await backend.run(request, ids, drawn, steering)
    head = _Head(
        f"chatcmpl-{request.state.request_id}",
        int(time.time()),
        backend.options.model_name,
        request.app.state.fingerprint,
        body,
    )
    if body.stream:
        return await streamed(request, _chunks(head, run))
    answers = await whole(request, run)
    choices = [_choice(head, i, answer) for i, answer in enumerate(answers)]
    return json_of(head.of("chat.completion", choices, usage=run.usage()))


def _refuse(body: ChatRequest) -> None:
    """Raises a 400 for what could only be promised, not kept."""
    if body.response_format is not None and body.response_format.type != "text":
        raise bad(f"response_format {body.response_format.type[:SHOWN_CHARS]!r} cannot be honoured: {NOT_CONSTRAINED}",
                  "response_format", "unsupported_value")  # fmt: skip
    if body.tool_choice not in ("none", "auto"):
        raise bad(f"tool_choice can be none or auto: {NOT_CONSTRAINED}", "tool_choice", "unsupported_value")


def _finish_reason(answer: Answer, calls: list[dict[str, Any]]) -> str:
    if answer.finish_reason == "length":
        return "length"
    return "tool_calls" if calls else "stop"


def _choice(head: _Head, index: int, answer: Answer) -> dict[str, Any]:
    """One whole answer."""
    reader = head.reader()
    text = answer.text
    calls: list[dict[str, Any]] = []
    if reader is not None:
        said = reader.feed(answer.text)
        rest, calls = reader.finish()
        text = said + rest if not calls else (said + rest).strip()
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if calls:
        message["tool_calls"] = calls
    told = logprobs.of_chat(answer.tokens) if head.asked.logprobs else None
    return {"index": index, "message": message, "logprobs": told, "finish_reason": _finish_reason(answer, calls)}


async def _chunks(head: _Head, run: Run) -> AsyncGenerator[bytes, None]:
    """Per choice a chunk with the role, chunks of text, calls if there are any, one with the finish reason."""
    usage = {"usage": None} if head.asked.include_usage else {}

    def chunk(index: int, delta: dict[str, Any], tokens: Any = (), reason: str | None = None) -> bytes:
        told = logprobs.of_chat(tokens) if head.asked.logprobs and tokens else None
        choice = {"index": index, "delta": delta, "logprobs": told, "finish_reason": reason}
        return event(head.of("chat.completion.chunk", [choice], **usage))

    readers = [head.reader() for _ in run.answers]
    begun: set[int] = set()
    pieces = run.pieces()
    try:
        async for i, piece in pieces:
            if i not in begun:
                begun.add(i)
                yield chunk(i, {"role": "assistant", "content": ""})
            reader = readers[i]
            text = piece.text if reader is None else reader.feed(piece.text)
            if text or (head.asked.logprobs and piece.tokens):
                yield chunk(i, {"content": text}, piece.tokens)
            if piece.finish_reason is not None:
                rest, calls = ("", []) if reader is None else reader.finish()
                if rest:
                    yield chunk(i, {"content": rest})
                if calls:
                    yield chunk(i, {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]})
                yield chunk(i, {}, reason=_finish_reason(run.answers[i], calls))
        if head.asked.include_usage:
            yield event(head.of("chat.completion.chunk", [], usage=run.usage()))
        yield DONE
    finally:
        await pieces.aclose()
