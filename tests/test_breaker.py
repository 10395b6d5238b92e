"""The circuit breaker: when a call may be tried, told by a clock that stands still."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.store.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(jitter: float = 1.0, **limits: float) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(clock=clock, jitter=lambda: jitter, **limits), clock


def test_a_failure_opens_it_and_the_backoff_ends_in_one_probe() -> None:
    breaker, clock = make(backoff_s=2.0)
    assert breaker.allows()
    breaker.failed()
    assert breaker.state == "open"
    clock.now_s = 1.9
    assert not breaker.allows()
    clock.now_s = 2.0
    assert breaker.state == "half-open"
    assert [breaker.allows() for _ in range(5)] == [True, False, False, False, False]
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.allows()


def test_each_failed_probe_doubles_the_backoff_up_to_a_limit_and_a_success_forgets_them() -> None:
    breaker, clock = make(backoff_s=1.0, max_backoff_s=5.0)
    waits = []
    for _ in range(5):
        assert breaker.allows()
        breaker.failed()
        began = clock.now_s
        while breaker.state != "half-open":
            clock.now_s += 0.25
        waits.append(clock.now_s - began)
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert breaker.allows()
    breaker.succeeded()
    breaker.failed()
    clock.now_s += 1.0
    assert breaker.allows(), "the first backoff again"


def test_jitter_shortens_a_backoff_to_at_most_a_half() -> None:
    breaker, clock = make(jitter=0.0, backoff_s=2.0)
    breaker.failed()
    clock.now_s = 0.99
    assert not breaker.allows()
    clock.now_s = 1.0
    assert breaker.allows()


def test_late_answers_to_calls_from_before_it_opened_change_nothing() -> None:
    breaker, clock = make(backoff_s=2.0)
    breaker.failed()
    for _ in range(7):
        breaker.failed()
    breaker.succeeded()
    assert breaker.state == "open"
    clock.now_s = 2.0
    assert breaker.allows(), "eight calls that failed together are one failure"


def test_a_probe_that_never_reports_is_followed_by_another() -> None:
    breaker, clock = make(backoff_s=2.0)
    breaker.failed()
    clock.now_s = 2.0
    assert breaker.allows()
    clock.now_s = 4.0
    assert breaker.allows()


def test_of_many_threads_one_probes() -> None:
    breaker, clock = make(backoff_s=1.0)
    breaker.failed()
    clock.now_s = 1.0
    allowed: list[bool] = []
    threads = [threading.Thread(target=lambda: allowed.append(breaker.allows())) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sum(allowed) == 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.floats(0.0, 9.0), st.booleans()), max_size=60))
def test_whatever_happens_a_peer_that_answers_is_used_again(events: list[float | bool]) -> None:
    """Numbers let time pass; a boolean is a call, if it is allowed, and whether it succeeds."""
    breaker, clock = make(backoff_s=1.0, max_backoff_s=8.0)
    for event in events:
        if not isinstance(event, bool):
            clock.now_s += event
        elif breaker.allows():
            (breaker.succeeded if event else breaker.failed)()
            assert breaker.state == ("closed" if event else "open")
    clock.now_s += 8.0
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.state == "closed"
