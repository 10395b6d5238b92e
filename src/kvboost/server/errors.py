"""What a client reads when something goes wrong: one exception, told in OpenAI's shape or in TGI's, by the path."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from kvboost.errors import InputError, OutOfMemory, SettingsError
from kvboost.server.refused import reason_for
from kvboost.serving import Busy, JobFailed

logger = logging.getLogger("kvboost.server")

TGI_PATHS = frozenset({"/", "/generate", "/generate_stream", "/info"})
OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
TGI_TYPES = {
    400: "validation",
    401: "authentication",
    404: "validation",
    405: "validation",
    408: "validation",
    413: "validation",
    429: "overloaded",
    500: "generation",
    503: "overloaded",
    504: "generation",
}
TGI_STATUS = {400: 422, 500: 424}  # what TGI answers to a request that it does not take, and to a failed generation
SHOWN_CHARS = 128  # of a name that the client made up: an error does not send megabytes back
DO_NOT_RETRY = {"x-should-retry": "false"}  # read by OpenAI's clients


class ApiError(Exception):
    """A request is answered with `status` and a message that says what, where (`param`) and what to do."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})


class ClientGone(Exception):
    """The client closed the connection before its answer was ready. Nobody reads the response."""


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be honoured; `param` names the field or header."""
    return ApiError(400, message, param=param, code=code)


def body(path: str, error: ApiError) -> dict[str, Any]:
    """The JSON of an error, as clients of `path` expect it."""
    if path in TGI_PATHS:
        return {"error": error.message, "error_type": TGI_TYPES.get(error.status, "validation")}
    kind = OPENAI_TYPES.get(error.status, "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def response(path: str, error: ApiError) -> JSONResponse:
    """The whole response of an error."""
    status = TGI_STATUS.get(error.status, error.status) if path in TGI_PATHS else error.status
    return JSONResponse(body(path, error), status, headers=error.headers)


def translate(error: Exception) -> ApiError | None:
    """What a client is told of an exception of ours; None for one that nobody expected."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        seconds = max(1, round(error.retry_after_s))
        return ApiError(429, str(error), code="busy", headers={"retry-after": str(seconds)})
    if isinstance(error, (InputError, SettingsError)):
        return bad(str(error))
    if isinstance(error, JobFailed):
        return ApiError(500, f"the model could not answer: {error}", code="generation_failed")
    if isinstance(error, OutOfMemory):
        return ApiError(500, str(error), code="out_of_memory")
    return None


def of_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, without repeating what was sent."""
    first = _clearest(error)
    if first["type"] == "json_invalid":
        return bad(f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "conflict":
        return bad(first["msg"], first["ctx"]["param"], "invalid_value")
    if first["type"] == "not_text":
        return bad(first["msg"])
    if first["type"] == "too_many_fields" and len(first["loc"]) == 1:
        return bad(f"the body is refused: {first['msg']}")
    path = _path(first["loc"][1:], error.body, missing=first["type"] == "missing")
    param = ".".join(path) or None
    if param is None:
        return bad("the body must be a JSON object, sent with the header content-type: application/json")
    if first["type"] == "extra_forbidden":
        reason = reason_for(path[-1])
        told = f"Unrecognized request argument supplied: {param}"
        return bad(f"{param} cannot be honoured: {reason}" if reason else told, param, "unknown_parameter")
    if first["type"] == "missing":
        return bad(f"you must provide {param}", param, "missing_required_parameter")
    return bad(f"invalid value for {param}: {first['msg'].removeprefix('Value error, ')}", param, "invalid_value")


def _clearest(error: RequestValidationError) -> Mapping[str, Any]:
    """Of what is wrong with the first bad field the deepest: of a union, the branch that the client meant."""
    found = error.errors()
    field = [e for e in found if e["loc"][:2] == found[0]["loc"][:2]]
    deepest: Mapping[str, Any] = max(field, key=lambda e: len(_path(e["loc"][1:], error.body, missing=True)))
    return deepest


def _path(loc: tuple[Any, ...], given: Any, *, missing: bool) -> list[str]:
    """The part of a location that the client wrote, without branches of a union; a missing field is named too.

    Names are cut to `SHOWN_CHARS`.
    """
    path = []
    for i, part in enumerate(loc):
        inside = (isinstance(given, dict) and part in given) or (
            isinstance(given, list) and isinstance(part, int) and part < len(given)
        )
        if inside:
            path.append(str(part)[:SHOWN_CHARS])
            given = given[part]
        elif missing and i == len(loc) - 1:
            path.append(str(part))
    return path


def install(app: FastAPI) -> None:
    """Answers every exception of the routes in the right shape."""

    async def expected(request: Request, error: Exception) -> Response:
        told = translate(error)
        if told is None:
            name = getattr(request.state, "request_id", "")
            logger.error("request %s failed: %s", name, type(error).__name__)  # its traceback comes from the server
            told = ApiError(
                500, "the server failed; its log knows why", code="internal_error", headers={"x-request-id": name}
            )
        return response(request.url.path, told)

    async def invalid(request: Request, error: Exception) -> Response:
        if not isinstance(error, RequestValidationError):
            raise error
        return response(request.url.path, of_validation(error))

    async def http(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        messages = {
            400: "the body is not valid JSON: it is no UTF-8 text, or a number or the nesting is too large",
            404: f"there is nothing at {request.method} {request.url.path}",
            405: f"{request.method} is not allowed at {request.url.path}",
        }
        told = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)), headers=error.headers)
        return response(request.url.path, told)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)

    for known in (ApiError, Busy, InputError, SettingsError, JobFailed, OutOfMemory, Exception):
        app.add_exception_handler(known, expected)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
