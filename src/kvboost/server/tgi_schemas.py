"""What TGI's clients send. A field that is null counts as absent."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kvboost.server.schemas import LEAST_PENALTY, Body, KVBoostOptions, RequestBody, StopText, conflict

MAX_STOPS = 4


class Parameters(Body):
    """`parameters` of a request. Those that are fixed to one value are known and not honoured otherwise."""

    max_new_tokens: int | None = Field(None, ge=1, lt=2**31, description="Default: 100, or what fits.")
    do_sample: bool = False
    temperature: float | None = Field(None, gt=0, le=100)
    top_k: int | None = Field(None, gt=0, lt=2**31)
    top_p: float | None = Field(None, gt=0, lt=1)
    seed: int | None = Field(None, ge=0, lt=2**64)
    stop: list[StopText] = Field(default_factory=list, max_length=MAX_STOPS)
    repetition_penalty: float | None = Field(None, ge=LEAST_PENALTY, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    return_full_text: bool = False
    truncate: int | None = Field(None, ge=1, lt=2**31)
    details: bool = False
    top_n_tokens: int | None = Field(None, ge=0, le=20)
    best_of: Literal[1] | None = None
    typical_p: float | None = None
    watermark: bool = False
    decoder_input_details: bool = False

    @model_validator(mode="after")
    def _honoured(self) -> Parameters:
        if self.typical_p is not None and self.typical_p != 1.0:
            raise conflict("typical_p", "cannot be honoured: typical decoding is not built in")
        if self.watermark:
            raise conflict("watermark", "cannot be honoured: answers are not marked")
        if self.decoder_input_details:
            raise conflict("decoder_input_details", "cannot be honoured: the prompt's rows come from the cache")
        return self


class GenerateRequest(RequestBody):
    """Body of POST /generate, /generate_stream and /."""

    inputs: str = Field(min_length=1)
    parameters: Parameters = Field(default_factory=Parameters)
    stream: bool = False
    cache_salt: str | None = Field(None, max_length=512)
    kvboost: KVBoostOptions | None = None
    model: str | None = None  # sent by some clients; there is one model
    options: dict[str, Any] | None = None  # of the hosted inference API: wait_for_model, use_cache
