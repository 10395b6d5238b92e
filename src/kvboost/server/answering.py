"""Two ways in which an answer leaves: as one JSON object, or as a stream whose errors are events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

from fastapi import Request
from fastapi.responses import JSONResponse

from kvboost.server import errors
from kvboost.server.backend import Backend
from kvboost.server.errors import ApiError
from kvboost.server.running import Answer, Run
from kvboost.server.sse import EventStream, event, unless_gone

logger = logging.getLogger("kvboost.server")


def backend_of(request: Request) -> Backend:
    """The backend of the application that a request came to."""
    backend: Backend = request.app.state.backend
    return backend


def check_model(request: Request, name: str) -> None:
    """Raises a 404 for a model that is not served here."""
    options = backend_of(request).options
    if name not in (options.model_name, *options.aliases):
        message = (
            f"the model {name[: errors.SHOWN_CHARS]!r} does not exist here; this server has {options.model_name!r}"
        )
        raise ApiError(404, message, param="model", code="model_not_found")


async def whole(request: Request, run: Run) -> list[Answer]:
    """All answers of a run; every job is cancelled when the client goes."""
    return await unless_gone(request.receive, run.finish())


async def streamed(request: Request, events: AsyncGenerator[bytes, None]) -> EventStream:
    """A stream that begins when its first event is there, so that an error before it has a status of its own."""
    try:
        first = await unless_gone(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(_rest(request, first, events))


async def _rest(request: Request, first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for data in events:
            yield data
    except Exception as error:
        told = errors.translate(error)
        if told is None:
            logger.exception("the stream of request %s failed", request.state.request_id)
            told = ApiError(500, "the server failed; its log knows why", code="internal_error")
        yield event(errors.body(request.url.path, told))
    finally:
        await events.aclose()


def json_of(value: object) -> JSONResponse:
    """A JSON response that FastAPI does not look at again."""
    return JSONResponse(value)
