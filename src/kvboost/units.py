"""Sizes and durations as people write them: "2GiB", "250ms". Plain numbers are bytes and seconds."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, TypeAdapter, ValidationError

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([a-z]+)\s*")
_SIZE = TypeAdapter(ByteSize)


def parse_bytes(value: Any) -> Any:
    """Text with a unit as a number of bytes; everything else as it is. Raises `ValueError` for another unit."""
    if not isinstance(value, str) or _is_number(value):
        return value
    try:
        return int(_SIZE.validate_python(value.strip()))
    except ValidationError:
        raise ValueError('not a size; write a number of bytes, or one with a unit such as "2GiB" or "512MB"') from None


def parse_seconds(value: Any) -> Any:
    """Text with a unit as seconds; everything else as it is. Raises `ValueError` for another unit, inf and nan."""
    if isinstance(value, str) and not _is_number(value):
        match = _DURATION.fullmatch(value.lower())
        if match is None or match[2] not in SECONDS:
            raise ValueError(f"not a duration; write seconds, or a number with one of {', '.join(SECONDS)}")
        return float(match[1]) * SECONDS[match[2]]
    if _is_number(value) and not math.isfinite(float(value)):
        raise ValueError("not a duration: it must be finite")
    return value


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
