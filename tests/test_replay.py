"""An earlier plan is served again as it was, whatever the store has learnt since; or it is refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from families import build, random_ids
from kvboost import InputError, KVBoost
from kvboost.engine import Generation
from kvboost.types import Kind, ReusePlan, ReuseReport, Segment, Span
from scenario import engine, greedy, logits, prompt, relative_error

MOVED = prompt("2031")
COUNTS = ("exact_tokens", "continued_tokens", "moved_tokens", "repaired_tokens", "fresh_tokens")


def warmed(name: str = "llama", **flags: Any) -> KVBoost:
    """An engine that has seen the documents in their natural order."""
    kv = engine(build(name), **flags)
    greedy(kv.generate, prompt("0123"), 1)
    return kv


def learn(kv: KVBoost) -> None:
    """The store gains what changes the plan of `MOVED`: the prompt itself, and longer runs of it behind other heads."""
    greedy(kv.generate, prompt("2031", head=random_ids(60, seed=7)), 1, fidelity="exact")
    greedy(kv.generate, MOVED, 3)


def replayed(kv: KVBoost, first: Generation, plan: ReusePlan, **request: Any) -> tuple[torch.Tensor, ReuseReport]:
    return kv.score(MOVED, torch.tensor([first.token_ids]), plan=plan, **request)


def same(first: Generation, again: tuple[torch.Tensor, ReuseReport]) -> None:
    told, report = again
    assert relative_error(told, logits(first.output)) <= 1e-5
    assert told.argmax(-1).tolist() == first.token_ids
    assert [getattr(report, c) for c in COUNTS] == [getattr(first.report, c) for c in COUNTS]
    if first.report.moved_tokens and first.report.risk is not None:
        assert report.risk == pytest.approx(first.report.risk, rel=1e-3)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "flags",
    [
        {"recompute_strategy": "none"},
        {"recompute_strategy": "epic"},
        {"recompute_strategy": "guided", "gate": True, "risk_bound": 1e9},
        {"recompute_strategy": "guided", "gate": True, "risk_bound": 1e-9},  # every budget, then given up
        {"recompute_strategy": "cacheblend", "recompute_ratio": 0.3},
    ],
    ids=lambda f: f"{f['recompute_strategy']} {f.get('risk_bound', '')}",
)
def test_a_plan_is_replayed_as_it_was_although_the_store_has_learnt_more(name: str, flags: dict[str, Any]) -> None:
    kv = warmed(name, **flags)
    first = greedy(kv.generate, MOVED)
    assert first.report.moved_tokens > 100 or first.report.fallback is not None
    learn(kv)
    now = kv.plan(MOVED)
    assert [(s.span, s.kind) for s in now] != [(s.span, s.kind) for s in first.plan], "or the replay shows nothing"
    same(first, replayed(kv, first, first.plan))


def test_a_continued_plan_is_replayed_too() -> None:
    kv = warmed(recompute_strategy="guided", gate=True, risk_bound=1e9)
    greedy(kv.generate, MOVED, 1)
    second = greedy(kv.generate, MOVED)
    assert second.report.continued_tokens > 100
    same(second, replayed(kv, second, second.plan))


def test_a_replay_counts_and_stores_nothing() -> None:
    kv = warmed()
    first = greedy(kv.generate, MOVED)
    before = kv.stats.requests, dict(kv.stats.tokens), kv.store.stats()
    replayed(kv, first, first.plan)
    assert (kv.stats.requests, dict(kv.stats.tokens), kv.store.stats()) == before


def test_a_plan_that_does_not_fit_is_refused_with_the_reason() -> None:
    kv = warmed()
    first = greedy(kv.generate, MOVED)
    other = MOVED.clone()
    other[0, 60] = 3 + (other[0, 60] - 2) % 190
    assert other[0, 60] != MOVED[0, 60]
    size = MOVED.shape[1]
    shorter = replace(first.plan, num_tokens=size - 1)
    gap = replace(first.plan, segments=(*first.plan.segments[:1], first.plan.segments[-1]))
    nothing_computed = ReusePlan(size, (Segment(Span(0, size), Kind.EXACT, first.plan.segments[0].record_id),))
    continuation = torch.tensor([first.token_ids])
    with pytest.raises(InputError, match="not one of this prompt"):
        kv.score(other, continuation, plan=first.plan)
    with pytest.raises(InputError, match="not one of this prompt"):
        kv.score(MOVED[:, :-1], continuation, plan=shorter)
    for plan in (gap, nothing_computed, ReusePlan(size, ())):
        with pytest.raises(InputError, match="not one of this prompt"):
            replayed(kv, first, plan)
    with pytest.raises(InputError, match="exact rows only"):
        replayed(kv, first, first.plan, fidelity="exact")
    with pytest.raises(InputError, match="not one of this prompt"):
        replayed(kv, first, first.plan, cache_salt="another")
    with pytest.raises(InputError, match="switched off"):
        replayed(kv, first, first.plan, disable=True)
    same(first, replayed(kv, first, first.plan))


def test_a_plan_whose_records_went_or_became_truer_is_refused() -> None:
    kv = warmed()
    greedy(kv.generate, MOVED, 1)
    continued = greedy(kv.generate, MOVED)
    assert continued.report.continued_tokens > 100
    greedy(kv.generate, MOVED, 1, fidelity="exact")
    with pytest.raises(InputError, match="was replaced"):
        replayed(kv, continued, continued.plan)
    exact = greedy(kv.generate, MOVED)
    same(exact, replayed(kv, exact, exact.plan))
    kv.forget()
    with pytest.raises(InputError, match="is gone"):
        replayed(kv, exact, exact.plan)
