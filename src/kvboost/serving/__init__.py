"""Many requests over one engine: decoded together, fairly queued. What the HTTP server stands on; no HTTP here.

`kvboost.serving.scheduler.Scheduler` is the `Service` over an engine. It is not imported here, since it loads torch.
"""

from kvboost.serving.job import Busy, Job, JobFailed, Piece, Sampling, Service, ServiceStats, Token

__all__ = ["Busy", "Job", "JobFailed", "Piece", "Sampling", "Service", "ServiceStats", "Token"]
