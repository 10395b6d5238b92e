"""Many requests over one engine: decoded together, fairly queued. What the HTTP server stands on; no HTTP here."""

from kvboost.serving.job import Busy, Job, JobFailed, Piece, Sampling, Service, ServiceStats, Token

__all__ = ["Busy", "Job", "JobFailed", "Piece", "Sampling", "Service", "ServiceStats", "Token"]
