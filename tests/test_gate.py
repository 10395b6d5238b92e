"""The gate: a larger budget above the bound, a full prefill in the end, and every row of it charged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from families import build
from kvboost import KVBoost
from kvboost.config import Settings
from kvboost.repair import gate
from kvboost.repair.gate import Signs, bound, estimate, movement
from kvboost.types import Kind, Lineage
from scenario import SYSTEM, engine, greedy, logits, plain_logits, prompt, relative_error

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
    assert out.report.escalations == 1 + len(gate.LADDER)
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
    assert out.report.charged_budget > once.charged_budget + gate.LADDER[0] / 2
    kinds = {s.kind for s in out.plan}
    assert kinds == {Kind.EXACT, Kind.MOVED, Kind.FRESH}


def test_an_escalated_answer_is_continued_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = warmed(risk_bound=0.5, sample_step=6, recompute_ratio=0.4)
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


@given(st.floats(0, 10), shares, st.floats(0, 5), shares, st.sampled_from(sorted(gate.WEIGHTS)))
def test_no_sign_counts_against_its_meaning(m: float, a: float, u: float, r: float, name: str) -> None:
    signs = Signs(m, a, u, r)
    assert 0 < estimate(signs) <= estimate(replace(signs, **{name: getattr(signs, name) + 0.1}))


def test_movement_is_a_divergence() -> None:
    a, b = torch.randn(50), torch.randn(50)
    assert movement(a, a) == 0
    assert movement(a, b) > 0
    assert movement(a, b + 3.0) == pytest.approx(movement(a, b), rel=1e-4), "logits are known up to a constant"
