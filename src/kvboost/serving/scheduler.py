"""The service: one worker thread owns the model, and turns among the jobs that it works on.

    submit --> FairQueue --> prefilling --> decoding --> closed
               (bounded)     one block      one joint step        a turn of the worker: end what must end, let in
                             of one job     of all                what fits, one block, one step

So a long prompt costs the others one block a turn, never more. The event loop's side only passes messages (`stream`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from kvboost import prompts
from kvboost.engine import KVBoost
from kvboost.errors import InputError, KVBoostError
from kvboost.hf import declared
from kvboost.hf.crowd import Crowd
from kvboost.serving.answer import Answer
from kvboost.serving.job import Busy, FinishReason, Job, JobFailed, Piece, ServiceStats
from kvboost.serving.queueing import FairQueue
from kvboost.serving.sampling import check_sampling
from kvboost.serving.stream import Stream, Ticket
from kvboost.serving.text import TokenTexts

logger = logging.getLogger("kvboost")

LONGEST_RETRY_S = 60.0
QUIET_BLOCKS = 8  # that a prompt computes at once while no answer waits for it: smaller forwards cost more per row
GRACE_S = 30.0  # for the turn that ends what is left when a drain has timed out


class Scheduler:
    """`kvboost.serving.Service` over an engine. Close it when it is no longer needed, or `drain` it."""

    def __init__(self, engine: KVBoost, *, slots: int = 8, queue: int = 64, block_tokens: int = 256) -> None:
        """Works on `slots` jobs at a time, keeps up to `queue` waiting, and prefills `block_tokens` a turn.

        While no answer is under way that a block could hold up, `QUIET_BLOCKS` of them are computed at once.
        Raises `InputError` for a number below one.
        """
        for name, value in (("slots", slots), ("queue", queue), ("block_tokens", block_tokens)):
            if value < 1:
                raise InputError(f"{name} is {value}; a service needs at least 1")
        self.engine = engine
        self.slots = slots
        self.block_tokens = block_tokens
        self.max_positions: int | None = declared.max_positions(engine.model.config.get_text_config())
        self.crowd = Crowd(engine.model, engine.support) if engine.support.refused is None else None
        if self.crowd is not None and self.crowd.refused is not None:
            logger.warning("requests are decoded one by one for this model: %s", self.crowd.refused)
        self._texts = None if engine.tokenizer is None else TokenTexts(engine.tokenizer)
        self._vocabulary: int = engine.model.get_input_embeddings().weight.shape[0]
        self._changed = threading.Condition()  # guards all that follows
        self._queue = FairQueue(queue)
        self._active: deque[Answer] = deque()  # in the order in which their next block is due
        self._finished: Counter[str] = Counter()
        self._mean_job_s = 1.0
        self._draining = self._ending = self._closed = False
        self._worker = threading.Thread(target=self._run, name="kvboost-model", daemon=True)
        self._worker.start()

    # --- for the event loop -----------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Stream:
        """See `Service.submit`. An answer ends at `max_positions` at the latest, whatever was asked for."""
        prompts.checked(list(job.input_ids), self.engine.model)
        check_sampling(job.sampling, self._vocabulary, has_text=self._texts is not None)
        self.engine.settings(**job.settings)
        ticket = Ticket(job, self._wake)
        with self._changed:
            if self._draining or not self._queue.has_room(job.tenant):
                self._finished["refused"] += 1
                why = "the service is shutting down" if self._draining else f"{len(self._queue)} requests are waiting"
                raise Busy(f"{why}; try again later", self._retry_after_s())
            self._queue.push(ticket)
            self._changed.notify_all()
        return Stream(ticket)

    def stats(self) -> ServiceStats:
        """See `Service.stats`."""
        with self._changed:
            decoding = sum(a.is_decoding for a in self._active)
            return ServiceStats(
                queued=len(self._queue),
                prefilling=len(self._active) - decoding,
                decoding=decoding,
                slots=self.slots,
                draining=self._draining,
                finished=dict(self._finished),
            )

    async def drain(self, timeout_s: float) -> bool:
        """See `Service.drain`. Those that had to be ended hear `JobFailed`. Afterwards the service is closed."""
        with self._changed:
            self._draining = True
        done = await asyncio.to_thread(self._wait_until_idle, timeout_s)
        await asyncio.to_thread(self.close)
        return done

    def close(self) -> None:
        """Takes no more jobs, ends those accepted with `JobFailed`, and ends the worker. May be called twice."""
        with self._changed:
            self._draining = self._ending = True
            self._changed.notify_all()
        if threading.current_thread() is not self._worker:
            self._worker.join(GRACE_S)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait_until_idle(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._active and not len(self._queue), timeout_s)

    def _retry_after_s(self) -> float:
        """When a job that is queued now would begin, by how long jobs took lately."""
        waiting = (len(self._queue) + 1) * self._mean_job_s / self.slots
        return min(LONGEST_RETRY_S, max(1.0, waiting))

    # --- the worker -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._active or len(self._queue) or self._ending)
                if self._ending:
                    break
            try:
                self._turn()
            except Exception:  # of a turn, not of a job: whatever state that left must not be worked on
                logger.exception("the service failed; the requests that it was working on are ended")
                for answer in list(self._active):
                    self._end(answer, None, JobFailed("the service failed; see its log"))
        self._end_all()

    def _turn(self) -> None:
        """Ends what must end, lets in what fits, computes one block of one prompt and one token of every answer."""
        self._end_unwanted()
        self._admit()
        due = next((a for a in self._active if not a.is_decoding), None)
        if due is not None:
            quiet = not any(a.is_decoding for a in self._active)
            block_tokens = self.block_tokens * (QUIET_BLOCKS if quiet else 1)
            self._try(due, lambda: due.advance_prompt(block_tokens))
            with self._changed:
                if due in self._active:
                    self._active.remove(due)
                    self._active.append(due)
        self._decode([a for a in self._active if a.is_decoding and a is not due])
        for answer in list(self._active):
            if answer.finish_reason is not None:
                self._end(answer, answer.finish_reason)

    def _end_unwanted(self) -> None:
        with self._changed:
            for ticket in self._queue.remove(lambda t: t.cancelled or t.overdue):
                reason: FinishReason = "cancelled" if ticket.cancelled else "deadline"
                self._tell_end(ticket, reason, Piece("", finish_reason=reason))
        for answer in list(self._active):
            if answer.ticket.cancelled or answer.ticket.overdue:
                self._end(answer, "cancelled" if answer.ticket.cancelled else "deadline")

    def _tell_end(self, ticket: Ticket, reason: FinishReason, last: Piece) -> None:
        """Under the lock, so that who sees an idle service knows that all was told."""
        self._finished[reason] += 1
        ticket.send(last)
        self._changed.notify_all()

    def _admit(self) -> None:
        with self._changed:
            while len(self._active) < self.slots:
                ticket = self._queue.pop(Counter(a.ticket.job.tenant for a in self._active))
                if ticket is None:
                    return
                try:
                    self._active.append(Answer(self.engine, ticket, self._texts, self._limit(ticket.job)))
                except Exception as error:
                    self._fail(ticket, error)

    def _limit(self, job: Job) -> int:
        """New tokens at most: as asked for, and as the model has positions."""
        room = job.sampling.max_new_tokens
        return room if self.max_positions is None else min(room, self.max_positions - len(job.input_ids))

    def _decode(self, answers: Sequence[Answer]) -> None:
        """A token for each: jointly, and for models without plain cache rows one by one."""
        joint = [a for a in answers if a.slot is not None]
        for answer in answers:
            if answer.slot is None:
                self._try(answer, answer.step_alone)
        if not joint:
            return
        try:
            self._step(joint)
        except Exception:
            logger.exception("a joint step of %d requests failed; each is tried alone", len(joint))
            for answer in joint:
                self._try(answer, lambda answer=answer: self._step([answer]))  # type: ignore[misc]

    def _step(self, answers: Sequence[Answer]) -> None:
        crowd, slots = self.crowd, [a.slot for a in answers if a.slot is not None]
        if crowd is None:
            raise RuntimeError("a model without plain cache rows has no slots")
        logits = self.engine.with_memory(lambda: crowd.step(slots))
        for answer, row in zip(answers, logits, strict=True):
            self._try(answer, lambda answer=answer, row=row: answer.take(row))  # type: ignore[misc]

    def _try(self, answer: Answer, work: Callable[[], None]) -> None:
        """A job that fails ends alone."""
        try:
            work()
        except Exception as error:
            self._end(answer, None, error)

    def _end(self, answer: Answer, reason: FinishReason | None, error: Exception | None = None) -> None:
        """Closes an answer and frees its slot, whatever happens."""
        last = Piece("", finish_reason=reason)
        try:
            last = answer.close(reason)
        except Exception as failure:
            logger.exception("closing request %s failed", answer.ticket.job.request_id)
            error = error or failure
        with self._changed:
            self._active.remove(answer)
            took_s = time.perf_counter() - answer.began_at
            self._mean_job_s += 0.1 * (took_s - self._mean_job_s)
            if error is not None or reason is None:
                self._fail(answer.ticket, error or JobFailed("the request was ended"))
            else:
                self._tell_end(answer.ticket, reason, last)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        logger.error("request %s failed", ticket.job.request_id, exc_info=error)
        own = error if isinstance(error, KVBoostError) else JobFailed(f"the model failed: {type(error).__name__}")
        with self._changed:
            self._finished["failed"] += 1
            ticket.send(own)
            self._changed.notify_all()

    def _end_all(self) -> None:
        stopped = JobFailed("the service is shutting down")
        for answer in list(self._active):
            self._end(answer, None, stopped)
        with self._changed:
            rest = self._queue.remove(lambda ticket: True)
        for ticket in rest:
            self._fail(ticket, stopped)
