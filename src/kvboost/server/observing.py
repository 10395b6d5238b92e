"""What is told of a request that has ended: to the metrics, the log, the tracer, and the ring of the X-ray."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvboost.logs import log_request
from kvboost.metrics import Metrics
from kvboost.server.xray import RequestRing
from kvboost.serving import Job, Piece
from kvboost.tracing import trace_request


@dataclass(frozen=True, slots=True)
class Observing:
    """An `Observer` of jobs, see `kvboost.server.running`. Never tells what a user wrote, but for the ring."""

    metrics: Metrics
    ring: RequestRing

    def __call__(self, job: Job, last: Piece) -> None:
        """Tells of `job`, whose `last` piece has its report; a job that was never answered has none."""
        log_request(job.request_id, last.finish_reason or "failed", last.report)
        if last.report is None:
            return
        self.metrics.observe(last.report)
        whose = {"namespace": job.settings.get("cache_salt", ""), "session": job.settings.get("session", "")}
        self.ring.add(job.request_id, job.input_ids, last.plan, last.report, **whose)
        ended_at_s = time.time()
        started_at_s = ended_at_s - last.report.ttft_s - last.report.decode_s
        trace_request(last.report, request_id=job.request_id, started_at_s=started_at_s, ended_at_s=ended_at_s)
