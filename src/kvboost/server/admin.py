"""The administrators' app, on a port of its own behind a token: settings, cache, X-ray, metrics.

GET POST DELETE /admin/settings        what is in force and why; overrides, all or none
GET  /admin/cache/stats                counters and tiers
POST /admin/cache/clear  /warm         removes; computes a text before it is asked about
POST /admin/invalidate                 after weights were changed
POST /admin/shadow/resume              inexact reuse goes on
GET  /admin/overview                   what the page shows, in one answer
GET  /admin/requests[/ID]              the last requests, where the ring is switched on
GET POST /admin/xray                   the plan of a pasted prompt; computes nothing
GET  /metrics
GET  /ui                               the page; it needs no token itself, all that it shows does
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field

from kvboost.engine import KVBoost
from kvboost.errors import InputError, SettingsError
from kvboost.metrics import Metrics
from kvboost.server import ui
from kvboost.server.guard import Guard, error_response, require_token
from kvboost.server.overview import cache_stats, overview, without_nan
from kvboost.server.xray import RequestRing, xray
from kvboost.units import Seconds

MAX_BODY_BYTES = 16 << 20  # a document to warm

Namespace = Annotated[str | None, Field(description="The setting cache_salt that the requests in question have.")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Clear(_Body):
    """What to remove. Nothing is removed unless something is said."""

    all: bool = Field(False, description="Every chunk in every tier.")
    namespace: Namespace = None
    unused_for: Annotated[Seconds, Field(ge=0)] | None = Field(
        None, description='Only what was not used for so long: seconds, or such as "12h".'
    )


class Warm(_Body):
    """A text to compute, behind `context` or the chat template's default system prompt."""

    text: str
    context: str | None = None
    pin: bool = Field(False, description="Never evict it from memory.")
    namespace: Namespace = None


class Prompt(_Body):
    """A prompt to look at: `text`, or chat `messages`, as a request of this namespace and session would bring it."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    namespace: Namespace = None
    session: Annotated[str | None, Field(description="The setting session that the request would have.")] = None


def make_admin_app(
    kv: KVBoost,
    metrics: Metrics,
    *,
    token: str | None,
    host: str = "127.0.0.1",
    without_token: bool = False,
    ring: RequestRing | None = None,
    anyone: Mapping[str, str] | None = None,
) -> FastAPI:
    """The app to serve on `host`. Raises `SettingsError` without a token, see `guard.require_token`.

    `anyone` are the settings of a request that brings neither key nor salt nor session: a pasted prompt has them.
    """
    token = require_token(token, host, without_token=without_token)
    app = FastAPI(title="KVBoost admin", openapi_url=None)
    app.add_middleware(Guard, token=token, max_body_bytes=MAX_BODY_BYTES, public={("GET", ui.PATH)})
    app.add_exception_handler(SettingsError, _refused)
    app.add_exception_handler(InputError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    _add_settings(app, kv)
    _add_cache(app, kv)
    _add_xray(app, kv, ring if ring is not None else RequestRing(), anyone or {})
    _add_page(app, kv, metrics, token_needed=token is not None)

    @app.get("/metrics")
    def expose(request: Request) -> Response:
        body, content_type = metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})

    return app


def _add_settings(app: FastAPI, kv: KVBoost) -> None:
    @app.get("/admin/settings")
    def show() -> dict[str, Any]:
        return settings_in_force(kv)

    @app.post("/admin/settings")
    def override(values: dict[str, Any]) -> dict[str, Any]:
        kv.live.set(values)
        return settings_in_force(kv)

    @app.delete("/admin/settings")
    def take_back(name: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
        kv.live.clear(name)
        return settings_in_force(kv)


def _add_cache(app: FastAPI, kv: KVBoost) -> None:
    @app.get("/admin/cache/stats")
    def stats() -> dict[str, Any]:
        return cache_stats(kv)

    @app.post("/admin/cache/clear")
    def clear(what: Clear) -> Any:
        if not what.all and what.namespace is None and what.unused_for is None:
            return error_response(400, 'say what to remove: {"all": true}, a "namespace", or "unused_for"', "all")
        if what.all and (what.namespace is not None or what.unused_for is not None):
            return error_response(400, '"all" does not go with "namespace" or "unused_for"', "all")
        return {"removed": kv.forget(cache_salt=what.namespace, unused_for_s=what.unused_for)}

    @app.post("/admin/cache/warm")
    def warm(what: Warm) -> dict[str, Any]:
        return asdict(kv.warm(what.text, what.context, pin=what.pin, **_whose(what.namespace)))

    @app.post("/admin/invalidate")
    def invalidate() -> dict[str, int]:
        return {"removed": kv.invalidate()}

    @app.post("/admin/shadow/resume")
    def resume() -> dict[str, Any]:
        kv.shadow.resume()
        return without_nan(asdict(kv.shadow.stats()))


def _add_page(app: FastAPI, kv: KVBoost, metrics: Metrics, *, token_needed: bool) -> None:
    page = ui.make_page(token_needed=token_needed)

    @app.get("/admin/overview")
    def at_a_glance() -> dict[str, Any]:
        return overview(kv, metrics)

    @app.get(ui.PATH)
    def show_page() -> Response:
        return Response(page.body, headers=dict(page.headers))


def _add_xray(app: FastAPI, kv: KVBoost, ring: RequestRing, anyone: Mapping[str, str]) -> None:
    @app.get("/admin/requests")
    def requests() -> dict[str, Any]:
        listed = [seen.summary() for seen in ring.latest()]
        return {"capacity": ring.capacity, "now_s": time.time(), "requests": listed}

    @app.get("/admin/requests/{request_id:path}")  # an id may hold slashes
    def request(request_id: str) -> Any:
        seen = ring.get(request_id)
        if seen is None:
            off = "" if ring.capacity else "; none are kept, because the ring of requests is off"
            return error_response(404, f"there is no such request{off}", "request_id")
        return {**seen.summary(), **xray(kv, seen.input_ids.tolist(), seen.plan)}

    @app.get("/admin/xray")
    def of_text(text: str, namespace: str | None = None, session: str | None = None) -> dict[str, Any]:
        return _xray_of(kv, text, {**anyone, **_whose(namespace, session)})

    @app.post("/admin/xray")
    def of_prompt(prompt: Prompt) -> Any:
        if (prompt.text is None) == (prompt.messages is None):
            return error_response(400, 'give "text" or "messages", and not both', "text")
        given = prompt.text if prompt.text is not None else prompt.messages
        return _xray_of(kv, given, {**anyone, **_whose(prompt.namespace, prompt.session)})


def settings_in_force(kv: KVBoost) -> dict[str, Any]:
    """Every setting with its value and the source that won (secrets masked), and what happened to the file."""
    resolved, status = kv.live.resolve(), asdict(kv.live.status())
    values = resolved.settings.model_dump(mode="json")
    overrides = sorted(status.pop("admin"))
    listed = {name: {"value": value, "origin": resolved.origins[name]} for name, value in values.items()}
    return {**status, "overrides": overrides, "settings": listed}


def _xray_of(kv: KVBoost, prompt: Any, whose: Mapping[str, str]) -> dict[str, Any]:
    input_ids = kv.encode(prompt)
    return xray(kv, input_ids, kv.plan(input_ids, **whose))


def _whose(namespace: str | None, session: str | None = None) -> dict[str, str]:
    """The settings that say whose a request is, as far as they are given."""
    given = {"cache_salt": namespace, "session": session}
    return {name: value for name, value in given.items() if value is not None}


async def _refused(request: Request, error: Exception) -> Response:
    return error_response(400, str(error), error.setting if isinstance(error, SettingsError) else None)


async def _malformed(request: Request, error: Exception) -> Response:
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": str(error)}
    names = [str(part) for part in first["loc"][1:]]
    if "json" not in request.headers.get("content-type", "") and not names and request.method == "POST":
        return error_response(400, "send the body as JSON, with the header `content-type: application/json`")
    return error_response(400, f"{'.'.join(names) or 'the body'}: {first['msg']}", ".".join(names) or None)
