"""What stands before the administrators' app: a token, and a limit on what it reads. Pure ASGI, before any parsing."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from fastapi.responses import JSONResponse

from kvboost.errors import SettingsError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Guard:
    """Lets requests with `Authorization: Bearer TOKEN` through to `app`, all others get a 401.

    `public` are the (method, path) that need no token: what they tell must be no secret. Without a token (loopback
    only) the Host header must name this machine, so that no web page can reach it by a name of its own. Bodies of more
    than `max_body_bytes` get a 413 before they are read.
    """

    def __init__(
        self,
        app: App,
        *,
        token: str | None,
        max_body_bytes: int,
        public: Collection[tuple[str, str]] = (),
    ) -> None:
        self._app = app
        self._token = token.encode() if token is not None else None
        self._max_body_bytes = max_body_bytes
        self._public = frozenset(public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        public = (scope["method"], scope["path"]) in self._public
        refusal = self._refusal({k.lower(): v for k, v in scope["headers"]}, public=public)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: dict[bytes, bytes], *, public: bool) -> JSONResponse | None:
        if not self._may_pass(headers, public=public):
            message = "this port needs the header `Authorization: Bearer TOKEN` with the admin token"
            return error_response(401, message, headers={"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0" if b"transfer-encoding" not in headers else b"")
        if not length.isdigit():
            return error_response(411, "a body needs a Content-Length")
        if int(length) > self._max_body_bytes:
            return error_response(413, f"the body may have {self._max_body_bytes} bytes at most")
        return None

    def _may_pass(self, headers: dict[bytes, bytes], *, public: bool) -> bool:
        if self._token is None:
            host = headers.get(b"host", b"").decode("latin-1")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            return name in LOCAL_NAMES
        if public:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return hmac.compare_digest(given.strip(), self._token) and scheme.lower() == b"bearer"


def require_token(token: str | None, host: str, *, without_token: bool) -> str | None:
    """The token to ask for. Raises `SettingsError` for none, except on loopback where the operator said so."""
    if token:
        return token
    if without_token and is_loopback(host):
        return None
    raise SettingsError(
        f"the admin port on {host!r} needs a token: give a file with --admin-token-file. Only on a loopback address it "
        "may be left open, by --admin-without-token"
    )


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: it may lead anywhere
        return False


def error_response(
    status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """An error in the shape that OpenAI's clients read; `param` names the field that is wrong."""
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    return JSONResponse({"error": error}, status, headers)
