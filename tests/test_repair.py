"""Strategies: what they choose, what they are charged, and that their probes measure what they say."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from families import BY_NAME, MOVABLE, Family, build
from kvboost import KVBoost
from kvboost.config import Settings
from kvboost.hf import compat, probe, signals
from kvboost.hf.assembly import Assembly
from kvboost.hf.correction import layer_rotations, shrunken_mean, shrunken_means
from kvboost.hf.load import load_rows
from kvboost.repair import STRATEGIES
from kvboost.repair.mending import compute
from kvboost.repair.selection import moved_positions
from kvboost.types import Kind
from scenario import engine, greedy, plain_logits, prompt, relative_error
from scenario import logits as logits_of

pytestmark = pytest.mark.smoke
MOVED = prompt("3120")
CHOOSING = ["selective", "cacheblend", "epic", "guided"]


def assembled(kv: KVBoost, input_ids: torch.Tensor = MOVED) -> Assembly:
    """The prompt's rows as loaded and shifted, nothing computed."""
    plan = kv.plan(input_ids)
    with kv.store.get_many([s.record_id for s in plan if s.record_id]) as lease:
        rows, _ = load_rows(plan, lease.records, kv.support.require_layout(), 0, plan.num_tokens)
    return Assembly(kv.model, kv.support, input_ids, plan, rows, 16)


def warmed(name: str = "llama", **flags: Any) -> KVBoost:
    """An engine that has seen the documents in their natural order."""
    kv = engine(build(name, BY_NAME[name].attention[0]), **{"recompute_strategy": "guided", **flags})
    greedy(kv.generate, prompt("0123"), 1)
    return kv


@pytest.mark.parametrize("strategy", CHOOSING)
@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.6])
def test_a_strategy_keeps_to_its_budget_and_charges_its_probes(strategy: str, ratio: float) -> None:
    kv = warmed()
    settings = Settings(recompute_strategy=strategy, recompute_ratio=ratio, check_layer=1)
    assembly = assembled(kv)
    chosen = STRATEGIES[strategy](assembly, settings)
    moved = moved_positions(assembly.plan)
    assert np.array_equal(chosen.rows, np.unique(chosen.rows))
    assert np.isin(chosen.rows, moved).all()
    slack = len(assembly.plan.runs)  # a head of every run is rounded up
    assert len(chosen.rows) + chosen.probed_rows <= max(ratio * len(moved) + slack, chosen.probed_rows)
    report = greedy(kv.generate, MOVED, 1, recompute_strategy=strategy, recompute_ratio=ratio).report
    expected = (report.repaired_tokens + chosen.probed_rows + 1) / assembly.plan.found_tokens
    assert report.charged_budget == pytest.approx(expected, abs=1e-6)


def test_a_larger_budget_comes_closer_to_a_full_prefill() -> None:
    model = build("llama")
    truth = plain_logits(model, MOVED, 1)
    errors = {}
    for ratio in (0.0, 0.5, 1.0):
        outs = [greedy(warmed().generate, MOVED, 1, recompute_strategy=s, recompute_ratio=ratio) for s in CHOOSING]
        errors[ratio] = np.mean([relative_error(logits_of(o.output), truth) for o in outs])
    assert errors[1.0] <= 1e-5 < errors[0.5] < errors[0.0]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_value_change_is_the_distance_from_fresh_values(layer: int) -> None:
    kv = warmed()
    assembly = assembled(kv)
    every = torch.arange(MOVED.shape[1])
    stored = assembly.layout.per_layer(assembly.payload)[1][layer].clone()
    truth = probe.run(kv.model, MOVED).layers[layer].values
    expected = (truth - stored).pow(2).sum((0, 1, 3))
    change, charged = signals.value_change(assembly, every, layer)
    torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-5)
    assert charged == pytest.approx(len(every) * (layer + signals.PROJECTION_SHARE) / 3)


def test_value_change_at_the_second_layer_is_exact_for_any_rows_once_the_fresh_rows_are_there() -> None:
    kv = warmed()
    every, _ = signals.value_change(assembled(kv), torch.arange(MOVED.shape[1]), 1)
    some = torch.from_numpy(moved_positions(kv.plan(MOVED))[::3]).long()
    assembly = assembled(kv)
    fresh = assembly.fresh_positions().nonzero()[:, 0]
    rows = torch.cat([some, fresh]).unique()
    change, _ = signals.value_change(assembly, rows, 1)
    torch.testing.assert_close(change[torch.searchsorted(rows, some)], every[some], rtol=1e-3, atol=1e-5)


def test_attention_change_is_nothing_at_the_first_layer_and_something_behind_it() -> None:
    kv = warmed()
    every = torch.arange(MOVED.shape[1])
    first, _ = signals.attention_change(assembled(kv), every, 0)
    moved = torch.from_numpy(moved_positions(kv.plan(MOVED))).long()
    later, _ = signals.attention_change(assembled(kv), every, 2)
    assert first[moved].abs().max() <= 1e-5
    assert later[moved].max() > 100 * first[moved].abs().max()


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "gemma3"])
def test_the_glance_is_the_attention_that_transformers_reports(name: str) -> None:
    kv = warmed(name)
    assembly = assembled(kv)
    rows = assembly.fresh_positions().nonzero()[:, 0]
    assert (rows.diff() == 1).all(), "all fresh rows stand at the end, so transformers can be asked"
    seen = signals.glance(assembly, rows)
    model = build(name, "eager")
    cache = compat.make_dynamic_cache(
        *([x[:, :, : int(rows[0])].clone() for x in side] for side in assembly.layout.per_layer(assembly.payload))
    )
    with torch.no_grad():
        out = compat.forward(model, cache, input_ids=MOVED[:, rows], output_attentions=True)
    truth = torch.stack([out.attentions[i][0].mean(0).sum(0) for i in range(3)]).mean(0)
    size = truth.shape[0]
    torch.testing.assert_close(seen.mass[-size:], truth, rtol=1e-3, atol=1e-5)


def test_entropy_is_high_for_even_attention_and_a_share_of_log_n() -> None:
    kv = warmed()
    rows = torch.from_numpy(moved_positions(kv.plan(MOVED))).long()
    share, _ = signals.attention_entropy(assembled(kv), rows, 0)
    assert ((share > 0) & (share <= 1 + 1e-5)).all()


def test_selective_takes_boundary_rows_only_and_fewer_with_a_higher_threshold() -> None:
    kv = warmed()
    taken = []
    for threshold in (0.0, 0.7, 1.0):
        assembly = assembled(kv)
        settings = Settings(recompute_strategy="selective", entropy_threshold=threshold, recompute_boundary_tokens=6)
        rows = STRATEGIES["selective"](assembly, settings).rows
        near = [set(range(r.start, r.start + 6)) | set(range(r.stop - 6, r.stop)) for r in assembly.plan.runs]
        assert set(rows.tolist()) <= set().union(*near)
        taken.append(len(rows))
    assert taken[0] >= taken[1] >= taken[2]
    assert taken[0] > taken[2] == 0, "no entropy exceeds log n"


def test_cacheblend_takes_at_most_topk_rows_of_a_chunk_and_none_below_the_threshold() -> None:
    kv = warmed()
    for threshold, limit in ((0.0, 3), (1e9, 0)):
        assembly = assembled(kv)
        settings = Settings(recompute_strategy="cacheblend", deviation_threshold=threshold, recompute_topk=3)
        rows = STRATEGIES["cacheblend"](assembly, settings).rows
        counts = [((rows >= s.start) & (rows < s.stop)).sum() for s in assembly.plan.spans(Kind.MOVED)]
        assert max(counts) == limit


@pytest.mark.parametrize("family", MOVABLE, ids=lambda f: f.name)
def test_a_common_error_of_a_chunk_is_learnt_from_the_sample_and_taken_away(family: Family) -> None:
    kv = warmed(family.name)
    assembly = assembled(kv)
    clean = [replace(g, keys=g.keys.clone(), values=g.values.clone()) for g in assembly.payload]
    spoil(assembly)
    moved = moved_positions(assembly.plan)
    sampled = moved[::6]
    rows = np.union1d(assembly.plan.computed_rows(MOVED.shape[1]), sampled)
    compute(assembly, rows, sampled)
    rest = np.setdiff1d(moved, rows)
    for side in (0, 1):  # layer-0 rows do not depend on context, so what was planted is the whole error
        mended, truth = (assembly.layout.per_layer(p)[side][0][:, :, rest] for p in (assembly.payload, clean))
        assert relative_error(mended, truth) <= 1e-3


def test_what_a_sample_taught_is_kept_with_the_chunk_and_served_again_with_its_answer() -> None:
    kv = warmed(sample_step=4, recompute_ratio=0.6)
    first = greedy(kv.generate, MOVED, 4)
    again = greedy(kv.generate, MOVED, 4)
    assert first.report.moved_tokens > first.report.repaired_tokens > 0
    assert again.report.moved_tokens == 0
    assert again.report.continued_tokens > 150
    assert relative_error(logits_of(again.output), logits_of(first.output)) <= 1e-5
    headers = [h for s in again.plan if s.record_id for h in kv.store.get_many([s.record_id]).records.values()]
    assert any(h.header.corrected for h in headers)


def test_a_second_sample_finds_what_the_first_one_left() -> None:
    kv = warmed()
    assembly = assembled(kv)
    moved = moved_positions(assembly.plan)
    first, second = moved[::6], moved[3::6]
    clean = [replace(g, values=g.values.clone()) for g in assembly.payload]
    fresh = assembly.plan.computed_rows(MOVED.shape[1])
    _, one = compute(assembly, np.union1d(fresh, first), first)
    spoil(assembly)
    later = replace(assembly, plan=replace(assembly.plan, repaired=first), filled=True)
    _, two = compute(later, np.union1d(fresh, second), second)
    assert one is not None
    assert two is not None
    rest = np.setdiff1d(moved, np.union1d(first, second))
    mended, truth = (assembly.layout.per_layer(p)[1][0][:, :, rest] for p in (assembly.payload, clean))
    assert relative_error(mended, truth) <= 1e-3
    both = one.plus(two)
    assert torch.equal(both.added[0].values, one.added[0].values + two.added[0].values)


def spoil(assembly: Assembly) -> None:
    """Adds one constant to the unrotated keys, and to the values, of every moved row in every layer."""
    turns = layer_rotations(assembly.layout, 0, MOVED.shape[1])
    moved = assembly.positions(moved_positions(assembly.plan))
    for turn, keys, values in zip(turns, *assembly.layout.per_layer(assembly.payload), strict=True):
        for slot, stored in (("keys", keys[0]), ("values", values[0])):
            constant = torch.linspace(0.5, 1.5, stored.shape[-1]).expand(stored.shape[0], len(moved), -1)
            stored[:, moved] += turn.apply(constant, moved) if slot == turn.spec.slot else constant


def test_the_shrunken_mean_is_the_mean_of_a_common_change_and_nothing_of_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 400, 8, generator=generator)
    chunk = torch.arange(400) // 200
    counts = torch.tensor([200.0, 200.0])
    common = torch.tensor([3.0, -2.0, 0, 0, 1, 0, 0, 5.0])
    found = shrunken_mean(noise + common, chunk, counts)
    assert (found - common).abs().max() < 0.3
    assert shrunken_mean(noise, chunk, counts).norm(dim=-1).max() < 0.25
    both = shrunken_means(noise + common, chunk, counts)
    assert (both - common).abs().max() < 0.3
    exact = shrunken_mean(common.expand(2, 400, 8), chunk, counts)
    torch.testing.assert_close(exact, common.expand(2, 2, 8))


def test_strategy_and_budget_change_between_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = warmed()
    orders = iter(["3120", "2031", "1302", "0213"])

    def repaired() -> int:
        return greedy(kv.generate, prompt(next(orders)), 1).report.repaired_tokens

    monkeypatch.setenv("KVBOOST_RECOMPUTE_STRATEGY", "none")
    assert repaired() == 0
    monkeypatch.setenv("KVBOOST_RECOMPUTE_STRATEGY", "epic")
    few = repaired()
    monkeypatch.setenv("KVBOOST_RECOMPUTE_HEAD_TOKENS", "20")
    assert 0 < few < repaired()
    monkeypatch.setenv("KVBOOST_RECOMPUTE_RATIO", "1")
    report = greedy(kv.generate, prompt("0213"), 1).report
    assert report.repaired_tokens == report.moved_tokens > 0


def test_strategies_change_under_load_and_every_request_sees_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = warmed(recompute_ratio=None)
    monkeypatch.setenv("KVBOOST_RECOMPUTE_STRATEGY", "none")
    found: list[tuple[int, int]] = []

    def ask(salt: int) -> None:
        for order in ("3120", "2031", "1302"):
            ids = prompt(order)
            greedy(kv.generate, prompt("0123"), 1, cache_salt=str(salt))
            report = greedy(kv.generate, ids, 1, cache_salt=str(salt)).report
            found.append((report.moved_tokens, report.repaired_tokens))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    monkeypatch.setenv("KVBOOST_RECOMPUTE_HEAD_TOKENS", "3")
    for _ in range(20):
        for strategy in ("epic", "none"):
            monkeypatch.setenv("KVBOOST_RECOMPUTE_STRATEGY", strategy)
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert len(found) == 12
    for moved, repaired in found:
        assert moved > 100
        assert repaired == 0 or 3 <= repaired <= 3 * 8, "the rows of one strategy, never a mixture"
    monkeypatch.setenv("KVBOOST_RECOMPUTE_STRATEGY", "epic")
    greedy(kv.generate, prompt("0123"), 1)
    assert greedy(kv.generate, prompt("3201"), 1).report.repaired_tokens > 0
