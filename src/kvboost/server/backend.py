"""From a validated request to jobs: the prompt's tokens, room for the answer, settings, namespace."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request

from kvboost import prompts
from kvboost.config import uses_cache
from kvboost.engine import KVBoost
from kvboost.errors import InputError, SettingsError
from kvboost.hf.declared import max_positions
from kvboost.server import headers
from kvboost.server.errors import SHOWN_CHARS, ApiError, bad
from kvboost.server.options import ServerOptions
from kvboost.server.running import Observer, Run
from kvboost.server.schemas import Message, Tool
from kvboost.server.tenants import Caller, Namespaces
from kvboost.serving import Busy, Job, Sampling, Service

T = TypeVar("T")
Ids = tuple[int, ...]
JUDGED_BY_ITSELF = frozenset({"gate", "risk_bound"})  # a request that sets one has a promise of its own


@dataclass(frozen=True, slots=True)
class Steering:
    """What a request says of KVBoost in its body, and on whose behalf."""

    settings: Mapping[str, Any]
    cache_salt: str | None = None
    user: str | None = None


class Backend:
    """One model behind a service. `observe` hears of every job that has ended."""

    def __init__(self, service: Service, kv: KVBoost, options: ServerOptions, observe: Observer | None) -> None:
        settings = kv.settings()
        self.service, self.kv, self.options, self.observe = service, kv, options, observe
        self.namespaces = Namespaces(settings.hash_secret.get_secret_value(), settings.cache_salt)
        self.max_positions = max_positions(kv.model.config.get_text_config())
        self.vocabulary = int(kv.model.get_input_embeddings().weight.shape[0])
        self.special_ids = frozenset(getattr(kv.tokenizer, "all_special_ids", ()))
        self._longest_token = max(map(len, kv.tokenizer.get_vocab()), default=1)  # characters
        self._tokenizing = ThreadPoolExecutor(1, "tokenizing")  # long prompts must not stop the loop

    def close(self) -> None:
        """Ends the thread that tokenizes."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    # --- prompts ----------------------------------------------------------------------------------------------------

    async def encode(self, prompt: str | Sequence[int], param: str) -> Ids:
        """Token ids of a text or of ids. Raises a 400 that names `param` for what the model cannot take."""
        return await self._in_thread(param, functools.partial(self._checked, prompt))

    async def encode_end(self, text: str, most: int) -> Ids:
        """The last `most` token ids of a text of any length."""
        end = text[-(most + 1) * self._longest_token :]  # no more can be needed
        return await self._in_thread("inputs", lambda: tuple(self.kv.tokenizer(end).input_ids[-most:]))

    async def encode_chat(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """Token ids of a chat, rendered by the model's template. Raises a 400 if it takes no such messages or tools."""
        return await self._in_thread("messages", functools.partial(self._render, messages, tools))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self.kv.tokenizer.decode(list(ids), skip_special_tokens=True))

    async def _in_thread(self, param: str, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)
        except InputError as error:
            raise bad(str(error), param) from None

    def _checked(self, prompt: str | Sequence[int]) -> Ids:
        if isinstance(prompt, str):
            self._check_length(prompt)
        ids: list[int] = prompts.encode(prompt, self.kv.tokenizer, self.kv.model)[0].tolist()
        return tuple(ids)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        plain = [_for_template(m) for m in messages]
        text = prompts.render(plain, self.kv.tokenizer)
        if tools:
            specs = [t.model_dump(exclude_none=True) for t in tools]
            with_tools = prompts.render(plain, self.kv.tokenizer, tools=specs)
            if with_tools == text:
                raise bad("the model's chat template does not present tools to the model", "tools")
            text = with_tools
        self._check_length(text)
        return self._checked(prompts.tokenize(self.kv.tokenizer, text))

    def _check_length(self, text: str) -> None:
        """Raises `InputError` for a text that cannot fit, however its tokens are cut: cutting it would take long."""
        if self.max_positions is not None and len(text) > self.max_positions * self._longest_token:
            raise InputError(
                f"the prompt has {len(text)} characters, more than {self.max_positions} tokens can hold, and the model "
                "takes no more than that; shorten it"
            )

    # --- limits -----------------------------------------------------------------------------------------------------

    def room(self, prompt_tokens: int, asked: int | None, param: str, usual: int | None = None) -> int:
        """Tokens that the answer may have: what was asked for, else `usual` or all, as far as they fit.

        Raises a 400 with the numbers if what was asked for does not fit.
        """
        cap = self.options.max_new_tokens
        if asked is not None and asked > cap:
            raise bad(f"{param} is {asked}, but this server generates at most {cap} tokens", param)
        left = cap if self.max_positions is None else self.max_positions - prompt_tokens
        if left < (asked or 1):
            raise bad(
                f"the model's context holds {self.max_positions} tokens, but the prompt has {prompt_tokens} and "
                f"{asked or 1} are asked for; shorten the prompt or lower {param}",
                param,
                "context_length_exceeded",
            )
        return asked if asked is not None else min(cap, left, usual or cap)

    def logit_bias(self, given: Mapping[str, float] | None) -> dict[int, float]:
        """Bias by token id. Raises a 400 for what is no token of the model."""
        biases: dict[int, float] = {}
        for name, bias in (given or {}).items():
            token = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else -1
            if not 0 <= token < self.vocabulary:
                raise bad(f"logit_bias holds {name[:32]!r}; token ids are 0 to {self.vocabulary - 1}", "logit_bias")
            biases[token] = bias
        return biases

    # --- jobs -------------------------------------------------------------------------------------------------------

    async def run(self, request: Request, ids: Ids, samplings: Sequence[Sampling], steering: Steering) -> Run:
        """Submits one job per sampling. Raises `Busy`, or an `ApiError` while the service drains."""
        settings = self._settings(request, steering)
        caller: Caller = request.state.caller
        deadline_s = headers.deadline_s(request.headers, self.options.deadline_s)
        jobs = [
            Job(f"{request.state.request_id}-{i}" if i else request.state.request_id, ids, sampling,
                tenant=caller.tenant, settings=settings, deadline_s=deadline_s)
            for i, sampling in enumerate(samplings)
        ]  # fmt: skip
        run = Run(len(ids), self.observe)
        try:
            for job in jobs:
                run.add(job, self.service.submit(job))
        except Exception as error:
            await run.aclose()
            if isinstance(error, Busy) and self.service.stats().draining:
                raise draining(error.retry_after_s) from None
            raise
        return run

    def _settings(self, request: Request, steering: Steering) -> dict[str, Any]:
        """The settings that go with the job. Raises a 400 that names a bad one."""
        caller: Caller = request.state.caller
        given = request.headers
        chosen: dict[str, Any] = {**steering.settings, **headers.settings(given)}
        chosen["cache_salt"] = self.namespaces.salt(caller, steering.cache_salt)
        chosen["session"] = self.namespaces.session(caller, headers.session(given), steering.user)
        if JUDGED_BY_ITSELF & steering.settings.keys():
            chosen["shadow_share"] = 0.0  # who leaves what the operator promises must not suspend reuse for the others
        try:
            if not uses_cache(self.kv.settings(), request.state.request_id, given.get(headers.ENABLED)):
                chosen["disable"] = True
            self.kv.settings(**chosen)
            return chosen
        except InputError as error:
            raise bad(str(error), headers.ENABLED) from None
        except SettingsError as error:
            raise bad(str(error), "kvboost") from None


def draining(retry_after_s: float) -> ApiError:
    """What is said to a new request while the server shuts down."""
    seconds = str(max(1, round(retry_after_s)))
    return ApiError(503, "the server is shutting down", code="draining", headers={"retry-after": seconds})


def _for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates read it: `developer` is a system message, arguments are objects."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": message.text}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": _object(c.function)}}
            for c in message.tool_calls
        ]
    return plain


def _object(call: Any) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InputError(f"the arguments of the call of {call.name[:SHOWN_CHARS]!r} are no JSON object")
    return arguments
