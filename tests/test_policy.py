"""What a store keeps: proven text before one-off text, the new before the outdated, heads before tails."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest

from kvboost.store import tuning
from kvboost.store.policy import NEWCOMER, REMEMBERED, Ranking, importance, priority
from kvboost.store.tuning import SAMPLE_ENTRIES, WEIGHTS, Shadow, Tuner


def store(capacity: int, weight: float = 0.1) -> Shadow:
    return Shadow(Ranking(capacity, weight))


def play(shadow: Shadow, *names: str, size: int = 1) -> None:
    for name in names:
        shadow.ask(name.encode(), size)


def kept(shadow: Shadow, names: str) -> str:
    return "".join(n for n in names if n.encode() in shadow.ranking)


def order(ranking: Ranking) -> list[bytes]:
    """All entries, the first to go first."""
    return ranking.victims(sum(e.size_bytes for e in ranking.entries()), lambda name: False) or []


def test_importance_is_what_keeping_saves_per_byte() -> None:
    base = importance(4.0, 0.2, 0.5, 100.0)
    assert importance(8.0, 0.2, 0.5, 100.0) == importance(4.0, 0.4, 0.5, 100.0) == pytest.approx(2 * base)
    assert importance(4.0, 0.2, 1.0, 100.0) == importance(4.0, 0.2, 0.5, 50.0) == pytest.approx(2 * base)


def test_weight_nothing_is_lru_and_a_large_weight_is_lfu() -> None:
    rare_now, often_before = (1.0, 5.0), (8.0, 4.0)
    assert priority(*rare_now, 0.0) > priority(*often_before, 0.0)
    assert priority(*rare_now, 1.0) < priority(*often_before, 1.0)


def test_text_that_nobody_asks_for_again_does_not_flood_out_what_is_used() -> None:
    shadow = store(10, weight=WEIGHTS[0])
    play(shadow, *"abcde" * 3)
    play(shadow, *(f"scan {i}" for i in range(1000)))
    assert kept(shadow, "abcde") == "abcde"
    assert len(shadow.ranking) == 10, "the rest of the room is for newcomers"


@pytest.mark.parametrize("weight", WEIGHTS)
def test_what_was_popular_once_gives_way_to_what_is_used_now(weight: float) -> None:
    shadow = store(10, weight)
    play(shadow, *"abcdefghij" * 30)
    play(shadow, *"klmnopqrst" * 150)
    assert kept(shadow, "klmnopqrst") == "klmnopqrst"
    assert kept(shadow, "abcdefghij") == ""


def test_a_use_counts_less_with_time() -> None:
    ranking = Ranking(10, 1.0)
    for name in (b"old", b"new"):
        ranking.add(name, ranking.estimate(1, name))
    for _ in range(64):
        ranking.use(b"old")
    for _ in range(40):  # turnovers: what proves itself moves the time on
        for i in range(10):
            ranking.add(b"%d" % i, ranking.estimate(1, b"%d" % i))
            ranking.use(b"%d" % i)
            ranking.remove(b"%d" % i)
    ranking.use(b"old")
    assert ranking[b"old"].frequency < 1 + 64 / 8


def test_what_was_evicted_is_remembered_and_known_when_it_comes_back() -> None:
    ranking = Ranking(4, 1.0)
    ranking.add(b"a", ranking.estimate(1, b"text"))
    ranking.use(b"a")
    ranking.remove(b"a", remember=True)
    again = ranking.estimate(1, b"text")
    assert again.frequency > ranking.estimate(1, b"other text").frequency == NEWCOMER
    assert again.frequency == pytest.approx(2 + NEWCOMER, rel=0.2)
    assert again.proven


def test_a_refused_newcomer_is_taken_in_when_it_is_asked_for_again() -> None:
    shadow = store(3, weight=0.5)
    play(shadow, *"abc" * 2)
    play(shadow, "x")
    assert kept(shadow, "abcx") == "abc"
    play(shadow, "x", "x")
    assert "x" in kept(shadow, "abcx")


def test_memory_of_what_is_gone_is_bounded() -> None:
    shadow = store(16)
    play(shadow, *(str(i) for i in range(10_000)))
    assert shadow.ranking.num_remembered <= REMEMBERED * 16
    assert sum(map(len, shadow.ranking._heaps.values())) <= 4 * 16 + 64 + 1


def test_the_head_of_a_history_is_worth_no_less_than_its_tail() -> None:
    ranking = Ranking(100, 1.0)
    for name, cost_s in ((b"tail", 9.0), (b"middle", 3.0), (b"head", 1.0)):
        ranking.add(name, ranking.estimate(1, name, cost_s=cost_s))
    floor = -math.inf
    for name in (b"tail", b"middle", b"head"):
        floor = ranking.use(name, floor)
    assert order(ranking) == [b"tail", b"middle", b"head"]


def test_cost_size_and_quality_decide_between_equally_used_entries() -> None:
    ranking = Ranking(1000, 1.0)
    for name, size, cost_s in ((b"usual", 10, 1.0), (b"slow", 10, 4.0), (b"large", 40, 1.0), (b"unknown", 10, 0.0)):
        ranking.add(name, ranking.estimate(size, name, cost_s=cost_s))
    usual = [n for n in order(ranking) if n != b"unknown"]
    assert usual == [b"large", b"usual", b"slow"]
    ranking.note_quality(b"slow", 0.01)
    assert order(ranking)[0] == b"slow"


def test_victims_are_none_if_they_would_be_spared_or_worth_more() -> None:
    ranking = Ranking(10, 0.1)
    for name in (b"a", b"b", b"c"):
        ranking.add(name, ranking.estimate(2, name))
    ranking.use(b"c")
    assert ranking.victims(4, lambda n: False) == [b"a", b"b"]
    assert ranking.victims(4, lambda n: n == b"a") == [b"b", b"c"]
    assert ranking.victims(6, lambda n: n == b"a") is None
    assert ranking.victims(5, lambda n: False, below=ranking[b"b"].priority) is None
    assert ranking.victims(0, lambda n: False) == []
    assert len(ranking) == 3
    assert order(ranking) == [b"a", b"b", b"c"], "asking changes nothing"


def test_of_a_group_only_its_own_weakest_go() -> None:
    ranking = Ranking(10, 0.1, grouped=True)
    for name, group in ((b"a", b"x"), (b"b", b"y"), (b"c", b"y")):
        ranking.add(name, ranking.estimate(1, name, group=group))
    assert ranking.victims(1, lambda n: False, group=b"y") == [b"b"]
    assert ranking.victims(3, lambda n: False, group=b"y") is None
    assert ranking.victims(1, lambda n: False) == [b"a"]


def test_a_change_of_weight_orders_all_anew() -> None:
    ranking = Ranking(4, WEIGHTS[0])
    for name in (b"often", b"now"):
        ranking.add(name, ranking.estimate(1, name))
    for _ in range(9):
        ranking.use(b"often")
    for _ in range(2):  # a little later
        ranking.add(b"x", ranking.estimate(1, b"x"))
        ranking.use(b"x")
        ranking.remove(b"x")
    ranking.use(b"now")
    assert order(ranking) == [b"often", b"now"]
    ranking.weight = WEIGHTS[-1]
    assert order(ranking) == [b"now", b"often"]


def run(requests: list[bytes], capacity: int, *, tuned: bool) -> Ranking:
    ranking = Ranking(capacity)
    tuner, real = Tuner(ranking), Shadow(ranking)
    for name in requests:
        tuner.ask(name, 1)
        if name not in ranking and real.excess_bytes(1) > 0 and tuned:
            tuner.start()
        real.ask(name, 1)
    return ranking


def test_the_weight_follows_the_traffic() -> None:
    rng = np.random.default_rng(0)
    shares = 1 / np.arange(1, 3001)
    popular = [b"%d" % i for i in rng.choice(3000, 20_000, p=shares / shares.sum())]
    assert run(popular, 100, tuned=True).weight >= 0.1, "popularity lasts: frequency counts"
    drifting = [b"%d" % (i // 20 + rng.integers(0, 60)) for i in range(20_000)]
    assert run(drifting, 50, tuned=True).weight <= 0.01, "what was popular is over: recency counts"


def test_the_weight_does_not_follow_chance() -> None:
    rng = np.random.default_rng(3)
    ranking = Ranking(100)
    tuner, real = Tuner(ranking), Shadow(ranking)
    weights = []
    for i in rng.integers(0, 1000, 20_000):  # no name is asked for more than another: no weight is better
        tuner.ask(b"%d" % i, 1)
        if real.excess_bytes(1) > 0:
            tuner.start()
        real.ask(b"%d" % i, 1)
        weights.append(ranking.weight)
    decisions = len(weights) / (tuning.WINDOW * 100)
    assert sum(a != b for a, b in pairwise(weights)) < 0.01 * decisions


def test_shadows_hold_a_bounded_sample() -> None:
    rng = random.Random(0)
    ranking = Ranking(5000)
    tuner, real = Tuner(ranking), Shadow(ranking)
    for i in range(12_000):
        name = b"%d" % rng.randrange(i + 1)
        tuner.ask(name, 1)
        if real.excess_bytes(1) > 0:
            tuner.start()
        real.ask(name, 1)
    assert len(tuner._shadows) == len(WEIGHTS)
    assert all(len(s.ranking) <= 2 * SAMPLE_ENTRIES for s in tuner._shadows)
    assert tuning.KEPT < 1
