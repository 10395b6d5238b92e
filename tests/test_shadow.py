"""Shadow verification: what it measures is true, it gives way, and it stops moved reuse that leaves its bound."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from families import build, random_ids
from kvboost import KVBoost, shadow
from kvboost.shadow import Shadow, compare
from kvboost.stats import InFlight
from scenario import engine, greedy, join, logits, plain_logits, prompt

pytestmark = pytest.mark.smoke
ORDERS = ["".join(p) for p in itertools.permutations("0123") if p != tuple("0123")]


@pytest.fixture
def kv() -> Any:
    made = engine(build("llama"), shadow_share=1.0)
    greedy(made.generate, prompt("0123"), 1)
    yield made
    made.shadow.close()


def test_a_check_measures_the_distance_from_a_full_prefill(kv: KVBoost) -> None:
    out = greedy(kv.generate, prompt("3120"), 1)
    assert out.report.moved_tokens > 100
    result = out.shadow.result(30)
    truth = plain_logits(kv.model, prompt("3120"), 1)[0]
    expected = compare(truth, logits(out.output)[0], 0.1)
    assert result.kl == pytest.approx(expected.kl, rel=1e-2, abs=1e-7)
    assert result.kl > 0
    assert result.agrees == expected.agrees
    assert kv.shadow.stats().checks == 1


def test_a_continued_prefix_is_checked_for_what_it_inherits(kv: KVBoost) -> None:
    first = greedy(kv.generate, prompt("3120"), 1)
    first.shadow.result(30)
    longer = join(prompt("3120"), random_ids(12, seed=5))
    out = greedy(kv.generate, longer)
    assert out.report.continued_tokens > 100
    assert out.report.moved_tokens == 0
    expected = compare(plain_logits(kv.model, longer, 1)[0], logits(out.output)[0], 0.1)
    assert out.shadow.result(30).kl == pytest.approx(expected.kl, rel=1e-2, abs=1e-7)
    assert expected.kl > 0


def test_only_requests_with_inexact_rows_are_checked_and_only_the_share_that_is_set(
    kv: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert greedy(kv.generate, prompt("0123"), 1).shadow is None, "an exact hit needs no check"
    monkeypatch.setenv("KVBOOST_SHADOW_SHARE", "0")
    assert greedy(kv.generate, prompt("3120"), 1).shadow is None


def test_a_tail_beyond_the_bound_suspends_moved_reuse_until_it_is_resumed(
    kv: KVBoost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shadow, "MIN_CHECKS", 3)
    monkeypatch.setenv("KVBOOST_RISK_BOUND", "1e-9")
    for order in ORDERS[:3]:
        greedy(kv.generate, prompt(order), 1).shadow.result(30)
    assert "inexact reuse is suspended" in (kv.shadow.suspended or "")
    assert any("suspended" in record.message for record in caplog.records)
    after = greedy(kv.generate, prompt("3210"), 1)
    assert after.report.moved_tokens == 0
    assert after.report.exact_tokens == 40, "exact reuse goes on"
    assert greedy(kv.generate, prompt(ORDERS[0]), 1).report.continued_tokens == 0, "what was moved before is not served"
    kv.shadow.resume()
    assert greedy(kv.generate, join(random_ids(3, seed=4), prompt("2103")), 1).report.moved_tokens > 0


def test_within_the_bound_nothing_is_suspended(kv: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow, "MIN_CHECKS", 2)
    monkeypatch.setenv("KVBOOST_RISK_BOUND", "100")
    for order in ORDERS[:4]:
        greedy(kv.generate, prompt(order), 1).shadow.result(30)
    stats = kv.shadow.stats()
    assert stats.suspended is None
    assert stats.checks == 4
    assert 0 < stats.kl_p95 < 100


def test_a_full_queue_drops_checks_and_never_blocks() -> None:
    gate = threading.Event()

    def slow(ids: torch.Tensor) -> torch.Tensor:
        gate.wait(30)
        return torch.zeros(5)

    checks = Shadow(slow)
    offered = [checks.offer(torch.zeros(1, 3), torch.zeros(5), 1.0) for _ in range(shadow.MAX_WAITING + 2)]
    assert [o is None for o in offered] == [False] * shadow.MAX_WAITING + [True] * 2
    gate.set()
    assert [o.result(30).kl for o in offered if o is not None] == [0.0] * shadow.MAX_WAITING
    assert checks.stats().dropped == 2
    checks.close()


def test_checks_that_were_cancelled_wait_no_longer() -> None:
    gate, begun, cancelled = threading.Event(), threading.Event(), threading.Event()

    def slow(ids: torch.Tensor) -> torch.Tensor:
        begun.set()
        gate.wait(30)
        return torch.zeros(5)

    def offer() -> Any:
        return checks.offer(torch.zeros(1, 3), torch.zeros(5), 1.0)

    checks = Shadow(slow)
    offered = [offer() for _ in range(shadow.MAX_WAITING)]
    begun.wait(30)
    assert offered[-1].cancel()
    offered[-1] = offer()
    assert offered[-1] is not None, "there is room again"
    offered[-1].add_done_callback(lambda future: cancelled.set())
    closing = threading.Thread(target=checks.close)
    closing.start()
    assert cancelled.wait(30), "closing drops what waits, and waits for what runs"
    gate.set()
    closing.join(30)
    gate.clear()
    again = [offer() for _ in range(shadow.MAX_WAITING)]
    assert all(o is not None for o in again), "none of those before the end counts"
    gate.set()
    assert [o.result(30).kl for o in again] == [0.0] * shadow.MAX_WAITING
    checks.close()


def test_a_failing_check_is_counted_and_the_next_one_runs() -> None:
    answers = iter([RuntimeError("no memory"), torch.zeros(5)])

    def prefill(ids: torch.Tensor) -> torch.Tensor:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    checks = Shadow(prefill)
    failed = checks.offer(torch.zeros(1, 3), torch.zeros(5), 1.0)
    assert failed is not None
    with pytest.raises(RuntimeError, match="no memory"):
        failed.result(30)
    following = checks.offer(torch.zeros(1, 3), torch.zeros(5), 1.0)
    assert following is not None
    assert following.result(30).agrees
    assert (checks.stats().failed, checks.stats().checks) == (1, 1)
    checks.close()


def test_background_work_waits_while_a_request_runs() -> None:
    in_flight = InFlight()
    assert in_flight.wait_until_idle(0)
    with in_flight:
        assert not in_flight.wait_until_idle(0.01)
    assert in_flight.wait_until_idle(0)


def test_a_request_that_ends_after_the_interpreter_began_to_is_not_checked_and_does_not_fail() -> None:
    program = """
import threading
ending = threading.Event()
threading._register_atexit(ending.set)  # in front of the import: the last registered is called first
import torch
from kvboost.shadow import Shadow
checks = Shadow(lambda ids: torch.zeros(3))
def late():
    ending.wait(20)
    print(checks.offer(torch.zeros(1, 2), torch.zeros(3), 1.0), checks.stats().dropped)
threading.Thread(target=late).start()
"""
    source = str(Path(shadow.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "None 1"), ended.stderr
