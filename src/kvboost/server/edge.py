"""What happens to every request before its route: an id, a caller, and a body of bounded size, in bounded time."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost.server import errors, headers
from kvboost.server.errors import ApiError, ClientGone
from kvboost.server.options import ServerOptions
from kvboost.server.tenants import Tenants

LINGER_S = 2.0  # in which a refused client can stop sending and read why
PUBLIC_PATHS = frozenset({"/health", "/ready", "/metrics", "/openapi.json"})


class Edge:
    """ASGI middleware. Refuses before anything is parsed: first an unknown key, then a body that is too large."""

    def __init__(self, app: ASGIApp, options: ServerOptions, tenants: Tenants) -> None:
        self._app, self._options, self._tenants = app, options, tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; anything that is not HTTP is passed on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        given = Headers(scope=scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and "request_id" in state:
                MutableHeaders(scope=message)[headers.REQUEST_ID] = state["request_id"]
            await send(message)

        try:
            state["request_id"] = headers.request_id(given)
            if scope["path"] not in PUBLIC_PATHS:
                state["caller"] = self._tenants.caller(given.get("authorization"))
            replayed = await self._read(given, receive)
        except ApiError as error:
            await _refuse(errors.response(scope["path"], error), receive, send_with_id)
        except ClientGone:
            return
        else:
            await self._app(scope, replayed, send_with_id)

    async def _read(self, given: Headers, receive: Receive) -> Receive:
        """The whole body, then what comes after it. Raises a 413 without reading more than is allowed, or a 408."""
        limit = self._options.max_body_bytes
        announced = given.get("content-length", "0")
        if re.fullmatch(r"[0-9]{1,18}", announced) is None or int(announced) > limit:
            raise _too_large(limit)
        try:
            body = await asyncio.wait_for(_collect(receive, limit), self._options.body_timeout_s)
        except asyncio.TimeoutError:
            close = {"connection": "close"}
            raise ApiError(
                408, f"the body did not arrive within {self._options.body_timeout_s:g} s", headers=close
            ) from None
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        return replay


async def _collect(receive: Receive, limit: int) -> bytes:
    """The bytes of the body. Raises a 413 as soon as they are more than `limit`."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


async def _refuse(response: Response, receive: Receive, send: Send) -> None:
    """Sends a response while its body may still be coming in. That is thrown away for a while.

    A connection that is closed with bytes unread is reset, and then many clients never see the response.
    """
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_discard(receive), LINGER_S)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _discard(receive: Receive) -> None:
    """Reads to the end of the body, or until the client has gone."""
    while (await receive()).get("more_body", False):
        pass


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than this server takes: {limit} bytes"
    return ApiError(413, message, code="body_too_large", headers={"connection": "close"})
