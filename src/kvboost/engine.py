"""KVBoost: one request from prompt to answer. The only place where plan, store and model meet.

    prompt -> tokens -> chunks, keys -> look up, plan -> load, shift -> select -> prefill -> decode -> store

`KVBoost._serve` is that story, top to bottom.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from kvboost import prompts
from kvboost.capture import make_records
from kvboost.config import SINK_TOKENS, Settings, unknown_environment
from kvboost.errors import InputError, OutOfMemory, SettingsError
from kvboost.hf import compat, generation
from kvboost.hf.budget import DeviceMemory, cache_budget, is_out_of_memory, release_device_memory
from kvboost.hf.compat import DynamicCache, PreTrainedModel
from kvboost.hf.fingerprint import Fingerprint
from kvboost.hf.fitting import misfit
from kvboost.hf.loading import check_model, check_tokenizer, load_model
from kvboost.hf.prefill import continuation_logits, model_lock, peek_logits, stock_prefill
from kvboost.hf.support import ModelSupport, inspect_model
from kvboost.live import LiveSettings
from kvboost.naming import Naming
from kvboost.planning import Limits, Prompt, make_plan, still_served, unfit_reason, without_records
from kvboost.prefilling import Filled, Prefilled, Prefilling
from kvboost.quantization import Quantization
from kvboost.repair.gate import bound
from kvboost.request import OpenRequest
from kvboost.shadow import Shadow, ShadowResult
from kvboost.stats import Backoff, EngineStats, InFlight, Seldom
from kvboost.store import Tier, TieredStore
from kvboost.store.opening import open_store
from kvboost.types import ChunkKV, Int32Array, Kind, ReusePlan, ReuseReport

logger = logging.getLogger("kvboost")
_T = TypeVar("_T")

SHADOW_BLOCK_TOKENS = 256  # of a shadow prefill at a time: a request waits for no more than one such block
SHADOW_PATIENCE_S = 5.0  # then a block is computed although requests are running
CACHE_FAILED = "the cache failed; see the log"
OBSERVING = "observing only"
OUT_OF_MEMORY = "out of memory"
TRACEBACK_S = 60.0  # between two tracebacks of the cache's failures; each failure has one line


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer: its text, the new token ids, what was reused, the plan, and what `model.generate` returned.

    `shadow` is the check of a request that was drawn for shadow verification; its result comes later.
    """

    text: str
    token_ids: list[int]
    report: ReuseReport
    plan: ReusePlan
    output: Any
    shadow: Future[ShadowResult] | None = None


@dataclass(frozen=True, slots=True)
class _Served:
    """What a request returns, and the check that it was drawn for."""

    output: Any
    report: ReuseReport
    plan: ReusePlan
    shadow: Future[ShadowResult] | None = None


class KVBoost:
    """A model whose prompts reuse cached keys and values wherever known text stands. Thread-safe."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        settings: Settings | Mapping[str, Any] | None = None,
        *,
        store: Tier | None = None,
        **flags: Any,
    ) -> None:
        """Inspects and self-checks `model`, which is not changed.

        `settings` and `flags` are the lowest source of settings above the defaults (see `kvboost.config`). `store`
        replaces the tiers that the settings describe. Raises `SettingsError` for an invalid setting, `ModelError` if
        `model` is none or the tokenizer does not belong to it.
        """
        given = settings.model_dump(exclude_unset=True) if isinstance(settings, Settings) else dict(settings or {})
        self.live = LiveSettings({**given, **flags})
        effective = self.settings()
        check_model(model)
        if tokenizer is not None:
            check_tokenizer(model, tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        with model_lock(model):
            self.support: ModelSupport = inspect_model(model)
        self._owns_store = store is None
        self.store = _as_tiered(store) or open_store(effective, cache_budget(effective, DeviceMemory.of(model)))
        self.stats = EngineStats()
        self._in_flight = InFlight()
        self._giving_up = Backoff()  # namespaces whose moved rows are always judged too far off are tried seldom
        self.shadow = Shadow(self._prefill_in_full)
        self.plain_generate: Callable[..., Any] = functools.partial(type(model).generate, model)
        self._tracebacks = Seldom(TRACEBACK_S)
        self._fingerprint = Fingerprint(model, tokenizer)
        self.quantization = Quantization(model, self.support, self._fingerprint.current)
        self._naming = Naming(tokenizer, self._fingerprint.current, self.support.regime)
        for warning in [*unknown_environment(), *self.support.warnings, *self._limitations()]:
            logger.warning("%s: %s", type(model).__name__, warning)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, dtype: str | torch.dtype = "auto", device: str | None = None, **flags: Any
    ) -> KVBoost:
        """Loads model and tokenizer of a directory or hub name. Raises `ModelError` if that fails."""
        model, tokenizer = load_model(name, dtype=dtype, device=device)
        return cls(model, tokenizer, **flags)

    @classmethod
    def demo(cls, **flags: Any) -> KVBoost:
        """The embedded model, SmolLM2-135M-Instruct; fetched and converted on first use."""
        from kvboost.hf.embedded import SMOLLM2, ensure

        return cls.from_pretrained(ensure(SMOLLM2), **flags)

    def settings(self, **request: Any) -> Settings:
        """The settings in force right now."""
        return self.live.resolve(request).settings

    def generate(
        self, prompt: str | Sequence[int] | torch.Tensor | Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> Generation:
        """Answers `prompt`: text, token ids, or chat messages.

        Names of settings in `kwargs` hold for this request (`fidelity="exact"`, `cache_salt="tenant"`); all others go
        to `model.generate`. Raises `InputError` for a prompt that no model could answer, `SettingsError` for a setting.
        """
        started = time.perf_counter()
        overrides = {k: kwargs.pop(k) for k in list(kwargs) if k in Settings.model_fields}
        input_ids = prompts.encode(prompt, self.tokenizer, self.model)
        if self.tokenizer is not None and kwargs.get("stop_strings") is not None:
            kwargs.setdefault("tokenizer", self.tokenizer)
        settings = self.settings(**overrides)
        served = self._serve(input_ids, kwargs, settings, self._refusal(settings, input_ids, kwargs), started)
        new = generation.sequences(served.output)[0, input_ids.shape[1] :].tolist()
        text = self.tokenizer.decode(new, skip_special_tokens=True) if self.tokenizer is not None else ""
        return Generation(text, new, served.report, served.plan, served.output, served.shadow)

    def generate_like_transformers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`model.generate(*args, **kwargs)` through the cache; what the cache cannot serve goes there unchanged.

        Names of settings in `kwargs` hold for this call and are taken out.
        """
        started = time.perf_counter()
        overrides = {k: kwargs.pop(k) for k in list(kwargs) if k in Settings.model_fields}
        input_ids = generation.find_input_ids(args, kwargs)
        rest = {k: v for k, v in kwargs.items() if k not in ("inputs", "input_ids")}
        settings = None
        try:
            settings = self.settings(**overrides)
            reason = self._refusal(settings, input_ids, rest)
        except SettingsError as error:
            reason = str(error)
        if len(args) > 1:
            reason = "positional arguments after the prompt"
        if settings is None or reason is not None:
            self.stats.count_fallback(reason or "", generation.num_tokens(input_ids))
            return self.plain_generate(*args, **kwargs)
        return self._serve(input_ids, rest, settings, None, started).output

    def encode(self, prompt: str | Sequence[int] | torch.Tensor | Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a prompt, as `generate` would take it. Raises `InputError`."""
        ids: list[int] = prompts.encode(prompt, self.tokenizer, self.model)[0].tolist()
        return ids

    def plan(
        self, prompt: str | Sequence[int] | torch.Tensor | Sequence[Mapping[str, Any]], **request: Any
    ) -> ReusePlan:
        """What a request would reuse right now. Computes and changes nothing, so which moved rows would be repaired
        stays open.
        """
        settings = self.settings(**request)
        tokens = _tokens(prompts.encode(prompt, self.tokenizer, self.model))
        named = self._naming.prompt(tokens, settings, self._naming.keys(len(tokens), settings))
        return make_plan(named, self.store.find, self._limits(settings, len(tokens)))

    def warm(self, text: str, context: str | None = None, *, pin: bool = False, **request: Any) -> ReuseReport:
        """Computes `text` behind `context`, or behind the chat template's default system prompt, and keeps its chunks.

        Such text is declared: it may be moved into anybody's prompt, also with `share_moved` session. With `pin` its
        chunks are never evicted from memory, where they count. Raises `InputError` if the text is empty or does not fit
        the model.
        """
        started = time.perf_counter()
        settings = self.settings(**request)
        input_ids = prompts.encode_document(text, context, self.tokenizer, self.model, SINK_TOKENS)
        reason = self._refusal(settings, input_ids, {})
        if reason is not None:
            self.stats.count_fallback(reason, input_ids.shape[1])
            return ReuseReport(input_ids.shape[1], fresh_tokens=input_ids.shape[1], fallback=reason)
        prefilled = self._prefill(input_ids, settings.model_copy(update={"fidelity": "exact"}))
        prefilled = replace(prefilled, keys=prefilled.keys.declared())
        size = input_ids.shape[1]
        stock_prefill(
            self.model, input_ids, prefilled.filled.cache, size, block_tokens=self.support.block_tokens(size, settings)
        )
        ttft_s = time.perf_counter() - started
        report = self._finish(_timed(prefilled, ttft_s), input_ids, settings, ttft_s)
        if pin:
            self.store.pin(s.record_id for s in self.plan(input_ids, **request) if s.record_id is not None)
        return report

    def score(
        self, prompt: torch.Tensor, continuation: torch.Tensor, *, plan: ReusePlan | None = None, **request: Any
    ) -> tuple[torch.Tensor, ReuseReport]:
        """Teacher-forced next-token logits of `continuation` [1, m] behind `prompt` [1, T]: float32 [m, V], and what
        was reused. Stores nothing, so it can be repeated; this is how fidelity is measured.

        With `plan`, that of an earlier request, its segments are served instead of what would be found now: under the
        same settings the same rows are repaired again, and the logits are those of that request.

        Raises `InputError` if the cache does not serve the prompt, or not as the plan says.
        """
        settings = self.settings(**request)
        reason = self._refusal(settings, prompt, {})
        if reason is not None and (settings.enabled or self.support.refused or plan is not None):
            raise InputError(f"the cache does not serve this prompt: {self.support.refused or reason}")
        if reason is None:
            prefilled = self._prefill(prompt, settings, given=plan)
            cache, report = prefilled.filled.cache, prefilled.report
        else:
            cache, report = DynamicCache(), ReuseReport(prompt.shape[1], fresh_tokens=prompt.shape[1], fallback=reason)
        size = prompt.shape[1]
        if not self.support.regime(size):  # in the long regime of longrope one forward must see the last position
            stock_prefill(self.model, prompt, cache, size - 1, block_tokens=settings.prefill_block_tokens)
        following = torch.cat([prompt[:, cache.get_seq_length() :], continuation[:, :-1]], 1)
        return continuation_logits(self.model, following, cache)[-continuation.shape[1] :], report

    def invalidate(self) -> int:
        """Forgets every stored chunk and samples the weights anew; returns how many chunks memory dropped.

        Needed after weights were changed in a way that torch does not count (through `.data`, or by another library).
        From now on this engine shares nothing with other processes. What it wrote to slower tiers stays there, out of
        its own reach: others may use it.
        """
        self._fingerprint.renew()
        return self.store.tiers[0].delete()

    def forget(self, *, cache_salt: str | None = None, unused_for_s: float | None = None) -> int:
        """Deletes stored chunks from all tiers: of one namespace, not used for so long, or both; all without either.

        Returns how many. Tiers that are shared lose them for everybody.
        """
        if cache_salt is None and unused_for_s is None:
            return self.store.delete()
        owner = None
        if cache_salt is not None:
            owner = self._naming.keys(0, self.settings().model_copy(update={"cache_salt": cache_salt})).owner
        return self.store.forget(owner, None if unused_for_s is None else time.time() - unused_for_s)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Waits until what was captured is encoded and in the slower tiers; False if that takes longer."""
        return self.store.flush(timeout_s)

    def close(self) -> None:
        """Ends the background work: shadow checks are dropped, what is queued for slower tiers is written.

        A store that was given to the engine stays open.
        """
        self.shadow.close()
        if self._owns_store:
            self.store.close()

    def __enter__(self) -> KVBoost:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- one request -------------------------------------------------------------------------------------------------

    def _serve(
        self,
        input_ids: torch.Tensor,
        kwargs: Mapping[str, Any],
        settings: Settings,
        refusal: str | None,
        started: float,
    ) -> _Served:
        """Prefill over the cache, decode with `model.generate`, store what is new."""
        clock = generation.FirstTokenClock()
        with self._in_flight:
            prefilled = refusal or self._try_prefill(input_ids, settings)
            output = prefilled if isinstance(prefilled, str) else self._decode(prefilled, input_ids, kwargs, clock)
            if isinstance(prefilled, str) or isinstance(output, str):
                return self._serve_plain(input_ids, kwargs, output, clock, started)
            first_token_at = clock.first_token_at or time.perf_counter()
            ttft_s = first_token_at - started
            decode_s = time.perf_counter() - first_token_at
            prefilled = _timed(prefilled, ttft_s)
            report = self._finish(prefilled, generation.sequences(output)[:1], settings, ttft_s)
        checked = prefilled.drawn_logits
        shadow = None if checked is None else self.shadow.offer(input_ids, checked, bound(settings))
        return _Served(output, replace(report, decode_s=decode_s), prefilled.filled.plan, shadow)

    # --- one request whose forwards somebody else shares out: `kvboost.serving` --------------------------------------

    def open_request(
        self, input_ids: torch.Tensor, *, new_tokens: int = 0, started: float | None = None, **request: Any
    ) -> OpenRequest:
        """Look up, plan, load, and the selective forward where rows are moved. The rest of the prompt [1, T] is
        computed block by block (`OpenRequest.extend`), by whoever opened it, and `close_request` must follow.

        `started` is when the request arrived (`time.perf_counter`), `new_tokens` how many may be generated; the request
        ends with `SettingsError` for a setting that is invalid, and in no other way.
        """
        settings = self.settings(**request)
        opened = OpenRequest(self.model, self.support, input_ids, settings, started or time.perf_counter())
        with ExitStack() as on_failure:
            on_failure.enter_context(self._in_flight)
            refusal = self._refusal(settings, input_ids, {})
            prefilled = refusal or self._try_prefill(input_ids, settings, prefix_only=True)
            if self.support.refused is None and self.support.outdated(self.model) is None:
                opened.make_slot(None if isinstance(prefilled, str) else prefilled.filled.cache, new_tokens)
            opened.begin(prefilled)
            on_failure.pop_all()  # `close_request` ends it
        return opened

    def close_request(self, opened: OpenRequest, ids: Sequence[int], first_token_at: float | None) -> ReuseReport:
        """Stores the rows of `ids`, prompt and answer, of which the last may have none; counts; completes the report.

        Without `first_token_at` the request was given up: what was computed is stored, and nothing is counted.
        """
        decode_s = 0.0 if first_token_at is None else time.perf_counter() - first_token_at
        try:
            report = self._close_request(opened, torch.tensor([list(ids)]), first_token_at)
            return replace(report, decode_s=decode_s)
        finally:
            self._in_flight.__exit__(None, None, None)

    def _close_request(
        self, opened: OpenRequest, sequence_ids: torch.Tensor, first_token_at: float | None
    ) -> ReuseReport:
        size, prefilled = opened.input_ids.shape[1], opened.prefilled
        ttft_s = (first_token_at or time.perf_counter()) - opened.started
        if prefilled is None:
            if first_token_at is not None:
                self.stats.count_fallback(opened.fallback or "", size)
            return ReuseReport(
                size, fresh_tokens=size, fallback=opened.fallback, ttft_s=ttft_s, prefill_s=opened.computed_s
            )
        spent = prefilled.report.prefill_s + opened.computed_s
        prefilled = replace(prefilled, report=replace(prefilled.report, prefill_s=spent))
        if first_token_at is None:
            return self._keep(prefilled, sequence_ids, opened.settings)
        if prefilled.drawn and opened.logits is not None:
            self.shadow.offer(opened.input_ids, opened.logits, bound(opened.settings))
        return self._finish(prefilled, sequence_ids, opened.settings, ttft_s)

    # --- the steps of both -------------------------------------------------------------------------------------------

    def _decode(
        self,
        prefilled: Prefilled,
        input_ids: torch.Tensor,
        kwargs: Mapping[str, Any],
        clock: generation.FirstTokenClock,
    ) -> Any:
        """What `model.generate` makes of the filled cache; the reason, if memory ran out before the first token."""
        options = {compat.CACHE_ARGUMENT: prefilled.filled.cache, **generation.with_mask(input_ids, kwargs)}
        try:
            return self.plain_generate(inputs=input_ids, **generation.with_clock(options, clock))
        except Exception as error:
            if clock.first_token_at is not None or not is_out_of_memory(error):
                raise
            self._give_memory_back()
            return OUT_OF_MEMORY

    def _serve_plain(
        self,
        input_ids: Any,
        kwargs: Mapping[str, Any],
        reason: str,
        clock: generation.FirstTokenClock,
        started: float,
    ) -> _Served:
        """The request as transformers would run it without us."""
        size = int(input_ids.shape[-1])
        self.stats.count_fallback(reason, size)
        try:
            output = self.plain_generate(inputs=input_ids, **generation.with_clock(kwargs, clock))
        except Exception as error:
            if reason == OUT_OF_MEMORY and is_out_of_memory(error):
                raise OutOfMemory(
                    f"a prompt of {size} tokens does not fit the memory of {self.model.device}, even after "
                    "the cache gave its own back; shorten it, or lower cache_bytes"
                ) from error
            raise
        ended = time.perf_counter()
        first_token_at = clock.first_token_at or ended
        report = ReuseReport(
            size,
            fresh_tokens=size,
            fallback=reason,
            prefill_s=first_token_at - started,
            ttft_s=first_token_at - started,
            decode_s=ended - first_token_at,
        )
        return _Served(output, report, ReusePlan.nothing(size))

    def _refusal(self, settings: Settings, input_ids: Any, kwargs: Mapping[str, Any]) -> str | None:
        """Why the cache does not serve this request, or None."""
        if not settings.enabled:
            return "switched off"
        return (
            self.support.refused
            or self.support.outdated(self.model)
            or generation.unserved_reason(self.model, input_ids, kwargs)
            or self.support.refuses_length(input_ids.shape[1])
        )

    def _try_prefill(
        self, input_ids: torch.Tensor, settings: Settings, *, prefix_only: bool = False
    ) -> Prefilled | str:
        """`_prefill`, or why it cannot be had: a failure of the cache is logged and never reaches the request."""
        try:
            return self.with_memory(lambda: self._prefill(input_ids, settings, prefix_only=prefix_only))
        except Exception as error:
            if is_out_of_memory(error):
                return OUT_OF_MEMORY
            logger.error(
                "the cache failed for a prompt of %d tokens (%s: %s); computing it in full",
                input_ids.shape[1],
                type(error).__name__,
                str(error).partition("\n")[0],
                exc_info=self._tracebacks.allows(),
            )
            return CACHE_FAILED

    def with_memory(self, work: Callable[[], _T]) -> _T:
        """What `work` returns. Out of memory, the cache gives half of what it holds back, and one more try is made."""
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self._give_memory_back()
        return work()

    def _give_memory_back(self) -> None:
        kept = self.store.shrink(0.5)
        release_device_memory(self.model.device)
        logger.warning("out of memory: the cache is limited to %d bytes from now on", kept)

    def _prefill(
        self,
        input_ids: torch.Tensor,
        settings: Settings,
        *,
        prefix_only: bool = False,
        given: ReusePlan | None = None,
    ) -> Prefilled:
        """Look up, plan, load, shift, select, and run the selective forward where rows were moved.

        With `prefix_only` nothing is computed behind a prefix that was not moved. With `given`, nothing is planned:
        raises `InputError` if that plan does not fit.
        """
        began = time.perf_counter()
        tokens = _tokens(input_ids)
        keys = self._naming.keys(len(tokens), settings)
        prompt = self._naming.prompt(tokens, settings, keys)
        trying_moved = given is not None or not settings.gate or self._giving_up.allows(keys.owner)
        limits = self._limits(settings, len(tokens), trying_moved=trying_moved)
        wanted = given or make_plan(prompt, self.store.find, limits)
        with ExitStack() as leases:
            records, loaded_bytes = self._lease(wanted, leases)
            if given is None:
                plan = _servable(wanted, records, allow_gaps=self.support.moved_refused is None)
            else:
                plan = _replayed(given, prompt, records, limits)
            looked_up = time.perf_counter()
            observing = settings.mode == "observe"
            served = ReusePlan.nothing(plan.num_tokens) if observing else plan
            filled = Prefilling(self.model, self.support, input_ids, records, settings, prefix_only).fill(served)
            if not served.is_prefix_only and settings.gate and given is None:
                self._giving_up.note(keys.owner, failed=filled.report.fallback is not None)
            sources = {i: r.header for i, r in records.items()}
        report = replace(
            replace(ReuseReport.of(plan), fallback=OBSERVING) if observing else filled.report,
            bytes_by_tier=loaded_bytes,
            lookup_s=looked_up - began,
        )
        inexact = filled.plan.count(Kind.MOVED) + filled.plan.count(Kind.CONTINUED) > 0
        drawn = inexact and random.random() < settings.shadow_share
        logits = self._checked_logits(filled, input_ids) if drawn and not prefix_only else filled.logits
        return Prefilled(filled, keys, sources, report, drawn, logits if drawn else None)

    def _lease(self, plan: ReusePlan, leases: ExitStack) -> tuple[dict[bytes, ChunkKV], dict[str, int]]:
        """The plan's records and the sources of linked ones, kept until `leases` closes; and bytes by tier.

        Records that are not of the model's shape are left out, and removed from the store.
        """
        own = leases.enter_context(self.store.get_many([s.record_id for s in plan if s.record_id is not None]))
        links = [r.header.source.record_id for r in own.records.values() if r.header.source is not None]
        sources = leases.enter_context(self.store.get_many(links))
        records = self._fitting({**own.records, **sources.records})
        tiers = {**own.tiers, **sources.tiers}
        loaded_bytes: Counter[str] = Counter()
        for record_id, record in records.items():
            loaded_bytes[tiers[record_id]] += record.num_bytes
        return records, dict(loaded_bytes)

    def _fitting(self, records: Mapping[bytes, ChunkKV]) -> dict[bytes, ChunkKV]:
        """The records that the model can load. The others could be found and lost by every such prompt: they go."""
        layout = self.support.require_layout()
        misfits = {i: why for i, r in records.items() if (why := misfit(r, records, layout)) is not None}
        if misfits:
            self.store.reject(misfits)
        return {i: record for i, record in records.items() if i not in misfits}

    def _finish(
        self,
        prefilled: Prefilled,
        sequence_ids: torch.Tensor,
        settings: Settings,
        ttft_s: float,
    ) -> ReuseReport:
        """Stores the new rows, counts, and completes the report."""
        report = replace(self._keep(prefilled, sequence_ids, settings), ttft_s=ttft_s)
        self.stats.count_served(prefilled.filled.plan, report.fallback, settings.recompute_strategy)
        self._note_quality(prefilled.filled.plan)
        return report

    def _keep(self, prefilled: Prefilled, sequence_ids: torch.Tensor, settings: Settings) -> ReuseReport:
        """Stores the new rows. A failing store costs only what it would have kept."""
        began = time.perf_counter()
        try:
            written = self._capture(prefilled, sequence_ids, settings)
        except Exception:
            logger.exception("storing the rows of a request failed; they will be computed again")
            written = 0
        return replace(prefilled.report, written_tokens=written, capture_s=time.perf_counter() - began)

    def _note_quality(self, plan: ReusePlan) -> None:
        """Text that needs much repair wherever it is moved to is worth less to keep."""
        for s in plan:
            if s.kind is Kind.MOVED and s.record_id is not None:
                repaired = np.searchsorted(plan.repaired, [s.span.start, s.span.stop])
                self.store.note_quality(s.record_id, 1 - float(repaired[1] - repaired[0]) / len(s.span))

    def _capture(self, prefilled: Prefilled, sequence_ids: torch.Tensor, settings: Settings) -> int:
        filled, report = prefilled.filled, prefilled.report
        num_rows = min(filled.cache.get_seq_length(), sequence_ids.shape[1])
        if num_rows == 0:  # given up before anything was computed
            return 0
        boundary = self.support.regime_boundary
        if boundary is not None and filled.plan.num_tokens <= boundary:
            num_rows = min(num_rows, boundary)  # later rows were generated with other rotary frequencies
        if self.support.exact_limit_tokens is not None:
            num_rows = min(num_rows, self.support.exact_limit_tokens)
        sequence = self._naming.prompt(_tokens(sequence_ids)[:num_rows], settings, prefilled.keys)
        records = make_records(
            sequence,
            filled.plan,
            filled.cache,
            self.support.require_layout(),
            prefilled.sources,
            self.store.find,
            num_rows,
            filled.correction,
            report.prefill_s / max(1, report.fresh_tokens + report.repaired_tokens),
        )
        return self.store.put_many(records, self.quantization.encoder(settings, filled.plan.num_tokens))

    # --- shadow verification -----------------------------------------------------------------------------------------

    def _checked_logits(self, filled: Filled, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [V] of the last token of a request that was drawn for a check."""
        if filled.logits is not None:
            return filled.logits
        with model_lock(self.model):
            return peek_logits(self.model, input_ids, filled.cache)

    def _prefill_in_full(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits [V] of the last token by stock forwards in blocks; requests come first between two blocks."""
        cache, last = DynamicCache(), input_ids.shape[1] - 1
        stops = [] if self.support.regime(last + 1) else [*range(SHADOW_BLOCK_TOKENS, last, SHADOW_BLOCK_TOKENS), last]
        for stop in stops:
            self._in_flight.wait_until_idle(SHADOW_PATIENCE_S)
            with model_lock(self.model):
                stock_prefill(self.model, input_ids, cache, stop, block_tokens=SHADOW_BLOCK_TOKENS)
        with model_lock(self.model):
            return continuation_logits(self.model, input_ids[:, cache.get_seq_length() :], cache)[-1]

    # --- names and limits --------------------------------------------------------------------------------------------

    def _limits(self, settings: Settings, num_tokens: int, *, trying_moved: bool = True) -> Limits:
        return Limits(
            by_session=settings.share_moved == "session",
            exact_only=settings.exact_only or self.shadow.suspended is not None,
            allow_moved=self.support.allows_moved(num_tokens) and trying_moved,
            min_run_tokens=settings.min_run_tokens,
            min_moved_share=settings.min_moved_share,
            min_prefix_share=settings.min_prefix_share,
            max_variants=settings.max_variants,
            live_suffix_tokens=settings.live_suffix_tokens,
            fresh_tokens=1 + self.support.regime(num_tokens),
        )

    # --- telling -----------------------------------------------------------------------------------------------------

    def _limitations(self) -> list[str]:
        if self.support.refused is not None:
            return [f"nothing is reused for this model: {self.support.refused}"]
        if self.support.moved_refused is not None:
            return [f"only exact prefixes are reused for this model: {self.support.moved_refused}"]
        return []


def _as_tiered(store: Tier | None) -> TieredStore | None:
    return store if store is None or isinstance(store, TieredStore) else TieredStore([store])


def _tokens(input_ids: torch.Tensor) -> Int32Array:
    return input_ids[0].to("cpu", torch.int32).numpy().astype(np.int32)


def _timed(prefilled: Prefilled, ttft_s: float) -> Prefilled:
    """With all time up to the first token that no other step took as that of the forwards."""
    report = prefilled.report
    others_s = report.lookup_s + report.load_s + report.shift_s + report.select_s
    return replace(prefilled, report=replace(report, prefill_s=max(0.0, ttft_s - others_s)))


def _servable(plan: ReusePlan, records: Mapping[bytes, ChunkKV], *, allow_gaps: bool) -> ReusePlan:
    """The plan without segments whose record changed or went since it was found, or does not fit the model."""
    headers = {i: record.header for i, record in records.items()}
    lost = {s.record_id for s in plan if s.record_id is not None and not still_served(s, headers)}
    return without_records(plan, lost, allow_gaps=allow_gaps) if lost else plan


def _replayed(plan: ReusePlan, prompt: Prompt, records: Mapping[bytes, ChunkKV], limits: Limits) -> ReusePlan:
    """An earlier plan, before anything was repaired. Raises `InputError` if it cannot be served any more."""
    reason = unfit_reason(plan, prompt, {i: record.header for i, record in records.items()}, limits)
    if reason is not None:
        raise InputError(f"the plan does not fit: {reason}; score without it plans anew")
    return replace(plan, repaired=ReusePlan.nothing(plan.num_tokens).repaired)
