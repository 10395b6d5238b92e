"""The gate: a larger budget above the bound, a full prefill in the end, and every row of it charged."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from families import build, random_ids
from kvboost import KVBoost
from kvboost.config import Settings
from kvboost.repair import gate
from kvboost.repair.gate import Signs, bound, estimate
from kvboost.stats import Backoff
from kvboost.types import Kind, Lineage, ReusePlan, Segment, Span
from scenario import DOCUMENTS, QUESTION, SYSTEM, engine, greedy, join, logits, plain_logits, prompt, relative_error

pytestmark = pytest.mark.smoke
MOVED = prompt("3120")
shares = st.floats(0, 1)


def warmed(**flags: Any) -> KVBoost:
    kv = engine(build("llama"), **{"recompute_strategy": "guided", "recompute_ratio": 0.2, "gate": True, **flags})
    greedy(kv.generate, prompt("0123"), 1)
    return kv


def test_within_the_bound_one_attempt_is_served() -> None:
    report = greedy(warmed(risk_bound=1e9).generate, MOVED, 1).report
    assert report.fallback is None
    assert report.escalations == 0
    assert 0 < report.repaired_tokens < report.moved_tokens
    assert report.risk is not None
    assert report.risk > 0
    assert set(report.signs) == set(gate.WEIGHTS)


@pytest.mark.parametrize("strategy", ["none", "epic", "selective", "cacheblend", "guided"])
def test_above_every_bound_the_prompt_is_prefilled_and_only_the_exact_part_reused(strategy: str) -> None:
    kv = warmed(risk_bound=0.0, recompute_strategy=strategy)
    out = greedy(kv.generate, MOVED)
    assert out.report.moved_tokens == 0
    assert out.report.exact_tokens == SYSTEM.shape[1]
    assert "bound" in (out.report.fallback or "")
    assert out.report.escalations == 2, "0.2, then 0.4, then all"
    assert relative_error(logits(out.output), plain_logits(kv.model, MOVED)) <= 1e-5
    again = greedy(kv.generate, MOVED, 1)
    assert again.report.exact_tokens == MOVED.shape[1] - 1, "what was computed in full is exact from then on"


def test_a_larger_budget_is_tried_first_and_both_attempts_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = warmed(risk_bound=0.5)
    once = greedy(warmed(risk_bound=1e9).generate, MOVED, 1).report
    risks = iter([1.0, 1.0, 0.1, 0.1, 0.1])
    monkeypatch.setattr(gate, "estimate", lambda signs: next(risks))
    out = greedy(kv.generate, MOVED, 1)
    assert out.report.escalations == 1
    assert out.report.fallback is None
    assert out.report.repaired_tokens > once.repaired_tokens
    assert out.report.charged_budget > once.charged_budget + 0.2
    kinds = {s.kind for s in out.plan}
    assert kinds == {Kind.EXACT, Kind.MOVED, Kind.FRESH}


def test_an_escalated_answer_is_continued_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = warmed(risk_bound=0.5, sample_step=6, recompute_ratio=0.3)
    risks = iter([1.0, 1.0, *[0.1] * 5])
    monkeypatch.setattr(gate, "estimate", lambda signs: next(risks))
    first = greedy(kv.generate, MOVED)
    again = greedy(kv.generate, MOVED)
    assert again.report.continued_tokens > 150
    assert relative_error(logits(again.output), logits(first.output)) <= 1e-5
    headers = [h.header for s in again.plan if s.record_id for h in kv.store.get_many([s.record_id]).records.values()]
    assert {h.lineage for h in headers} == {Lineage.BIT_EXACT, Lineage.APPROXIMATE}


def test_the_bound_follows_fidelity_unless_it_is_given() -> None:
    assert 0 < bound(Settings(fidelity="balanced")) < bound(Settings(fidelity="fast"))
    assert bound(Settings(fidelity="fast", risk_bound=0.25)) == 0.25


@given(shares, shares, st.sampled_from(sorted(gate.WEIGHTS)))
def test_no_sign_counts_against_its_meaning(attended: float, unexplained: float, name: str) -> None:
    signs = Signs(attended, unexplained)
    assert 0 < estimate(signs) <= estimate(replace(signs, **{name: getattr(signs, name) + 0.1}))


def test_budgets_grow_from_what_is_set() -> None:
    plan = ReusePlan.nothing(9)
    assert gate.budgets(Settings(fidelity="fast"), plan) == (0.05, 0.15, 0.4)
    assert gate.budgets(Settings(fidelity="balanced"), plan) == (0.15, 0.4)
    assert gate.budgets(Settings(fidelity="fast", recompute_ratio=0.2), plan) == (0.2, 0.4)
    assert gate.budgets(Settings(recompute_ratio=1.0), plan) == (1.0,)


def test_text_behind_its_old_context_begins_with_the_smallest_budget() -> None:
    kv = warmed()
    head_changed, reordered = kv.plan(join(random_ids(6, seed=9), prompt("0123"))), kv.plan(MOVED)
    assert head_changed.familiarity > gate.FAMILIAR > reordered.familiarity
    assert gate.budgets(Settings(), head_changed)[0] < gate.budgets(Settings(), reordered)[0]


def moved_runs(num_runs: int, run_tokens: int, fresh_tokens: int = 16) -> ReusePlan:
    spans = [Span(i * run_tokens, (i + 1) * run_tokens) for i in range(num_runs)]
    end = num_runs * run_tokens
    question = Segment(Span(end, end + fresh_tokens), Kind.FRESH)
    return ReusePlan(end + fresh_tokens, (*(Segment(s, Kind.MOVED, b"record") for s in spans), question), end)


@pytest.mark.parametrize(
    ("run_tokens", "balanced", "fast"),
    [(500, 0.15, 0.05), (gate.RUN_TOKENS, 0.15, 0.05), (gate.RUN_TOKENS // 2, 0.3, 0.1), (20, 0.4, 0.15)],
)
def test_short_runs_begin_with_more(run_tokens: int, balanced: float, fast: float) -> None:
    plan = moved_runs(10, run_tokens)
    assert gate.budgets(Settings(), plan)[0] == pytest.approx(balanced)
    assert gate.budgets(Settings(fidelity="fast"), plan)[0] == pytest.approx(fast)
    assert gate.budgets(Settings(recompute_ratio=0.02), plan) == (0.02, 0.15, 0.4), "what is set is taken as it is"


@pytest.mark.parametrize("strategy", ["none", "epic", "selective", "cacheblend"])
def test_strategies_with_budgets_of_their_own_escalate_from_the_first_step(strategy: Any) -> None:
    plan = moved_runs(10, 20)
    assert gate.budgets(Settings(recompute_strategy=strategy), plan) == (0.15, 0.4)


@given(st.integers(1, 40), st.integers(1, 400), st.sampled_from(["balanced", "fast"]))
def test_budgets_grow_by_a_quarter_at_least(num_runs: int, run_tokens: int, fidelity: Any) -> None:
    found = gate.budgets(Settings(fidelity=fidelity), moved_runs(num_runs, run_tokens))
    assert all(larger >= 1.25 * smaller for smaller, larger in pairwise(found))
    assert found[-1] == 0.4


def test_behind_much_new_text_moved_rows_are_given_up_before_it_is_computed_twice() -> None:
    tried = []
    for new_tokens in (9, 300):
        head = random_ids(new_tokens, seed=5)
        kv = warmed(risk_bound=0.0)
        out = greedy(kv.generate, join(SYSTEM, head, *DOCUMENTS[:2], QUESTION), 1)
        assert "bound" in (out.report.fallback or "")
        tried.append(out.report.escalations)
    assert tried == [2, 1]


@pytest.mark.parametrize("ratio", [0.02, 0.04, 0.05, 0.06, 0.07, 0.08, 0.1])
def test_a_small_budget_leaves_enough_rows_to_judge_by(ratio: float) -> None:
    """Of some per cent of a short text one or two rows are left for a sample, with which every risk is the highest."""
    report = greedy(warmed(recompute_ratio=ratio, risk_bound=1e9).generate, MOVED, 1).report
    assert 0 < report.signs["unexplained"] < 1
    assert report.repaired_tokens < 0.3 * report.moved_tokens


@pytest.mark.parametrize("strategy", ["none", "epic"])
def test_a_strategy_without_a_sample_is_measured_by_one_and_charged_for_it(strategy: str) -> None:
    judged, bare = (
        greedy(warmed(recompute_strategy=strategy, risk_bound=1e9, gate=gate_on).generate, MOVED, 1).report
        for gate_on in (True, False)
    )
    assert 0 < judged.signs["unexplained"] < 1
    assert bare.risk is None
    assert judged.repaired_tokens > bare.repaired_tokens
    assert judged.charged_budget > bare.charged_budget


def test_a_model_whose_moved_rows_are_always_given_up_is_tried_less_and_less() -> None:
    kv = warmed(risk_bound=0.0)
    head = random_ids(3, seed=1)
    tried = []
    for i in range(12):
        ids = join(head, random_ids(30, seed=50 + i), prompt("3120"))
        tried.append(greedy(kv.generate, ids, 1).report.escalations > 0)
    assert tried == [True, True, True, False, True, False, False, False, True, False, False, False]
    accepted = greedy(kv.generate, MOVED, 1, gate=False).report
    assert accepted.moved_tokens > 0, "without the gate there is nothing to give up"


def test_backoff_forgets_after_a_success() -> None:
    backoff = Backoff()
    for _ in range(10):
        backoff.note(failed=True)
    assert sum(backoff.allows() for _ in range(64)) == 2
    backoff.note(failed=False)
    assert all(backoff.allows() for _ in range(5))


def test_backoff_counts_each_name_apart_and_forgets_the_oldest() -> None:
    backoff = Backoff()
    for _ in range(10):
        backoff.note(b"ann", failed=True)
    assert not backoff.allows(b"ann")
    assert all(backoff.allows(b"bob") for _ in range(5))
    for i in range(Backoff.MAX_NAMES):
        backoff.note(i.to_bytes(4, "little"), failed=True)
    assert all(backoff.allows(b"ann") for _ in range(5))


def test_what_is_given_up_in_one_namespace_is_tried_in_another() -> None:
    kv = warmed(risk_bound=0.0)
    greedy(kv.generate, prompt("0123"), 1, cache_salt="bob")

    def tried(number: int, **request: Any) -> bool:
        ids = join(random_ids(33, seed=50 + number), prompt("3120"))
        return bool(greedy(kv.generate, ids, 1, **request).report.escalations > 0)

    assert [tried(i) for i in range(6)] == [True, True, True, False, True, False]
    assert not tried(6)
    assert tried(6, cache_salt="bob")
