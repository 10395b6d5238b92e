"""Promises of the service: what is answered, in what order, and that nothing is lost, stuck or shared by mistake."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from families import SUPPORTED_HERE, Family, build, build_fresh, random_ids
from kvboost import InputError, KVBoost, SettingsError
from kvboost.hf.processors import make_processors
from kvboost.serving import Busy, Job, JobFailed, Piece, Sampling
from kvboost.serving.sampling import Sampler
from kvboost.serving.scheduler import QUIET_BLOCKS, Scheduler
from kvboost.types import Kind
from scenario import engine, prompt

GREEDY = Sampling(max_new_tokens=8, temperature=0.0, ignore_eos=True)


def job(ids: torch.Tensor, sampling: Sampling = GREEDY, name: str = "job", **options: Any) -> Job:
    return Job(name, tuple(ids[0].tolist()), sampling, **options)


@contextmanager
def service(kv: KVBoost, **options: Any) -> Iterator[Scheduler]:
    scheduler = Scheduler(kv, **options)
    try:
        yield scheduler
    finally:
        scheduler.close()
        assert not scheduler._worker.is_alive(), "the worker hangs"


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work(), 60)

    return asyncio.run(bounded())


async def answer(scheduler: Scheduler, wanted: Job) -> list[Piece]:
    return [piece async for piece in scheduler.submit(wanted)]


def ids_of(pieces: list[Piece]) -> list[int]:
    return [token.id for piece in pieces for token in piece.tokens]


def served(kv: KVBoost, *jobs: Job, **options: Any) -> list[list[Piece]]:
    """The pieces of all jobs, submitted at once."""

    async def work() -> list[list[Piece]]:
        return await asyncio.gather(*(answer(scheduler, j) for j in jobs))

    with service(kv, **options) as scheduler:
        return run(work)


def generated(model: Any, ids: torch.Tensor, new_tokens: int = 8, **options: Any) -> list[int]:
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens, **options
    )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.smoke
@pytest.mark.parametrize("family", SUPPORTED_HERE, ids=lambda f: f.name)
def test_a_greedy_answer_is_the_one_of_generate(family: Family) -> None:
    model = build(family.name, family.attention[0])
    [pieces] = served(engine(model), job(prompt()))
    assert ids_of(pieces) == generated(model, prompt(), do_sample=False, eos_token_id=-1)
    assert pieces[-1].finish_reason == "length"
    assert [p.finish_reason for p in pieces[:-1]] == [None] * 8


def test_a_report_tells_when_the_first_and_the_last_token_came() -> None:
    began = time.perf_counter()
    [pieces] = served(engine(build("llama")), job(prompt()))
    past_s = time.perf_counter() - began
    report = pieces[-1].report
    assert report is not None
    assert report.ttft_s > 0
    assert report.decode_s > 0
    assert report.ttft_s + report.decode_s < past_s
    out = engine(build("llama")).generate(prompt(), max_new_tokens=8, disable=True)
    assert out.report.decode_s > 0


def test_a_crowd_of_different_prompts_gives_the_answers_of_each_alone() -> None:
    model = build("llama")
    prompts = [random_ids(n, seed=n) for n in (2, 9, 31, 47, 64, 100, 150, 255)]
    jobs = [
        job(ids, Sampling(3 + 5 * i, temperature=0.0, ignore_eos=True), f"job {i}") for i, ids in enumerate(prompts)
    ]
    for slots in (8, 3):
        answers = served(engine(model), *jobs, slots=slots, block_tokens=32)
        for pieces, ids, wanted in zip(answers, prompts, jobs, strict=True):
            expected = generated(model, ids, wanted.sampling.max_new_tokens, do_sample=False, eos_token_id=-1)
            assert ids_of(pieces) == expected


def test_moved_text_in_a_crowd_gives_the_answers_of_the_library() -> None:
    model = build("llama")
    orders = ["2031", "312", "13", "0213"]
    alone, together = (engine(model, fidelity="exact") for _ in range(2))
    expected = []
    for kv in (alone, together):
        kv.generate(prompt("0123"), max_new_tokens=1)
    for order in orders:
        fresh = engine(model)
        fresh.generate(prompt("0123"), max_new_tokens=1)
        out = fresh.generate(prompt(order), max_new_tokens=8, do_sample=False, eos_token_id=-1)
        assert out.report.moved_tokens > 80
        expected.append(out.token_ids)
    answers = served(together, *[job(prompt(o), settings={"fidelity": "balanced"}) for o in orders[:1]])
    assert ids_of(answers[0]) == expected[0]
    assert answers[0][-1].report is not None
    assert answers[0][-1].report.moved_tokens > 80
    for order, wanted in zip(orders[1:], expected[1:], strict=True):
        kv = engine(model)
        kv.generate(prompt("0123"), max_new_tokens=1)
        background = [job(random_ids(30, seed=i), settings={"fidelity": "exact"}) for i in range(5)]
        assert ids_of(served(kv, *background, job(prompt(order)))[-1]) == wanted


def test_what_was_served_is_reused_by_the_next_request() -> None:
    kv = engine(build("llama"))
    [first] = served(kv, job(prompt()))
    follow_up = torch.cat([prompt(), torch.tensor([ids_of(first)]), random_ids(5)], 1)
    [second] = served(kv, job(follow_up))
    report = second[-1].report
    assert report is not None
    assert report.exact_tokens == prompt().shape[1] + 7, "the last token that was drawn has no row"
    assert report.fresh_tokens == 6
    assert second[-1].plan is not None
    assert second[-1].plan.num_tokens == report.prompt_tokens
    assert ids_of(second) == generated(kv.model, follow_up, do_sample=False, eos_token_id=-1)
    assert kv.stats.requests == 2
    assert kv.store.stats().pinned_entries == 0


SAMPLED = Sampling(max_new_tokens=12, temperature=0.7, top_p=0.9, top_k=50, seed=5, ignore_eos=True)


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-9])
def test_a_temperature_next_to_zero_takes_the_most_likely_token(temperature: float) -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    sampler = Sampler(Sampling(4, temperature), [0, 1], [], torch.device("cpu"))
    assert [sampler.draw(logits).id for _ in range(4)] == [1] * 4


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("temperature", [1.0, 5e-324])
def test_a_repetition_penalty_next_to_zero_draws_what_was_said(temperature: float, top_p: float) -> None:
    logits = torch.tensor([1.0, 3.0, 4.0, -1.0])
    sampler = Sampler(Sampling(4, temperature, top_p, repetition_penalty=1e-40), [0, 1], [], torch.device("cpu"))
    assert {sampler.draw(logits).id for _ in range(4)} <= {0, 1}


def test_what_is_no_distribution_is_an_error() -> None:
    sampler = Sampler(Sampling(4, repetition_penalty=1.1), [0, 1], [], torch.device("cpu"))
    with pytest.raises(RuntimeError):
        sampler.draw(torch.tensor([1.0, float("nan"), 2.0]))


def test_a_seed_draws_the_tokens_that_generate_draws_alone_and_in_a_crowd() -> None:
    model = build("llama")
    torch.manual_seed(5)
    expected = generated(model, prompt(), 12, do_sample=True, temperature=0.7, top_p=0.9, top_k=50, eos_token_id=-1)
    others = [job(random_ids(20, seed=i), Sampling(9, seed=i, ignore_eos=True)) for i in range(4)]
    assert ids_of(served(engine(model), job(prompt(), SAMPLED))[0]) == expected
    assert ids_of(served(engine(model), *others, job(prompt(), SAMPLED))[-1]) == expected


def test_two_jobs_without_a_seed_differ() -> None:
    unseeded = Sampling(max_new_tokens=12, temperature=2.0, ignore_eos=True)
    one, two = served(engine(build("llama")), job(prompt(), unseeded), job(prompt(), unseeded))
    assert ids_of(one) != ids_of(two)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.8}, {"min_new_tokens": 9}], ids=str)
def test_penalties_that_transformers_has_are_its_own(options: dict[str, Any]) -> None:
    model = build("llama")
    plain = generated(model, prompt(), 12, do_sample=False, eos_token_id=-1)
    eos = plain[4]
    ids = prompt()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=eos, **options
    )
    kv = engine(build_with_eos(eos))
    [pieces] = served(kv, job(ids, Sampling(12, temperature=0.0, **options)))
    assert ids_of(pieces) == out[0, ids.shape[1] :].tolist()


def build_with_eos(eos: int) -> Any:
    model = build_fresh("llama")
    model.generation_config.eos_token_id = eos
    return model


def test_an_answer_ends_with_the_model_s_own_end_token() -> None:
    plain = generated(build("llama"), prompt(), 12, do_sample=False, eos_token_id=-1)
    end = next(i for i in range(2, 12) if plain[i] not in plain[:i])
    [pieces] = served(engine(build_with_eos(plain[end])), job(prompt(), Sampling(12, temperature=0.0)))
    assert pieces[-1].finish_reason == "eos"
    assert ids_of(pieces) == plain[: end + 1]


def test_presence_frequency_and_bias_change_the_logits_as_documented() -> None:
    history, logits = torch.tensor([[4, 7, 7, 2, 7, 5]]), torch.zeros(1, 9)
    sampling = Sampling(1, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={1: 3.0, 7: -1.0})
    processors = make_processors(
        2,
        torch.device("cpu"),
        eos_ids=(),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
    )
    expected = [0, 3.0, -0.75, 0, 0, -0.75, 0, -1.0 - 0.5 - 2 * 0.25, 0]
    assert processors(history, logits)[0].tolist() == expected, "the prompt, 4 and 7, counts for nothing"


def test_logprobs_are_those_of_the_model_before_any_penalty() -> None:
    model = build("llama")
    asked = Sampling(3, temperature=0.0, logprobs=4, logit_bias={11: 100.0}, ignore_eos=True)
    [pieces] = served(engine(model), job(prompt(), asked))
    first = pieces[0].tokens[0]
    with torch.no_grad():
        expected = model(prompt()).logits[0, -1].log_softmax(-1)
    assert first.id == 11
    assert first.logprob == pytest.approx(expected[11].item(), abs=1e-4)
    assert [i for i, _, _ in first.top] == expected.topk(4).indices.tolist()
    assert [p for _, _, p in first.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-4)


class Letters:
    """A tokenizer of one id per character."""

    all_special_ids = ()

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return SimpleNamespace(input_ids=[ord(c) - 32 for c in text])

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(chr(32 + i) for i in ids)


def test_a_stop_string_cuts_the_text_and_the_rows_that_are_kept() -> None:
    kv = engine(build("llama"))
    kv.tokenizer = Letters()
    plain = generated(kv.model, prompt(), 12, do_sample=False, eos_token_id=-1)
    text = kv.tokenizer.decode(plain)
    stop = text[5:8]
    for keep, kept in ((False, text.index(stop)), (True, text.index(stop) + 3)):
        kv.store.delete()
        asked = Sampling(12, temperature=0.0, stop=("never", stop), keep_stop=keep, ignore_eos=True)
        [pieces] = served(kv, job(prompt(), asked))
        assert "".join(p.text for p in pieces) == text[:kept]
        assert pieces[-1].finish_reason == "stop"
        assert len(ids_of(pieces)) == text.index(stop) + 3
        again = torch.tensor([[*prompt()[0].tolist(), *plain]])
        assert kv.plan(again).count(Kind.EXACT) == prompt().shape[1] + min(kept, text.index(stop) + 2)


def test_a_cancelled_job_frees_its_slot_at_once() -> None:
    async def work(scheduler: Scheduler) -> None:
        long = scheduler.submit(job(prompt(), Sampling(200, temperature=0.0, ignore_eos=True)))
        await anext(long)
        waiting = scheduler.submit(job(prompt("31")))
        assert scheduler.stats().queued == 1
        await long.aclose()
        assert [p async for p in long] == []
        assert len([p async for p in waiting]) == 9
        assert scheduler.stats().finished == {"cancelled": 1, "length": 1}

    kv = engine(build("llama"))
    with service(kv, slots=1) as scheduler:
        run(lambda: work(scheduler))
    assert kv.plan(prompt()).count(Kind.EXACT) == prompt().shape[1] - 1, "what was computed is kept"


def test_jobs_can_be_cancelled_while_they_wait_and_between_blocks_of_their_prompt() -> None:
    async def work(scheduler: Scheduler) -> None:
        busy = scheduler.submit(job(prompt(), Sampling(300, temperature=0.0, ignore_eos=True)))
        await anext(busy)
        long = scheduler.submit(job(random_ids(400)))
        while not scheduler.stats().prefilling:
            await anext(busy)
        queued = scheduler.submit(job(prompt("12")))
        assert scheduler.stats().queued == 1
        del queued  # dropping a stream is closing it
        await long.aclose()
        while scheduler.stats().prefilling or scheduler.stats().queued:
            await anext(busy)
        assert scheduler.stats().finished == {"cancelled": 2}
        await busy.aclose()

    with service(engine(build("llama")), slots=2, block_tokens=4) as scheduler:
        run(lambda: work(scheduler))


def test_a_request_that_is_given_up_stores_what_was_computed_and_counts_nothing() -> None:
    kv = engine(build("llama"))
    for blocks, known in ((0, 0), (3, 48)):
        opened = kv.open_request(prompt())
        for _ in range(blocks):
            assert opened.extend(16) is None
        kv.close_request(opened, prompt()[0].tolist(), None)
        assert kv.plan(prompt()).count(Kind.EXACT) == known
    assert kv.stats.requests == 0
    assert kv._in_flight._running == 0


def test_a_deadline_ends_a_job_that_waits_and_one_that_runs() -> None:
    async def work(scheduler: Scheduler) -> None:
        asked = Sampling(400, temperature=0.0, ignore_eos=True)
        running = scheduler.submit(job(random_ids(20), asked, deadline_s=0.3))
        waiting = scheduler.submit(job(random_ids(20), asked, deadline_s=0.0))
        pieces = [p async for p in waiting]
        assert [p.finish_reason for p in pieces] == ["deadline"]
        pieces = [p async for p in running]
        assert pieces[-1].finish_reason == "deadline"
        assert len(ids_of(pieces)) < 400

    model = build_fresh("llama")
    model.register_forward_pre_hook(lambda *args: time.sleep(0.005))
    with service(engine(model), slots=1) as scheduler:
        run(lambda: work(scheduler))


def test_a_full_queue_is_busy_but_not_for_a_tenant_that_has_nothing_waiting() -> None:
    async def work(scheduler: Scheduler) -> None:
        busy = scheduler.submit(job(prompt(), Sampling(200, temperature=0.0, ignore_eos=True), tenant="a"))
        await anext(busy)
        streams = [scheduler.submit(job(prompt("1"), tenant="a")) for _ in range(3)]
        with pytest.raises(Busy, match="3 requests are waiting") as refused:
            scheduler.submit(job(prompt("1"), tenant="a"))
        assert 1 <= refused.value.retry_after_s <= 60
        streams.append(scheduler.submit(job(prompt("2"), tenant="b")))
        with pytest.raises(Busy):
            scheduler.submit(job(prompt("2"), tenant="b"))
        await busy.aclose()
        for stream in streams:
            assert [p async for p in stream][-1].finish_reason == "length"
        assert scheduler.stats().finished == {"cancelled": 1, "length": 4, "refused": 2}

    with service(engine(build("llama")), slots=1, queue=3) as scheduler:
        run(lambda: work(scheduler))


def test_a_tenant_with_many_jobs_does_not_starve_another() -> None:
    async def work(scheduler: Scheduler) -> list[str]:
        ended: list[str] = []

        async def one(tenant: str) -> None:
            await answer(scheduler, job(random_ids(20), Sampling(3, temperature=0.0, ignore_eos=True), tenant=tenant))
            ended.append(tenant)

        await asyncio.gather(*(one("many") for _ in range(50)), *(one("few") for _ in range(3)))
        return ended

    with service(engine(build("llama")), slots=2) as scheduler:
        ended = run(lambda: work(scheduler))
    assert [i for i, tenant in enumerate(ended) if tenant == "few"][-1] < 8


def test_a_long_prompt_does_not_stop_the_others() -> None:
    async def work(scheduler: Scheduler) -> int:
        talking = scheduler.submit(job(random_ids(20), Sampling(400, temperature=0.0, ignore_eos=True)))
        await anext(talking)
        long = asyncio.create_task(answer(scheduler, job(random_ids(400, seed=3), Sampling(1, temperature=0.0))))
        steps = 0
        while not long.done():
            await anext(talking)
            steps += 1
        return steps

    with service(engine(build("llama")), block_tokens=8) as scheduler:
        assert run(lambda: work(scheduler)) >= 400 // 8


def test_prompts_are_computed_in_larger_blocks_while_no_answer_is_held_up() -> None:
    model = build_fresh("llama")
    sizes: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    quiet = 16 * QUIET_BLOCKS

    async def work(scheduler: Scheduler) -> None:
        for size, blocks in ((quiet + 32, [quiet + 32]), (quiet + 33, [quiet, 33]), (3 * quiet, [quiet] * 3)):
            sizes.clear()
            await answer(scheduler, job(random_ids(size, seed=size), Sampling(1)))
            assert sizes == blocks, "a small rest is computed with the last block"
        other = scheduler.submit(job(random_ids(9), Sampling(400, temperature=0.0, ignore_eos=True)))
        await anext(other)
        sizes.clear()
        await answer(scheduler, job(random_ids(100, seed=2), Sampling(1)))
        assert [n for n in sizes if n > 1] == [*[16] * 5, 20], "the other one waits for no more than a block"
        await other.aclose()

    with service(engine(model), block_tokens=16) as scheduler:
        run(lambda: work(scheduler))


def test_drain_waits_for_what_was_accepted_and_takes_no_more() -> None:
    async def work(scheduler: Scheduler) -> None:
        streams = [scheduler.submit(job(prompt(o))) for o in ("0", "1", "2")]
        draining = asyncio.create_task(scheduler.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="shutting down"):
            scheduler.submit(job(prompt()))
        assert await draining
        for stream in streams:
            assert [p async for p in stream][-1].finish_reason == "length"

    with service(engine(build("llama")), slots=1) as scheduler:
        run(lambda: work(scheduler))


def test_a_drain_that_times_out_ends_the_rest_with_a_clear_error() -> None:
    async def work(scheduler: Scheduler) -> None:
        streams = [scheduler.submit(job(prompt(), Sampling(250, temperature=0.0, ignore_eos=True))) for _ in range(2)]
        await anext(streams[0])
        assert not await scheduler.drain(0.0)
        for stream in streams:
            with pytest.raises(JobFailed, match="shutting down"):
                await drained(stream)

    kv = engine(build("llama"))
    with service(kv, slots=1) as scheduler:
        run(lambda: work(scheduler))
    assert kv._in_flight._running == 0


async def drained(stream: Any) -> None:
    async for _ in stream:
        pass


def test_a_job_that_fails_ends_alone() -> None:
    async def work(scheduler: Scheduler) -> None:
        good = [asyncio.create_task(answer(scheduler, job(prompt(o)))) for o in ("01", "32")]
        bad = Sampling(8, temperature=1.0, logit_bias={5: float("nan")}, ignore_eos=True)
        with pytest.raises(JobFailed, match="the model failed: RuntimeError"):
            await answer(scheduler, job(prompt("2"), bad))
        for pieces in await asyncio.gather(*good):
            assert len(ids_of(pieces)) == 8
        assert scheduler.stats().finished == {"failed": 1, "length": 2}

    kv = engine(build("llama"))
    with service(kv) as scheduler:
        run(lambda: work(scheduler))
    assert kv._in_flight._running == 0


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (job(torch.tensor([[]]).long()), "the prompt is empty"),
        (job(torch.tensor([[5, 9999]])), "outside of the model's vocabulary"),
        (job(random_ids(600)), "the model takes fewer than 512"),
        (job(prompt(), Sampling(0)), "max_new_tokens is 0"),
        (job(prompt(), Sampling(3, logit_bias={700: 1.0})), "logit_bias names token 700"),
        (job(prompt(), Sampling(3, stop=("x",))), "need a tokenizer"),
        (job(prompt(), settings={"fidelity": "perfect"}), "fidelity"),
    ],
    ids=range(7),
)
def test_what_cannot_be_honoured_is_refused_at_once(wanted: Job, message: str) -> None:
    async def work(scheduler: Scheduler) -> None:
        with pytest.raises((InputError, SettingsError), match=message):
            scheduler.submit(wanted)

    with service(engine(build("llama"))) as scheduler:
        run(lambda: work(scheduler))


def test_an_answer_ends_where_the_model_has_no_more_positions() -> None:
    [pieces] = served(engine(build("llama")), job(random_ids(500), Sampling(100, temperature=0.0, ignore_eos=True)))
    assert len(ids_of(pieces)) == 12
    assert pieces[-1].finish_reason == "length"


def test_a_recurrent_model_is_served_by_its_own_generate_and_can_be_cancelled() -> None:
    async def work(scheduler: Scheduler) -> list[Piece]:
        long = scheduler.submit(job(prompt(), Sampling(300, temperature=0.0, ignore_eos=True)))
        await anext(long)
        other = await answer(scheduler, job(prompt("1")))
        await long.aclose()
        return other

    kv = engine(build("mamba", "eager"))
    with service(kv) as scheduler:
        pieces = run(lambda: work(scheduler))
    assert ids_of(pieces) == generated(kv.model, prompt("1"), do_sample=False, eos_token_id=-1)
    assert pieces[-1].report is not None
    assert "key/value cache" in (pieces[-1].report.fallback or "")
    assert not [t for t in threading.enumerate() if t.name == "kvboost-generate"]


@pytest.mark.parametrize("switch", [{"disable": True}, {"mode": "off"}])
def test_with_the_cache_switched_off_requests_are_still_served(switch: dict[str, Any]) -> None:
    kv = engine(build("llama"))
    kv.generate(prompt(), max_new_tokens=1)
    [pieces] = served(kv, job(prompt(), settings=switch))
    assert ids_of(pieces) == generated(kv.model, prompt(), do_sample=False, eos_token_id=-1)
    report = pieces[-1].report
    assert report is not None
    assert (report.fallback, report.fresh_tokens) == ("switched off", prompt().shape[1])
    assert kv.stats.fallbacks["switched off"] == 1


def test_the_kill_switch_leaves_requests_in_flight_unharmed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scheduler: Scheduler) -> list[Piece]:
        stream = scheduler.submit(job(prompt()))
        pieces = [await anext(stream)]
        monkeypatch.setenv("KVBOOST_DISABLE", "1")
        return pieces + [p async for p in stream]

    kv = engine(build("llama"))
    with service(kv) as scheduler:
        assert ids_of(run(lambda: work(scheduler))) == generated(kv.model, prompt(), do_sample=False, eos_token_id=-1)


def test_a_cache_that_fails_costs_nobody_an_answer() -> None:
    kv = engine(build("llama"))
    kv.store.find = lambda names: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    [pieces] = served(kv, job(prompt()))
    assert ids_of(pieces) == generated(kv.model, prompt(), do_sample=False, eos_token_id=-1)
    assert pieces[-1].report is not None
    assert pieces[-1].report.fallback == "the cache failed; see the log"


def test_out_of_memory_halves_the_cache_and_the_prompt_is_computed() -> None:
    model, failures = build_fresh("llama"), 1
    kv = engine(model)
    kv.generate(prompt("0"), max_new_tokens=1)
    limit = kv.store.stats().bytes_limit

    def exhaust(*args: Any) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise torch.OutOfMemoryError("no memory left")

    with service(kv) as scheduler:
        model.model.layers[1].register_forward_pre_hook(exhaust)
        pieces = run(lambda: answer(scheduler, job(prompt())))
    assert ids_of(pieces) == generated(model, prompt(), do_sample=False, eos_token_id=-1)
    assert kv.store.stats().bytes_limit <= limit // 2


def test_two_services_and_a_library_caller_share_one_model() -> None:
    model = build("llama")
    one, two = engine(model), engine(model)
    results: list[list[int]] = []

    def call() -> None:
        options = {"max_new_tokens": 8, "fidelity": "exact", "do_sample": False}
        results.extend(one.generate(prompt(order), **options).token_ids for order in ("0123", "3210", "120"))

    async def work(first: Scheduler, second: Scheduler) -> None:
        jobs = [job(prompt(o), settings={"fidelity": "exact"}) for o in ("0123", "3210", "120")]
        wanted = [generated(model, prompt(o), do_sample=False, eos_token_id=-1) for o in ("0123", "3210", "120")]
        for _ in range(3):
            both = await asyncio.gather(*(answer(s, j) for s in (first, second) for j in jobs))
            assert [ids_of(p) for p in both] == wanted + wanted

    thread = threading.Thread(target=call)
    with service(one) as first, service(two) as second:
        thread.start()
        run(lambda: work(first, second))
    thread.join()
    assert len(results) == 3


def test_sampled_requests_are_checked_against_a_full_prefill() -> None:
    kv = engine(build("llama"), shadow_share=1.0)
    kv.generate(prompt("0123"), max_new_tokens=1)
    for order in ("2031", "2031"):  # moved, then continued
        served(kv, job(prompt(order)))
    kv.shadow.close()
    assert kv.shadow.stats().checks + kv.shadow.stats().dropped == 2


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(2, 90), st.integers(1, 12), st.integers(0, 15)),
        min_size=1,
        max_size=14,
    )
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_arrivals_and_cancellations_leak_no_slot(traffic: list[tuple[str, int, int, int]]) -> None:
    kv = shared_engine()

    async def one(scheduler: Scheduler, tenant: str, size: int, new: int, hear: int) -> None:
        await asyncio.sleep(0.001 * (size % 7))
        try:
            stream = scheduler.submit(
                job(random_ids(size, seed=size), Sampling(new, temperature=0.0, ignore_eos=True), tenant=tenant)
            )
        except Busy:
            return
        heard = 0
        async for piece in stream:
            heard += len(piece.tokens)
            if heard > hear:  # a client that leaves
                await stream.aclose()
        assert heard == min(new, hear + 1)

    async def work(scheduler: Scheduler) -> None:
        await asyncio.gather(*(one(scheduler, *t) for t in traffic))
        assert await scheduler.drain(30)
        stats = scheduler.stats()
        assert (stats.queued, stats.prefilling, stats.decoding) == (0, 0, 0)
        assert sum(stats.finished.values()) == len(traffic)

    with service(kv, slots=3, queue=4, block_tokens=16) as scheduler:
        run(lambda: work(scheduler))
    assert kv._in_flight._running == 0
    assert kv.store.stats().pinned_entries == 0
    kv.store.tiers[0].check_integrity()  # type: ignore[attr-defined]


@functools.cache
def shared_engine() -> KVBoost:
    return engine(build("llama"))
