"""What a client of the service says and hears: a job goes in, pieces of its answer come out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from kvboost.errors import KVBoostError
from kvboost.types import ReusePlan, ReuseReport

FinishReason = Literal["stop", "length", "eos", "deadline", "cancelled"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, and when drawing ends. Validated by whoever makes it from a client's request."""

    max_new_tokens: int
    temperature: float = 1.0  # 0 and what is next to it: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int | None = None  # equal seeds draw equal tokens
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from the logits of every token that was generated
    frequency_penalty: float = 0.0  # subtracted once for every time
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # tell the log-probability of each token, and of so many most likely ones
    stop: tuple[str, ...] = ()  # texts that end the answer
    keep_stop: bool = False  # whether the text that ended the answer is a part of it
    min_new_tokens: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One request: `input_ids` of the prompt, and settings of KVBoost that hold for it alone."""

    request_id: str
    input_ids: tuple[int, ...]
    sampling: Sampling
    tenant: str = ""  # for fairness; the namespace is the setting cache_salt
    settings: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None  # from submission to the last token


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token; `top` holds (id, text, log-probability) of the most likely ones."""

    id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What has been generated since the last piece. Texts joined are the answer; the last piece has a finish reason."""

    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: FinishReason | None = None
    report: ReuseReport | None = None  # in the last piece
    plan: ReusePlan | None = None  # in the last piece


class Busy(KVBoostError):
    """The queue is full, or the service is shutting down. Try again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class JobFailed(KVBoostError):
    """A job could not be answered: the model failed, not the client."""


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """A snapshot."""

    queued: int
    prefilling: int
    decoding: int
    slots: int  # jobs that are decoded together at most
    draining: bool
    finished: Mapping[str, int] = field(default_factory=dict)  # jobs by finish reason, `failed` and `refused` too


class Service(Protocol):
    """Answers jobs. Used from one asyncio loop; the model runs in a thread of its own."""

    def submit(self, job: Job) -> AsyncIterator[Piece]:
        """The pieces of the answer as they come. Closing the iterator cancels the job.

        Raises `Busy` at once where the queue is full, `InputError` or `SettingsError` for what cannot be honoured,
        `JobFailed` while iterating.
        """
        ...

    def stats(self) -> ServiceStats:
        """A consistent snapshot."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Takes no more jobs and waits for those accepted; False if some had to be ended after `timeout_s`."""
        ...
