"""GET /health: the process answers. GET /ready: it takes requests. GET /metrics. All without a key."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvboost.server.answering import backend_of

router = APIRouter(tags=["health"])


@router.get("/health")
async def health() -> dict[str, str]:
    """Alive. Says nothing of the model, so that a slow answer restarts nothing."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 while requests are taken, 503 when the server drains."""
    stats = backend_of(request).service.stats()
    if stats.draining:
        return JSONResponse({"status": "draining"}, 503)
    return JSONResponse({"status": "ready"})


def metrics_router(expose: Callable[[str], tuple[bytes, str]]) -> APIRouter:
    """GET /metrics of whatever `expose` gives for a scraper's `accept` header."""
    own = APIRouter(tags=["health"])

    @own.get("/metrics")
    def metrics(request: Request) -> Response:
        """The metrics, read in a thread: some wait for locks."""
        data, content_type = expose(request.headers.get("accept", ""))
        return Response(data, headers={"content-type": content_type})

    return own
