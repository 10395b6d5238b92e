"""A process forks while another of its threads holds a lock of the store: the child must not wait for that thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvboost.store import MemoryTier, TieredStore
from kvboost.store.breaker import Breaker
from kvboost.store.recent import Recent
from test_store import holds, record

WAIT_S = 20.0

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


def ends_well(child: int) -> bool:
    """Whether a child ends with 0; one that hangs is killed."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def fork_while_held(lock: Any, release: threading.Event, use: Callable[[], bool]) -> bool:
    """Forks while another thread holds `lock` until `release`, at most for a moment; whether the child can go on."""
    taken = threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            release.wait(0.5)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if use() else 1)
    release.set()
    thread.join()
    return ends_well(child)


def test_a_child_reads_memory_that_another_thread_of_its_parent_was_writing() -> None:
    tier = MemoryTier(1 << 20)
    tier.put_many([record(1)])
    assert fork_while_held(tier._lock, threading.Event(), lambda: holds(tier, 1))
    assert holds(tier, 1)


@pytest.mark.parametrize("make", [lambda: TieredStore([MemoryTier(1 << 20)]), Breaker, lambda: Recent(1, 1.0)])
def test_a_child_has_locks_of_its_own(make: Callable[[], Any]) -> None:
    owner = make()
    assert fork_while_held(owner._lock, threading.Event(), lambda: bool(owner._lock.acquire(timeout=WAIT_S / 2)))
