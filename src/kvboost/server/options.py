"""What whoever starts the server decides, and what a client cannot change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Names, limits and keys of one server."""

    model_name: str
    aliases: tuple[str, ...] = ("tgi", "dummy")  # what TGI's and Hugging Face's clients call whatever is served
    api_keys: Path | None = None  # see `tenants`; None: everybody is one tenant
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 60.0  # in which a body must have arrived
    max_new_tokens: int = 4096  # the most that a request may ask for
    deadline_s: float | None = None  # for requests without a deadline of their own
