"""GET /health: the process answers. GET /ready: it takes requests. Both without a key."""

from __future__ import annotations

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
