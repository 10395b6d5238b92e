"""GET /v1/models: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from kvboost.server.answering import backend_of, check_model

router = APIRouter(tags=["openai"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The models, of which there is one."""
    return {"object": "list", "data": [_describe(request)]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> dict[str, Any]:
    """One model by its name."""
    check_model(request, name)
    return _describe(request)


def _describe(request: Request) -> dict[str, Any]:
    backend = backend_of(request)
    return {
        "id": backend.options.model_name,
        "object": "model",
        "created": request.app.state.started,
        "owned_by": "kvboost",
        "max_model_len": backend.max_positions,
    }
