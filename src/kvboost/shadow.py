"""Shadow verification: a share of the requests with inexact rows is prefilled in full afterwards, and compared.

One worker thread, at low priority: it computes in blocks, gives way to requests between them, and keeps a short queue
that rather drops a check than delays an answer. What it measures decides whether inexact reuse goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

logger = logging.getLogger("kvboost")

WINDOW = 64  # checks over which the tail is taken
MIN_CHECKS = 8  # fewer say nothing about a tail
MAX_WAITING = 4


@dataclass(frozen=True, slots=True)
class ShadowResult:
    """One request, measured against a full prefill: KL of the first token in nat, and whether the top token agrees."""

    kl: float
    agrees: bool
    bound: float  # what the request's settings tolerate, nat


@dataclass(frozen=True, slots=True)
class ShadowStats:
    """A snapshot. `kl_p95` is over the last `WINDOW` checks, nan before the first."""

    checks: int
    dropped: int
    failed: int
    kl_p95: float
    agreement: float
    suspended: str | None


class Shadow:
    """Checks and their record. Thread-safe."""

    def __init__(self, prefill: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`prefill` computes the last logits [V] of a prompt [1, T] in full, and gives way to requests meanwhile."""
        self._prefill = prefill
        self._lock = threading.Lock()
        self._recent: deque[ShadowResult] = deque(maxlen=WINDOW)
        self._workers: ThreadPoolExecutor | None = None
        self._waiting = self._checks = self._dropped = self._failed = 0
        self._suspended: str | None = None

    @property
    def suspended(self) -> str | None:
        """Why inexact rows must not be served now, or None."""
        return self._suspended

    def offer(self, input_ids: torch.Tensor, logits: torch.Tensor, bound: float) -> Future[ShadowResult] | None:
        """Queues the check of a prompt [1, T] that was answered from `logits` [V].

        None if the queue is full, or if no thread can be had (the process ends): the request has its answer already.
        """
        with self._lock:
            if self._waiting >= MAX_WAITING:
                self._dropped += 1
                return None
            try:
                if self._workers is None:
                    self._workers = ThreadPoolExecutor(1, thread_name_prefix="kvboost-shadow")
                queued = self._workers.submit(self._check, input_ids, logits, bound)
            except RuntimeError:
                self._dropped += 1
                return None
            self._waiting += 1
        queued.add_done_callback(self._note_cancelled)
        return queued

    def resume(self) -> None:
        """Forgets what was measured and lets inexact rows be served again."""
        with self._lock:
            self._recent.clear()
            self._suspended = None

    def stats(self) -> ShadowStats:
        """A consistent snapshot."""
        with self._lock:
            kl = [r.kl for r in self._recent]
            agreement = float(np.mean([r.agrees for r in self._recent])) if kl else float("nan")
            p95 = float(np.quantile(kl, 0.95)) if kl else float("nan")
            return ShadowStats(self._checks, self._dropped, self._failed, p95, agreement, self._suspended)

    def close(self) -> None:
        """Drops what waits and ends the worker after the check that it runs."""
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown(wait=True, cancel_futures=True)

    def _note_cancelled(self, queued: Future[ShadowResult]) -> None:
        """A check that was cancelled, by `close` or whoever holds its future, waits no longer."""
        if queued.cancelled():
            with self._lock:
                self._waiting -= 1
                self._dropped += 1

    def _check(self, input_ids: torch.Tensor, logits: torch.Tensor, bound: float) -> ShadowResult:
        try:
            result = compare(self._prefill(input_ids), logits, bound)
        except Exception:
            with self._lock:
                self._failed += 1
                self._waiting -= 1
            logger.exception("a shadow prefill of %d tokens failed", input_ids.shape[1])
            raise
        with self._lock:
            self._waiting -= 1
            self._checks += 1
            self._recent.append(result)
            self._judge()
        return result

    def _judge(self) -> None:
        """Suspends when the tail of what was measured leaves what was promised. The lock is held."""
        if self._suspended is not None or len(self._recent) < MIN_CHECKS:
            return
        over = float(np.quantile([r.kl - r.bound for r in self._recent], 0.95))
        if over > 0:
            self._suspended = (
                f"inexact reuse is suspended: the p95 of the last {len(self._recent)} shadow checks (KL of the first "
                f"token) is {over:.3g} nat above its bound; exact reuse goes on. See what changed, then call resume()"
            )
            logger.error(self._suspended)


def compare(truth: torch.Tensor, ours: torch.Tensor, bound: float) -> ShadowResult:
    """KL(truth || ours) of next-token distributions from logits [V]."""
    kl = max(0.0, float(kl_divergence(truth, ours)))
    return ShadowResult(kl, bool(truth.argmax() == ours.argmax()), bound)


def kl_divergence(truth: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """KL(truth || ours) of next-token distributions from logits [..., V], in nat [...]."""
    p, q = truth.float().log_softmax(-1), ours.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)
