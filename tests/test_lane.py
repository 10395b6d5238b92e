"""Calls aside: a caller never waits longer than it wants, and nothing stays behind."""

from __future__ import annotations

import threading

import pytest

from kvboost.store.lane import Lane
from kvboost.store.recent import Recent
from test_breaker import Clock

WAIT_S = 20.0


def lanes_threads(name: str) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == name]


def test_answers_and_exceptions_come_back() -> None:
    lane = Lane("answers")
    assert lane.run(lambda: 7, WAIT_S) == 7
    with pytest.raises(ZeroDivisionError):
        lane.run(lambda: 1 // 0, WAIT_S)
    assert lane.run(threading.get_ident, WAIT_S) != threading.get_ident()
    assert len(lanes_threads("answers")) == 1, "one thread serves one caller after another"


def test_a_late_call_is_left_alone_and_its_answer_reaches_nobody() -> None:
    lane = Lane("late")
    gate = threading.Event()
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        lane.run(lambda: gate.wait(WAIT_S) and "late", 0.05)
    assert lane.run(lambda: "in time", WAIT_S) == "in time"
    late = lanes_threads("late")
    assert len(late) == 2
    gate.set()
    assert lane.run(lambda: "next", WAIT_S) == "next"
    del lane
    for thread in late:
        thread.join(WAIT_S)
    assert not lanes_threads("late"), "threads end with their lane"


def test_callers_do_not_wait_for_one_another() -> None:
    lane = Lane("many")
    meeting = threading.Barrier(6)
    met: list[int] = []
    threads = [
        threading.Thread(target=lambda: met.append(lane.run(lambda: meeting.wait(WAIT_S), WAIT_S))) for _ in range(6)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(WAIT_S)
    assert sorted(met) == list(range(6))


def test_what_was_seen_is_known_for_a_while_and_the_oldest_is_forgotten_first() -> None:
    clock = Clock()
    recent: Recent[int] = Recent(3, 10.0, clock)
    recent.update({b"a": 1, b"b": 2})
    clock.now_s = 6.0
    recent.update({b"c": 3, b"a": 4})
    assert recent.known([b"a", b"b", b"c", b"d"]) == {b"a": 4, b"b": 2, b"c": 3}
    clock.now_s = 10.0
    assert recent.known([b"a", b"b", b"c"]) == {b"a": 4, b"c": 3}
    recent.update({b"d": 5, b"e": 6})
    assert recent.known([b"a", b"c", b"d", b"e"]) == {b"a": 4, b"d": 5, b"e": 6}
    recent.forget([b"a", b"x"])
    assert recent.known([b"a", b"d"]) == {b"d": 5}
    recent.forget()
    assert recent.known([b"d", b"e"]) == {}
