"""What the cache really occupies, measured from outside."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

BUDGET_BYTES = 1 << 30
REQUESTS = 70
BLOCKS = """
from kvboost.store.heap import keep_free_pages, return_free_pages

def resident_mib():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024

kept, before = keep_free_pages(), resident_mib()
blocks = [b"x" * (1 << 20) for _ in range(200)]
del blocks
freed = resident_mib() - before
return_free_pages()
print(kept, freed, resident_mib() - before)
"""


def run_python(*arguments: str, **environment: str) -> list[str]:
    root = Path(__file__).resolve().parents[1]
    inherited = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=inherited, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def soak(mode: str) -> list[int]:
    path = Path(__file__).with_name("soak.py")
    return [int(n) for n in run_python(str(path), mode, str(BUDGET_BYTES), str(REQUESTS))]


def test_a_full_cache_takes_no_more_resident_memory_than_its_budget() -> None:
    with_cache, used, evictions = soak("on")
    without, _, _ = soak("off")
    assert evictions > 0, "the budget was never felt"
    assert used > 0.9 * BUDGET_BYTES
    assert with_cache - without <= 1.05 * BUDGET_BYTES


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_a_server_keeps_freed_pages_until_they_are_given_back() -> None:
    kept, freed, returned = run_python("-c", BLOCKS)
    assert kept == "True"
    assert float(freed) > 190
    assert float(returned) < 20


def test_a_heap_that_the_environment_tunes_is_left_alone() -> None:
    kept, freed, _ = run_python("-c", BLOCKS, MALLOC_TRIM_THRESHOLD_="65536")
    assert kept == "False"
    assert float(freed) < 20
