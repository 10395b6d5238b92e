"""What OpenAI's clients send, as far as it can be honoured. A field that is null counts as absent, as it does there.

A field that is not here is refused by name (`errors.of_validation`). `IGNORED` lists those that change nothing.

Everything that a client can repeat is counted before its items are looked at: a million bad items would be a million
errors, and only the first is told.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_STOPS = 4
MAX_CHOICES = 16
LEAST_PENALTY = 0.01  # logits are divided by it
MAX_BIASES = 1024
MAX_PARTS = 4096  # of a message
MAX_CALLS = 128  # of tools, in one message
SEED_LIMIT = 2**63
# accepted and ignored: labels, and hints about storing or speed that change no answer
IGNORED = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }
)

StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Stop = StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def conflict(param: str, message: str) -> PydanticCustomError:
    """Says that a field is wrong because of another one."""
    return PydanticCustomError("conflict", "{param} {message}", {"param": param, "message": message})


def _few_biases(given: Any) -> Any:
    if isinstance(given, dict) and len(given) > MAX_BIASES:
        raise PydanticCustomError("too_many", "at most {most} tokens can have a bias", {"most": MAX_BIASES})
    return given


def _of_one_kind(given: Any) -> Any:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(given, list):
        _check_items(given, (int, str, list))
        for item in given:
            if isinstance(item, list):
                _check_items(item, (int,))
    return given


def _check_items(items: list[Any], kinds: tuple[type, ...]) -> None:
    kind = next((k for k in kinds if items and type(items[0]) is k), None)
    odd = next((i for i, item in enumerate(items) if type(item) is not kind), None)
    if odd is not None:
        raise PydanticCustomError("mixed", "item {index} is no token id and no text like those before", {"index": odd})


class Body(BaseModel):
    """A JSON object of a request: no unknown fields, no numbers that JSON does not have."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    max_fields: ClassVar[int] = 32

    @model_validator(mode="before")
    @classmethod
    def _absent_if_null(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        if len(given) > cls.max_fields:
            raise PydanticCustomError("too_many_fields", "an object has more fields than this server knows")
        return {k: v for k, v in given.items() if v is not None}


class RequestBody(Body):
    """The whole body of a request: every text in it, keys too, can be written as UTF-8."""

    max_fields: ClassVar[int] = 64

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        try:
            json.dumps(given if isinstance(given, dict) else None, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            raise PydanticCustomError(
                "not_text", "the body holds half of a surrogate pair, which is no text, or is nested too deeply"
            ) from None
        return given


class KVBoostOptions(Body):
    """Settings of KVBoost that a request may choose for itself. Tiers, sizes and secrets are the operator's."""

    disable: bool = False
    mode: Literal["off", "observe", "exact", "on"] | None = None
    fidelity: Literal["exact", "balanced", "fast"] | None = None
    gate: bool | None = None
    risk_bound: float | None = Field(None, ge=0)
    recompute_strategy: Literal["none", "selective", "cacheblend", "epic", "guided"] | None = None
    recompute_ratio: float | None = Field(None, ge=0, le=1)
    codec: Literal["none", "int8", "k8v4"] | None = None

    def chosen(self) -> dict[str, Any]:
        """The settings that were given."""
        return self.model_dump(exclude_unset=True, exclude_none=True)


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool = False
    include_obfuscation: bool = False  # ignored: nothing is padded


class Drawing(RequestBody):
    """How tokens are drawn: what chat and completions have in common. The last four are not OpenAI's."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Stop | None = None
    seed: int | None = Field(None, ge=-SEED_LIMIT, lt=SEED_LIMIT)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Bias] | None, BeforeValidator(_few_biases)] = Field(None, max_length=MAX_BIASES)
    user: str | None = Field(None, max_length=512)
    top_k: int = Field(0, ge=0, lt=2**31)
    repetition_penalty: float = Field(1.0, ge=LEAST_PENALTY, le=100)
    min_tokens: int = Field(0, ge=0, lt=2**31)
    ignore_eos: bool = False
    cache_salt: str | None = Field(None, max_length=512)
    kvboost: KVBoostOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_ignored(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if k not in IGNORED} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Drawing:
        if self.stream_options is not None and not self.stream:
            raise conflict("stream_options", "is allowed only with stream=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(Body):
    """A part of a message. The model reads text only."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """A function and its arguments: a JSON object as text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that the assistant made."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None  # in calls that were put together from a stream


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = None
    refusal: str | None = None  # these two come back with an answer; nothing is made of them
    annotations: list[Any] | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionSpec(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool. Only functions are tools here."""

    type: Literal["function"]
    function: FunctionSpec


class ToolChoice(Body):
    """One tool by name. Refused with the reason: see `openai_chat`."""

    type: str
    function: dict[str, Any] | None = None


class ResponseFormat(BaseModel):
    """How the answer must look. All but `text` is refused: see `openai_chat`."""

    model_config = ConfigDict(extra="allow")

    type: str


class ChatRequest(Drawing):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _logprobs_asked_for(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise conflict("top_logprobs", "is allowed only with logprobs=true")
        return self


class CompletionRequest(Drawing):
    """Body of POST /v1/completions."""

    prompt: Annotated[str | list[int] | list[str] | list[list[int]], BeforeValidator(_of_one_kind)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31, description="Default: 16.")
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = Field(None, ge=1)
