"""Promises over several requests: nothing drifts, nothing inexact is called exact, nothing stale is served."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from families import build, build_fresh, random_ids
from kvboost import KVBoost
from kvboost.types import Kind, Lineage
from scenario import SYSTEM, engine, greedy, join, logits, plain_logits, prompt, relative_error

pytestmark = pytest.mark.smoke


@pytest.fixture
def model() -> Any:
    return build("llama")


def test_an_identical_request_never_drifts(model: Any) -> None:
    kv = engine(model)
    truth = plain_logits(model, prompt())
    outs = [greedy(kv.generate, prompt()) for _ in range(10)]
    for out in outs:
        assert relative_error(logits(out.output), truth) <= 1e-5
    assert [o.report.exact_tokens for o in outs[1:]] == [prompt().shape[1] - 1] * 9
    assert len({tuple(o.token_ids) for o in outs}) == 1


def test_an_identical_moved_request_is_paid_once_and_then_served_as_it_was(model: Any) -> None:
    kv = engine(model)
    greedy(kv.generate, prompt("0123"))
    first, *later = [greedy(kv.generate, prompt("2031")) for _ in range(4)]
    assert first.report.moved_tokens > 100
    assert first.report.repaired_tokens > 0
    for out in later:
        assert out.report.moved_tokens == out.report.repaired_tokens == 0
        assert out.report.continued_tokens > 100
        assert out.token_ids == first.token_ids
        assert relative_error(logits(out.output), logits(first.output)) <= 1e-5


def test_a_chat_over_a_moved_document_pays_the_repair_once(model: Any) -> None:
    kv = engine(model)
    greedy(kv.generate, prompt("0123"))
    history = prompt("3102")
    kinds = []
    for turn in range(10):
        out = greedy(kv.generate, history)
        kinds.append(out.report)
        history = join(history, torch.tensor([out.token_ids]), random_ids(12, seed=100 + turn))
    assert kinds[0].moved_tokens > 100
    assert all(r.moved_tokens == r.repaired_tokens == 0 for r in kinds[1:])
    assert all(r.fresh_tokens <= 13 for r in kinds[1:]), [r.fresh_tokens for r in kinds]
    assert all(r.exact_tokens == 40 for r in kinds), "only the system prompt is exact behind a moved document"


def test_a_chat_whose_history_is_exact_stays_exact_and_equals_plain_generation(model: Any) -> None:
    kv = engine(model)
    history = prompt()
    for turn in range(10):
        out = greedy(kv.generate, history)
        assert relative_error(logits(out.output), plain_logits(model, history)) <= 1e-5
        if turn:
            assert out.report.fresh_tokens <= 13
            assert out.report.exact_tokens == history.shape[1] - out.report.fresh_tokens
        history = join(history, torch.tensor([out.token_ids]), random_ids(12, seed=200 + turn))


def test_the_steps_of_a_report_add_up_to_the_first_token(model: Any) -> None:
    kv = engine(model)
    plain = kv.generate(prompt(), max_new_tokens=1, do_sample=False, disable=True).report
    reports = [greedy(kv.generate, prompt(order)).report for order in ("0123", "0123", "3012")]
    assert reports[2].moved_tokens > 60
    for r in (plain, *reports):
        assert r.prefill_s > 0
        steps_s = r.lookup_s + r.load_s + r.shift_s + r.select_s + r.prefill_s
        assert steps_s == pytest.approx(r.ttft_s)


def test_nothing_computed_behind_moved_rows_is_ever_exact(model: Any) -> None:
    kv = engine(model)
    greedy(kv.generate, prompt("0123"))
    moved = prompt("3012")
    plan = greedy(kv.generate, moved).plan
    first_moved = next(s.span.start for s in plan if s.kind is Kind.MOVED)
    for segment in kv.plan(moved):
        if segment.span.start >= first_moved:
            assert segment.kind is not Kind.EXACT
    report = greedy(kv.generate, moved, fidelity="exact").report
    assert report.exact_tokens == first_moved
    assert report.moved_tokens == report.continued_tokens == 0


def test_a_true_computation_replaces_an_approximate_one(model: Any) -> None:
    kv = engine(model)
    greedy(kv.generate, prompt("0123"))
    moved = prompt("3012")
    greedy(kv.generate, moved)
    assert greedy(kv.generate, moved).report.continued_tokens > 100
    greedy(kv.generate, moved, fidelity="exact")
    out = greedy(kv.generate, moved)
    assert out.report.exact_tokens == moved.shape[1] - 1
    assert relative_error(logits(out.output), plain_logits(model, moved)) <= 1e-5


def test_rows_captured_at_the_first_positions_are_never_moved(model: Any) -> None:
    kv = engine(model)
    text = random_ids(150, seed=9)
    greedy(kv.generate, text, 1)
    plan = kv.plan(join(random_ids(60, seed=8), text))
    moved = [s for s in plan if s.kind is Kind.MOVED]
    assert sum(len(s.span) for s in moved) == 150 - 32 - 16, "neither the sink nor the live suffix"
    assert min(s.source_position for s in moved) == 32
    plan = kv.plan(text[:, 20:])
    assert min(s.span.start for s in plan if s.kind is Kind.MOVED) == 32


def test_the_same_document_twice_in_one_prompt_and_two_gaps(model: Any) -> None:
    kv = engine(model, recompute_head_tokens=10_000)
    greedy(kv.generate, prompt("0123"), 1)
    gaps = [random_ids(11, seed=i) for i in (31, 32)]
    twice = join(prompt("1", question=gaps[0]), prompt("12", head=gaps[1]))
    out = greedy(kv.generate, twice)
    assert out.report.moved_tokens > 110
    assert relative_error(logits(out.output), plain_logits(model, twice)) <= 1e-4


def test_first_and_third_chunk_cached_and_the_second_new(model: Any) -> None:
    kv = engine(model, recompute_head_tokens=10_000)
    greedy(kv.generate, prompt("013"), 1)
    mixed = prompt("0213")
    out = greedy(kv.generate, mixed)
    assert [s.kind for s in out.plan if len(s.span) > 30].count(Kind.FRESH) == 1
    assert relative_error(logits(out.output), plain_logits(model, mixed)) <= 1e-4


def test_a_hit_on_the_whole_prompt_computes_the_last_token(model: Any) -> None:
    kv = engine(model)
    out = greedy(kv.generate, prompt(), 20)
    covered = join(prompt(), torch.tensor([out.token_ids[:-1]]))
    for cut in (covered, covered[:, :-7], prompt()[:, :50], SYSTEM):
        again = greedy(kv.generate, cut, 3)
        assert again.report.exact_tokens == cut.shape[1] - 1
        assert again.report.fresh_tokens == 1
        assert relative_error(logits(again.output), plain_logits(model, cut, 3)) <= 1e-5


def test_a_system_prompt_shorter_than_a_chunk_is_reused(model: Any) -> None:
    kv = engine(model, chunk_min_tokens=32, chunk_avg_tokens=128, chunk_max_tokens=256)
    short = random_ids(7, seed=3)
    greedy(kv.generate, join(short, random_ids(90, seed=4)), 1)
    out = greedy(kv.generate, join(short, random_ids(90, seed=5)), 1)
    assert out.report.exact_tokens == 7


def test_a_thinking_block_stripped_from_the_history_costs_only_itself(model: Any) -> None:
    kv = engine(model, recompute_head_tokens=10_000)
    question, thought, answer = (random_ids(n, seed=40 + n) for n in (15, 60, 70))
    greedy(kv.generate, join(prompt(), thought, answer, question), 1)
    stripped = join(prompt(), answer, question, random_ids(20, seed=99))
    out = greedy(kv.generate, stripped)
    assert out.report.exact_tokens == prompt().shape[1]
    assert out.report.moved_tokens >= 70 + 15 - 1
    assert relative_error(logits(out.output), plain_logits(model, stripped)) <= 1e-4


def test_a_reply_that_is_tokenized_differently_next_time_is_reused_around_the_difference(model: Any) -> None:
    kv = engine(model, recompute_head_tokens=10_000)
    out = greedy(kv.generate, prompt(), 60)
    again = list(out.token_ids)
    again[20:22] = [7]  # two tokens became one
    history = join(prompt(), torch.tensor([again]), random_ids(20, seed=98))
    out = greedy(kv.generate, history)
    assert out.report.exact_tokens == prompt().shape[1] + 20
    assert out.report.moved_tokens >= 30
    assert relative_error(logits(out.output), plain_logits(model, history)) <= 1e-4


def test_a_model_that_was_cast_or_whose_attention_was_changed_is_not_served_with_old_measurements() -> None:
    model = build_fresh("llama")
    kv = engine(model)
    greedy(kv.generate, prompt(), 1)
    model.set_attn_implementation("eager")
    assert "attention" in (greedy(kv.generate, prompt(), 1).report.fallback or "")
    model.set_attn_implementation("sdpa")
    assert greedy(kv.generate, prompt(), 1).report.fresh_tokens == 1
    model.to(torch.bfloat16)
    out = greedy(kv.generate, prompt(), 3)
    assert "make a new engine" in (out.report.fallback or "")
    assert relative_error(logits(out.output), plain_logits(model, prompt(), 3)) == 0


def test_namespaces_dtypes_and_models_never_share(model: Any) -> None:
    kv = engine(model)
    greedy(kv.generate, prompt(), 1, cache_salt="a")
    assert greedy(kv.generate, prompt(), 1, cache_salt="b").report.fresh_tokens == prompt().shape[1]
    assert greedy(kv.generate, prompt(), 1, cache_salt="a").report.fresh_tokens == 1
    others = [build("llama", dtype=torch.bfloat16), build("llama", "eager"), build("qwen2"), _retrained()]
    for other in others:
        assert engine(other, store=kv.store).plan(prompt(), cache_salt="a").count(Kind.FRESH) == prompt().shape[1]


def test_the_same_model_loaded_again_shares(model: Any) -> None:
    kv = engine(model)
    greedy(kv.generate, prompt(), 1)
    twin = engine(build_fresh("llama"), store=kv.store)
    assert twin.plan(prompt()).count(Kind.EXACT) == prompt().shape[1] - 1


def _retrained() -> Any:
    other = build_fresh("llama")
    other.model.layers[1].mlp.up_proj.weight.data.add_(1e-3)
    return other


def test_two_adapters_of_one_model_never_share() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(build_fresh("llama"), config, "one")
    adapted.add_adapter("two", config)
    base = adapted.base_model.model
    kv = engine(base)
    for name in ("one", "two"):
        adapted.set_adapter(name)
        assert greedy(kv.generate, prompt(), 1).report.fresh_tokens == prompt().shape[1]
        again = greedy(kv.generate, prompt(), 4)
        assert again.report.fresh_tokens == 1
        assert relative_error(logits(again.output), plain_logits(base, prompt(), 4)) <= 1e-5
    with adapted.disable_adapter():
        assert greedy(kv.generate, prompt(), 1).report.fresh_tokens == prompt().shape[1]


def test_weights_changed_in_place_serve_nothing_stale() -> None:
    model = build_fresh("llama")
    kv = engine(model)
    greedy(kv.generate, prompt())
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)  # torch counts this: noticed at once
    out = greedy(kv.generate, prompt())
    assert out.report.fresh_tokens == prompt().shape[1]
    assert relative_error(logits(out.output), plain_logits(model, prompt())) <= 1e-5


def test_invalidate_forgets_what_a_silent_change_made_stale() -> None:
    model = build_fresh("llama")
    kv = engine(model)
    greedy(kv.generate, prompt())
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)  # torch does not count a write through .data
    assert kv.invalidate() > 0
    out = greedy(kv.generate, prompt())
    assert out.report.fresh_tokens == prompt().shape[1]
    assert relative_error(logits(out.output), plain_logits(model, prompt())) <= 1e-5


def test_observe_reports_what_would_have_hit_and_serves_nothing(model: Any) -> None:
    kv = engine(model, mode="observe")
    greedy(kv.generate, prompt("0123"))
    out = greedy(kv.generate, prompt("2031"))
    assert out.report.moved_tokens > 100
    assert out.report.fallback == "observing only"
    assert all(s.kind is Kind.FRESH for s in out.plan)
    assert relative_error(logits(out.output), plain_logits(model, prompt("2031"))) <= 1e-5
    assert all(h.lineage is Lineage.BIT_EXACT for h in _headers(kv))


def _headers(kv: KVBoost) -> list[Any]:
    return [r.header for r in kv.store.tiers[0]._records.values()]  # type: ignore[attr-defined]


def test_better_matching_context_wins_between_variants(model: Any) -> None:
    kv = engine(model, recompute_strategy="none")
    for order in ("01", "21", "31"):
        greedy(kv.generate, prompt(order, head=join(SYSTEM, random_ids(5, seed=int(order)))), 1, fidelity="exact")
    out = greedy(kv.generate, prompt("31", head=random_ids(44, seed=6)), 1)
    runs = [s for s in out.plan if s.kind is Kind.MOVED]
    assert len({s.shift for s in runs}) == 1, "both documents come from the prompt in which they were neighbours"
    assert sum(s.joined for s in runs) == len(runs) - 1


def test_long_prompts_are_prefilled_in_blocks_with_the_same_answer(model: Any) -> None:
    kv = engine(model, prefill_block_tokens=50)
    for ids in (prompt(), join(prompt(), random_ids(100, seed=4))):
        out = greedy(kv.generate, ids)
        assert relative_error(logits(out.output), plain_logits(model, ids)) <= 1e-5


def test_text_is_cut_where_the_caller_says(model: Any) -> None:
    kv = engine(model)
    boundaries = (53, 101, 140)
    greedy(kv.generate, prompt(), 1, chunk_boundaries=boundaries)
    assert set(boundaries) <= {h.position for h in _headers(kv)}


def test_an_evicted_source_makes_a_linked_record_a_miss(model: Any) -> None:
    kv = engine(model)
    greedy(kv.generate, prompt("0123"))
    moved = prompt("2031")
    greedy(kv.generate, moved)
    sources = {h.source.record_id for h in _headers(kv) if h.source is not None}
    kv.store.delete(sorted(sources))
    out = greedy(kv.generate, moved)
    assert out.report.fallback is None
    assert relative_error(logits(out.output), plain_logits(model, moved)) <= 1e-5


def test_a_link_whose_source_came_back_as_a_link_is_a_miss(model: Any) -> None:
    for heads in (0, 1, 8):
        kv = engine(model, recompute_head_tokens=heads)
        document, other = random_ids(20, seed=61), random_ids(45, seed=62)
        first, second = join(SYSTEM, document, other), join(SYSTEM, other, document, random_ids(30, seed=63))
        greedy(kv.generate, first, 1)
        greedy(kv.generate, second, 1)  # links to the records of `first`
        own = [h.record_id for h in _headers(kv) if h.source is None and h.position < 105]
        greedy(
            kv.generate, join(random_ids(41, seed=64), document, other, random_ids(30, seed=65)), 1, fidelity="exact"
        )
        kv.store.delete(own)
        greedy(kv.generate, first, 1)  # now stored as links to the third prompt
        out = greedy(kv.generate, second, 3, recompute_head_tokens=10_000)
        assert out.report.fallback is None
        links = {h.record_id: h for h in _headers(kv) if h.source is not None}
        for segment in out.plan:
            link = links.get(segment.record_id or b"")
            assert link is None or link.source.record_id not in links


def test_exact_is_never_served_from_a_record_that_was_replaced_meanwhile(model: Any) -> None:
    kv = engine(model)
    greedy(kv.generate, prompt("0123"), 1)
    find = kv.store.find

    def find_then_degrade(names: Any) -> Any:
        found = find(names)
        for record_id, record in list(kv.store.tiers[0]._records.items()):  # type: ignore[attr-defined]
            worse = replace(record.header, lineage=Lineage.APPROXIMATE)
            kv.store.tiers[0]._records[record_id] = replace(record, header=worse)  # type: ignore[attr-defined]
        return found

    kv.store.find = find_then_degrade  # type: ignore[method-assign]
    out = greedy(kv.generate, prompt("0123"), 3, fidelity="exact")
    assert out.report.exact_tokens == 0
    assert relative_error(logits(out.output), plain_logits(model, prompt("0123"), 3)) <= 1e-5


def test_many_conversations_behind_one_system_prompt_all_stay_exact(model: Any) -> None:
    kv = engine(model)
    turns = [join(SYSTEM, random_ids(40, seed=1000 + i)) for i in range(90)]
    for turn in turns:
        greedy(kv.generate, turn, 1)
    assert min(kv.plan(join(turn, random_ids(9))).count(Kind.EXACT) for turn in turns) >= 80 - 8


def test_a_buffer_that_changes_answers_is_part_of_the_identity() -> None:
    model = build_fresh("deepseek-v3")
    kv = engine(model)
    greedy(kv.generate, prompt(), 1)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.add_(torch.linspace(-1, 1, len(buffer)))
    assert greedy(kv.generate, prompt(), 1).report.fresh_tokens == prompt().shape[1]


def test_one_row_written_in_place_in_a_large_embedding_is_noticed() -> None:
    model = build_fresh("llama")
    kv = engine(model)
    greedy(kv.generate, prompt(), 1)
    with torch.no_grad():
        model.get_input_embeddings().weight[int(prompt()[0, 45]), 3] += 1.0
    out = greedy(kv.generate, prompt(), 3)
    assert out.report.fresh_tokens == prompt().shape[1]
    assert relative_error(logits(out.output), plain_logits(model, prompt(), 3)) <= 1e-5


@pytest.mark.parametrize("tuner", ["IA3Config", "LoraConfig"])
def test_an_adapter_that_is_switched_off_leaves_nothing_behind(tuner: str) -> None:
    peft = pytest.importorskip("peft")
    extra = {"feedforward_modules": []} if tuner == "IA3Config" else {}
    config = getattr(peft, tuner)(target_modules=["k_proj", "v_proj"], **extra)
    adapted = peft.get_peft_model(build_fresh("llama"), config)
    kv = engine(adapted.base_model.model)
    greedy(kv.generate, prompt(), 1)
    with adapted.disable_adapter():
        assert greedy(kv.generate, prompt(), 1).report.fresh_tokens == prompt().shape[1]


class Letters:
    """A tokenizer of one id per character."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return SimpleNamespace(input_ids=[5 + ord(c) % 90 for c in text])

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        return "".join(chr(32 + i) for i in ids)


def test_a_text_that_is_warmed_with_pin_is_never_evicted(model: Any) -> None:
    kv = engine(model, cache_bytes=400_000)
    kv.tokenizer = Letters()
    assert kv.warm("a document that is kept. " * 6, "What stands before it: " * 2, pin=True).written_tokens > 100
    pinned = kv.store.stats().pinned_entries
    assert pinned > 2
    for i in range(12):
        greedy(kv.generate, random_ids(200, seed=100 + i), 1)
    assert kv.store.stats().evictions, "the budget was never felt"
    assert kv.store.stats().pinned_entries == pinned
    assert kv.warm("a document that is kept. " * 6, "What stands before it: " * 2).exact_tokens > 100


def test_a_broken_store_falls_back_to_computing_and_is_counted(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    kv = engine(model)
    greedy(kv.generate, prompt())
    kv.store.find = lambda names: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    out = greedy(kv.generate, prompt())
    assert out.report.fallback == "the cache failed; see the log"
    assert relative_error(logits(out.output), plain_logits(model, prompt())) <= 1e-5
    assert kv.stats.fallbacks["the cache failed; see the log"] == 1
    assert "ZeroDivisionError" in caplog.text


def test_eight_threads_get_right_answers_within_the_byte_budget(model: Any) -> None:
    budget = 900_000
    kv = engine(model, cache_bytes=budget, recompute_head_tokens=10_000)
    orders = ["0123", "3210", "2031", "12", "0312", "3012", "21", "1302"]
    truth = {order: plain_logits(model, prompt(order), 3) for order in orders}
    failures: list[str] = []
    over = threading.Event()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            if kv.store.stats().bytes_used > budget:
                over.set()

    def work(offset: int) -> None:
        for i in range(8):
            order = orders[(i + offset) % 8]
            out = greedy(kv.generate, prompt(order), 3)
            if out.report.fallback or relative_error(logits(out.output), truth[order]) > 1e-4:
                failures.append(f"{order}: {out.report}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    watcher = threading.Thread(target=watch)
    watcher.start()
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    stop.set()
    watcher.join()
    assert not any(t.is_alive() for t in threads), "deadlock"
    assert not failures
    assert not over.is_set()
    kv.store.tiers[0].check_integrity()
    assert kv.store.stats().evictions, "the budget was never felt"
    assert kv.store.stats().pinned_entries == 0


def test_a_plain_forward_in_another_thread_is_never_touched(model: Any) -> None:
    kv = engine(model, recompute_head_tokens=10_000)
    greedy(kv.generate, prompt("0123"), 1)
    ids = prompt("01")
    with torch.no_grad():
        truth = model(ids).logits
    wrong: list[float] = []
    stop = threading.Event()

    def forward() -> None:
        while not stop.is_set():
            with torch.no_grad():
                error = (model(ids).logits - truth).abs().max().item()
            if error > 0:
                wrong.append(error)

    thread = threading.Thread(target=forward)
    thread.start()
    for i in range(30):
        greedy(kv.generate, prompt("3210", head=random_ids(40 + i, seed=i)), 1, cache_salt="")
    stop.set()
    thread.join()
    assert not wrong
    assert model.config._attn_implementation == "sdpa"


def test_a_prefix_that_would_cost_more_than_it_saves_is_not_taken_from_a_long_prompt() -> None:
    model = build_fresh("llama")
    model.config.max_position_embeddings = 1024
    kv = engine(model)
    head = random_ids(40, seed=71)
    greedy(kv.generate, join(head, random_ids(20, seed=72)), 1)
    short, long = (join(head, random_ids(n, seed=73)) for n in (200, 560))
    assert kv.plan(short).count(Kind.EXACT) == 40
    assert kv.plan(long).count(Kind.EXACT) == 0
    assert kv.plan(long, min_prefix_share=0.0).count(Kind.EXACT) == 40
    out = greedy(kv.generate, long, 3, min_prefix_share=0.0, continuation_block_tokens=100)
    assert out.report.exact_tokens == 40
    assert relative_error(logits(out.output), plain_logits(model, long, 3)) <= 1e-5
