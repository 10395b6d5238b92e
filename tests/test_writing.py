"""The write-behind queue: bounded, never in a request's way, and nothing that was dropped is written."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.store.writing import Write, WriteBehind
from test_store import record

WAIT_S = 20.0


class Sink:
    """Collects what is written; while `gate` is closed, a write waits."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()

    def __call__(self, batch: Sequence[Write]) -> None:
        self.began.set()
        assert self.gate.wait(WAIT_S)
        self.written += [int(w.record.header.tokens[0]) for w in batch]


def write(number: int) -> Write:
    return Write(record(number))


def record_id(number: int) -> bytes:
    return record(number).header.record_id


def stalled(sink: Sink, queue: WriteBehind, number: int) -> None:
    """Lets the worker take `number` and wait inside its write."""
    sink.gate.clear()
    queue.offer(write(number))
    assert sink.began.wait(WAIT_S)


def test_writes_happen_in_order_in_another_thread() -> None:
    threads: set[int] = set()
    sink = Sink()
    queue = WriteBehind(lambda batch: (threads.add(threading.get_ident()), sink(batch))[0], 1 << 20)
    for number in range(20):
        assert queue.offer(write(number))
    assert queue.flush(WAIT_S)
    assert sink.written == list(range(20))
    assert threading.get_ident() not in threads
    assert queue.pending_bytes == 0


def test_a_full_queue_refuses_the_newest_at_once_and_counts_it() -> None:
    sink = Sink()
    size = record(0).num_bytes
    queue = WriteBehind(sink, 3 * size, batch_bytes=1)
    stalled(sink, queue, 0)
    assert [queue.offer(write(n)) for n in (1, 2, 3, 4)] == [True, True, False, False]
    assert queue.pending_bytes == 3 * size, "what is being written counts"
    assert queue.counts == {"queue_full": 2}
    sink.gate.set()
    assert queue.flush(WAIT_S)
    assert sink.written == [0, 1, 2]


def test_an_exception_costs_its_batch_only(caplog: pytest.LogCaptureFixture) -> None:
    written: list[int] = []

    def fail_on_one(batch: Sequence[Write]) -> None:
        number = int(batch[0].record.header.tokens[0])
        if number == 1:
            raise OSError("no space")
        written.append(number)

    queue = WriteBehind(fail_on_one, 1 << 20, batch_bytes=1)
    for number in range(3):
        queue.offer(write(number))
    assert queue.flush(WAIT_S)
    assert written == [0, 2]
    assert queue.counts == {"write_failed": 1}
    assert "no space" in caplog.text


def test_dropped_writes_never_happen() -> None:
    sink = Sink()
    queue = WriteBehind(sink, 1 << 20, batch_bytes=1)
    stalled(sink, queue, 0)
    for number in (1, 2, 3):
        queue.offer(write(number))
    assert queue.drop([record_id(2), record_id(9)]) == 1
    assert queue.pending_bytes == 3 * record(0).num_bytes
    sink.gate.set()
    assert queue.flush(WAIT_S)
    assert sink.written == [0, 1, 3]


@pytest.mark.parametrize("ids", [[record_id(0)], None])
def test_a_drop_waits_for_the_write_that_is_under_way(ids: list[bytes] | None) -> None:
    sink = Sink()
    queue = WriteBehind(sink, 1 << 20)
    stalled(sink, queue, 0)
    seen: list[list[int]] = []
    dropping = threading.Thread(target=lambda: (queue.drop(ids), seen.append(list(sink.written))))
    dropping.start()
    dropping.join(0.05)
    assert dropping.is_alive()
    sink.gate.set()
    dropping.join(WAIT_S)
    assert seen == [[0]], "when drop returns nothing is being written any more"


def test_flush_gives_up_when_its_time_is_over() -> None:
    sink = Sink()
    queue = WriteBehind(sink, 1 << 20)
    stalled(sink, queue, 0)
    assert not queue.flush(0.01)
    sink.gate.set()
    assert queue.flush(WAIT_S)


def test_close_writes_what_is_queued_and_takes_no_more() -> None:
    sink = Sink()
    queue = WriteBehind(sink, 1 << 20)
    for number in range(5):
        queue.offer(write(number))
    assert queue.close(WAIT_S)
    assert sink.written == list(range(5))
    assert not queue.offer(write(6))
    assert queue.counts["queue_closed"] == 1
    assert queue.close(WAIT_S), "twice is once"


def test_close_without_time_says_that_records_were_lost() -> None:
    sink = Sink()
    queue = WriteBehind(sink, 1 << 20, batch_bytes=1)
    stalled(sink, queue, 0)
    queue.offer(write(1))
    assert not queue.close(0.01)
    assert queue.counts["queue_closed"] == 1
    sink.gate.set()
    assert queue.flush(WAIT_S)
    assert sink.written == [0]


def test_an_idle_worker_holds_no_record_and_ends_so_that_the_store_can_be_freed() -> None:
    sink = Sink()
    queue = WriteBehind(sink, 1 << 20, idle_s=0.05)
    chunk = record(1)
    alive = weakref.ref(chunk.payload[0].keys)
    queue.offer(Write(chunk))
    assert queue.flush(WAIT_S)
    worker = next((t for t in threading.enumerate() if t.name == "kvboost-write-behind"), None)
    del chunk
    gc.collect()
    assert alive() is None
    if worker is not None:
        worker.join(WAIT_S)
        assert not worker.is_alive()
    assert queue.offer(write(2)), "the next offer starts another"
    assert queue.flush(WAIT_S)
    assert sink.written == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_its_own_and_not_its_parents() -> None:
    sink = Sink()
    queue = WriteBehind(sink, 1 << 20, batch_bytes=1)
    stalled(sink, queue, 0)
    queue.offer(write(1))
    child = os.fork()
    if child == 0:
        mine = Sink()
        queue._write = mine
        ok = queue.pending_bytes == 0 and queue.offer(write(2)) and queue.flush(WAIT_S) and mine.written == [2]
        os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sink.gate.set()
    assert queue.flush(WAIT_S)
    assert sink.written == [0, 1]


def test_a_process_that_ends_writes_what_it_has_queued(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[1]
    program = """
import sys, time
from test_store import record
from kvboost.store.writing import Write, WriteBehind
def slowly(batch):
    time.sleep(0.2)
    open(sys.argv[1], "a").write(str(batch[0].record.header.tokens[0]))
queue = WriteBehind(slowly, 1 << 20, batch_bytes=1)
for number in range(3):
    queue.offer(Write(record(number)))
"""
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "written")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "written").read_text() == "012"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["offer", "drop", "drop all", "flush"]), st.integers(0, 5)), max_size=40))
def test_after_any_calls_everything_was_written_refused_or_dropped(calls: list[tuple[str, int]]) -> None:
    sink = Sink()
    queue = WriteBehind(sink, 4 * record(0).num_bytes, batch_bytes=2 * record(0).num_bytes, idle_s=0.001)
    taken, dropped = 0, 0
    for action, number in calls:
        if action == "offer":
            taken += queue.offer(write(number))
        elif action == "flush":
            assert queue.flush(WAIT_S)
        else:
            dropped += queue.drop(None if action == "drop all" else [record_id(number)])
        assert 0 <= queue.pending_bytes <= queue.bytes_limit
    assert queue.close(WAIT_S)
    assert len(sink.written) + dropped == taken
    assert queue.pending_bytes == 0
