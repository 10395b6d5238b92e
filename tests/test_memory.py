"""What the cache really occupies, measured from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BUDGET_BYTES = 1 << 30
REQUESTS = 70


def soak(mode: str) -> list[int]:
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(root / "tests" / "soak.py"), mode, str(BUDGET_BYTES), str(REQUESTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return [int(n) for n in done.stdout.split()]


def test_a_full_cache_takes_no_more_resident_memory_than_its_budget() -> None:
    with_cache, used, evictions = soak("on")
    without, _, _ = soak("off")
    assert evictions > 0, "the budget was never felt"
    assert used > 0.9 * BUDGET_BYTES
    assert with_cache - without <= 1.05 * BUDGET_BYTES
