"""The oracles of `benchmarks/ceiling.py` know what they say."""

from __future__ import annotations

import pytest
import torch

import repair
from ceiling import Oracle
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


@pytest.mark.parametrize("name", ["deviation", "attended", "attributed"])
def test_an_oracle_keeps_to_the_budget_and_pays_for_nothing_else(kv: KVBoost, name: str) -> None:
    oracle, assembly = Oracle(kv, MOVED), assembled(kv)
    oracle.name = name
    chosen = oracle(assembly, Settings())
    assert len(chosen.rows) == int(repair.BUDGET * len(moved_positions(assembly.plan)))
    assert chosen.probed_rows == 0
