"""The oracles of `benchmarks/ceiling.py` know what they say."""

from __future__ import annotations

import pytest
import torch

import repair
from ceiling import ORACLES, Oracle, logits
from kvboost import KVBoost
from kvboost.config import Settings
from kvboost.hf import compat
from kvboost.hf.signals import glance
from kvboost.repair.guided import question
from kvboost.repair.selection import moved_positions
from kvboost.shadow import kl_divergence
from test_repair import MOVED, assembled, warmed


@pytest.fixture(scope="module")
def kv() -> KVBoost:
    return warmed()


def test_the_parts_that_errors_make_add_up_to_the_divergence(kv: KVBoost) -> None:
    oracle, assembly = Oracle(kv, MOVED), assembled(kv)
    moved = torch.from_numpy(moved_positions(assembly.plan)).long()
    part = oracle.attribution(assembly, moved)
    cut = assembly.plan.segments[-1].span.start
    keys, values = assembly.layout.per_layer(assembly.payload)
    mixed = [t[:, :, :cut].clone() for t in (*oracle.keys, *oracle.values)]
    for rows, stored in zip(mixed, (*keys, *values), strict=True):
        rows[:, :, moved] = stored[:, :, moved]
    following = torch.cat([MOVED[:, cut:], oracle.answer[:, :-1]], 1)
    with torch.no_grad():
        cache = compat.make_dynamic_cache(mixed[: len(keys)], mixed[len(keys) :])
        ours = compat.forward(kv.model, cache, input_ids=following).logits[0, -len(oracle.truth) :]
    kl = kl_divergence(oracle.truth, ours).mean().item()
    assert kl > 1e-6
    assert part.sum().item() == pytest.approx(kl, rel=0.05)


def test_information_foretells_what_small_errors_do(kv: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ceiling.DRAWS", 32)
    oracle, assembly = Oracle(kv, MOVED), assembled(kv)
    moved = torch.from_numpy(moved_positions(assembly.plan)).long()
    answer, size = oracle.answer[:, :-1], 3e-2
    expected = size**2 / 2 * oracle.information(assembly, moved, answer).sum().item()
    rows, _ = oracle.rows(assembly, moved, 0.0)
    plain = logits(assembly, rows, answer).detach()
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(16):
        noisy = [r.detach().clone() for r in rows]
        for r in noisy:
            r[:, :, moved] += size * torch.randn(r[:, :, moved].shape, generator=generator)
        seen.append(kl_divergence(plain, logits(assembly, noisy, answer).detach()).sum().item())
    assert sum(seen) / len(seen) > 1e-4
    assert sum(seen) / len(seen) == pytest.approx(expected, rel=0.15)


def test_a_draft_is_the_greedy_answer_over_the_rows_as_they_are(kv: KVBoost) -> None:
    oracle, assembly = Oracle(kv, MOVED), assembled(kv)
    moved = torch.from_numpy(moved_positions(assembly.plan)).long()
    keys, values = assembly.layout.per_layer(assembly.payload)
    drafted = oracle.draft(assembly, moved)
    following = logits(assembly, oracle.rows(assembly, moved, 0.0)[0], drafted)
    assert following.argmax(-1)[:-1].tolist() == drafted[0].tolist()
    for stored, true in zip((*keys, *values), (*oracle.keys, *oracle.values), strict=True):
        stored[:, :, moved] = true[:, :, moved]
    assert oracle.draft(assembly, moved).tolist() == oracle.answer[:, :-1].tolist()


def test_rows_that_are_true_have_no_deviation(kv: KVBoost) -> None:
    oracle, assembly = Oracle(kv, MOVED), assembled(kv)
    moved = torch.from_numpy(moved_positions(assembly.plan)).long()
    half = moved[::2]
    for stored, true in zip(assembly.layout.per_layer(assembly.payload)[1], oracle.values, strict=True):
        stored[:, :, half] = true[:, :, half]
    deviation = oracle.deviation(assembly, moved)
    assert deviation[::2].max() == 0
    assert deviation[1::2].min() > 0


def test_attention_counts_where_an_oracle_says_so(kv: KVBoost) -> None:
    oracle, assembly = Oracle(kv, MOVED), assembled(kv)
    moved = torch.from_numpy(moved_positions(assembly.plan)).long()
    oracle.name = "attended"
    score = oracle.score(assembly, moved)
    mass = glance(assembled(kv), assembly.positions(question(assembly.plan))).mass[moved]
    torch.testing.assert_close(score, mass * oracle.deviation(assembled(kv), moved))


@pytest.mark.parametrize("name", ORACLES)
def test_an_oracle_keeps_to_the_budget_and_pays_for_nothing_else(kv: KVBoost, name: str) -> None:
    oracle, assembly = Oracle(kv, MOVED), assembled(kv)
    oracle.name = name
    chosen = oracle(assembly, Settings())
    assert len(chosen.rows) == int(repair.BUDGET * len(moved_positions(assembly.plan)))
    assert chosen.probed_rows == 0
