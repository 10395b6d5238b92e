"""Write-behind: records go to the slower tiers after the answer, in one thread, through a queue bounded in bytes.

Who calls what in which thread:

    request   offer(write)                  never waits; a full queue refuses the newest
    anybody   drop(ids), flush, close       may wait for the batch that is being written
    worker    write(batch)                  started by the first offer, ends when idle
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvboost.types import ChunkKV

logger = logging.getLogger(__name__)

BATCH_BYTES = 32 << 20  # handed to `write` at once
IDLE_S = 10.0  # an idle worker ends after this, so that a store nobody uses can be freed
EXIT_S = 5.0  # that a process waits at its end for what is still queued

Encode = Callable[[ChunkKV], ChunkKV]


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """A record on its way to the lower tiers, and how it is made smaller before."""

    record: ChunkKV
    encode: Encode | None = None


class WriteBehind:
    """A queue of at most `bytes_limit` bytes, the batch that is being written included, and its worker. Thread-safe.

    A forked child has an empty queue and starts a worker of its own: what was queued is the parent's to write.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Write]], None],
        bytes_limit: int,
        *,
        batch_bytes: int = BATCH_BYTES,
        idle_s: float = IDLE_S,
    ) -> None:
        self.bytes_limit = bytes_limit
        self._write = write
        self._batch_bytes = batch_bytes
        self._idle_s = idle_s
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._pid = 0
        self._changed = threading.Condition()
        self._queue: deque[Write] = deque()
        self._current: Sequence[Write] = ()  # being written
        self._bytes = 0
        self._thread: threading.Thread | None = None
        self._check_fork()

    @property
    def pending_bytes(self) -> int:
        """Bytes of the records that are queued or being written."""
        self._check_fork()
        with self._changed:
            return self._bytes

    @property
    def counts(self) -> Mapping[str, int]:
        """Records that were not written: `queue_full`, `queue_closed`, and `write_failed` by an exception."""
        self._check_fork()
        with self._changed:
            return dict(self._counts)

    def pending(self) -> list[Write]:
        """What is queued or being written, oldest first."""
        self._check_fork()
        with self._changed:
            return [*self._current, *self._queue]

    def offer(self, write: Write) -> bool:
        """Queues a write. False, and counted, if it does not fit or the queue is closed. Never waits for a write."""
        self._check_fork()
        size = write.record.num_bytes
        with self._changed:
            if self._closed or self._bytes + size > self.bytes_limit:
                self._counts["queue_closed" if self._closed else "queue_full"] += 1
                return False
            self._queue.append(write)
            self._bytes += size
            if self._thread is None:
                self._start()
            self._changed.notify_all()
            return True

    def drop(self, record_ids: Sequence[bytes] | None = None) -> int:
        """Takes writes of these records, or all with `None`, out of the queue; returns how many.

        Waits for the batch that is being written if it holds one of them. After that nothing queued before is written.
        """
        self._check_fork()
        doomed = None if record_ids is None else set(record_ids)
        with self._changed:
            kept = [w for w in self._queue if doomed is not None and w.record.header.record_id not in doomed]
            dropped = len(self._queue) - len(kept)
            self._queue = deque(kept)
            self._bytes = sum(w.record.num_bytes for w in (*self._current, *kept))
            batch = self._current
            if any(doomed is None or w.record.header.record_id in doomed for w in batch):
                self._changed.wait_for(lambda: self._current is not batch)
            self._changed.notify_all()
        return dropped

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is queued or being written; False if that takes longer than `timeout_s`."""
        self._check_fork()
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._current, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Takes no more writes, and writes what is queued; False if some was lost for lack of time. Twice is once."""
        self._check_fork()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
            thread = self._thread
            done = self._changed.wait_for(lambda: not self._queue and not self._current, timeout_s)
            self._counts["queue_closed"] += len(self._queue)
            self._queue.clear()
            self._bytes = sum(w.record.num_bytes for w in self._current)
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            # it lets go of its last records after it told: tensors freed while the interpreter ends abort the process
            thread.join(max(0.0, deadline - time.monotonic()))
        return done

    def _check_fork(self) -> None:
        if self._pid != os.getpid():  # the parent's lock may be held for ever here
            self._pid, self._changed, self._thread = os.getpid(), threading.Condition(), None
            self._queue, self._current, self._bytes = deque(), (), 0

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="kvboost-write-behind", daemon=True)
        thread.start()
        self._thread = thread
        _running.add(self)

    def _run(self) -> None:
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Writes one batch; False when the worker is to end. No record is held by the thread between two calls."""
        batch = self._take()
        if not batch:
            return False
        try:
            self._write(batch)
        except Exception:
            logger.exception("writing %d records behind failed; they stay in memory only", len(batch))
            with self._changed:
                self._counts["write_failed"] += len(batch)
        finally:
            with self._changed:
                self._current = ()
                self._bytes -= sum(w.record.num_bytes for w in batch)
                self._changed.notify_all()
        return True

    def _take(self) -> Sequence[Write]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed, self._idle_s)
            batch: list[Write] = []
            size = 0
            while self._queue and (not batch or size + self._queue[0].record.num_bytes <= self._batch_bytes):
                batch.append(self._queue.popleft())
                size += batch[-1].record.num_bytes
            self._current = batch
            if not batch:
                self._thread = None
            return batch


_running: weakref.WeakSet[WriteBehind] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A process that ends writes what it has queued: a command that warms a text wants it to last."""
    for queue in list(_running):
        if not queue.close(EXIT_S):
            logger.warning("the process ends with records that were not written to the slower tiers")
