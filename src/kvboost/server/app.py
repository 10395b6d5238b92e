"""The application: routes, what stands before them, and the state that they share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from kvboost import __version__
from kvboost.engine import KVBoost
from kvboost.server import errors, health, models, openai_chat, openai_completions, tgi
from kvboost.server.backend import Backend
from kvboost.server.edge import Edge
from kvboost.server.options import ServerOptions
from kvboost.server.running import Observer
from kvboost.server.tenants import Tenants
from kvboost.serving import Service


def make_app(
    service: Service,
    kv: KVBoost,
    options: ServerOptions,
    *,
    observe: Observer | None = None,
    expose: Callable[[str], tuple[bytes, str]] | None = None,
) -> FastAPI:
    """An ASGI application that answers for `kv` through `service`. It closes neither.

    `observe` hears of every job that has ended. `expose` gives the metrics and their content type for a scraper's
    `accept` header; with it there is a GET /metrics. Raises `SettingsError` if the file of API keys cannot be read.
    """
    backend = Backend(service, kv, options, observe)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        backend.close()

    app = FastAPI(title="KVBoost", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.backend = backend
    app.state.started = int(time.time())
    app.state.fingerprint = _fingerprint(kv, options)
    for module in (openai_chat, openai_completions, models, tgi, health):
        app.include_router(module.router)
    if expose is not None:
        app.include_router(health.metrics_router(expose))
    errors.install(app)
    app.add_middleware(Edge, options=options, tenants=Tenants(options.api_keys))
    return app


def _fingerprint(kv: KVBoost, options: ServerOptions) -> str:
    """OpenAI's `system_fingerprint`: equal as long as model, type and version are."""
    config = kv.model.config
    described = (options.model_name, type(kv.model).__name__, str(kv.model.dtype), config.to_json_string(), __version__)
    return "fp_" + hashlib.sha256("\0".join(described).encode()).hexdigest()[:12]


def make_metrics_app(expose: Callable[[str], tuple[bytes, str]]) -> FastAPI:
    """GET /metrics alone, for a port of its own: what is counted tells tenants about one another."""
    app = FastAPI(title="KVBoost metrics", openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(health.metrics_router(expose))
    return app
