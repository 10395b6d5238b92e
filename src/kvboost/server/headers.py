"""The request headers that steer one request, validated."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping
from typing import Any

from kvboost.server.errors import bad

REQUEST_ID = "x-request-id"
ENABLED = "x-kvboost-enabled"
FIDELITY = "x-kvboost-fidelity"
SESSION = "x-kvboost-session"
TIMEOUT = "x-request-timeout-s"
LONGEST_TIMEOUT_S = 86400.0

_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_FIDELITIES = ("exact", "balanced", "fast")


def request_id(headers: Mapping[str, str]) -> str:
    """The client's id of the request, or a new one. Raises a 400 for an id that no log should hold."""
    given = headers.get(REQUEST_ID)
    if given is None:
        return uuid.uuid4().hex
    if _ID.fullmatch(given) is None:
        raise bad(f"{REQUEST_ID} must be 1 to 128 letters, digits or ._:@/+=-", REQUEST_ID)
    return given


def settings(headers: Mapping[str, str]) -> dict[str, Any]:
    """Settings of KVBoost that the headers choose. They win over the body: a gateway sets them."""
    chosen: dict[str, Any] = {}
    fidelity = headers.get(FIDELITY)
    if fidelity is not None:
        if fidelity.strip().lower() not in _FIDELITIES:
            raise bad(f"{FIDELITY} must be one of {', '.join(_FIDELITIES)}", FIDELITY)
        chosen["fidelity"] = fidelity.strip().lower()
    return chosen


def session(headers: Mapping[str, str]) -> str | None:
    """The client's session; None if it does not say."""
    given = headers.get(SESSION)
    if given is not None and not 1 <= len(given) <= 256:
        raise bad(f"{SESSION} must have 1 to 256 characters", SESSION)
    return given


def deadline_s(headers: Mapping[str, str], default: float | None) -> float | None:
    """Seconds in which the whole answer must be there."""
    given = headers.get(TIMEOUT)
    if given is None:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_TIMEOUT_S:
        raise bad(f"{TIMEOUT} must be a number of seconds above 0, at most {LONGEST_TIMEOUT_S:.0f}", TIMEOUT)
    return seconds
