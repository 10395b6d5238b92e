"""Log lines for machines and for people. They name requests by id, and never hold what a user wrote.

Nothing happens to logging until `configure_logging` is called; the library never does.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, Literal, TextIO

from pydantic import ValidationError

from kvboost.errors import InputError
from kvboost.types import ReuseReport

QUOTING = (ValidationError, InputError, UnicodeError, json.JSONDecodeError)  # whose messages may quote what was sent
requests_logger = logging.getLogger("kvboost.requests")
_request_id: ContextVar[str] = ContextVar("kvboost_request_id", default="")


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Lines logged inside, by this thread or task, name the request."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


def log_request(request_id: str, outcome: str, report: ReuseReport | None = None, **fields: Any) -> None:
    """One line about a request that has ended; `fields` must not hold what a user wrote."""
    told = {k: v for k, v in asdict(report).items() if v not in (None, {}, 0)} if report is not None else {}
    rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in told.items()}
    with request_context(request_id):
        requests_logger.info("request ended: %s", outcome, extra={"fields": {"outcome": outcome, **rounded, **fields}})


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, and request_id, fields and error where known."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, Any] = {
            "time": _time(record).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if _request_id.get():
            line["request_id"] = _request_id.get()
        line.update({k: v for k, v in _fields(record).items() if k not in line})
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = error_fields(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """The same for people: time, level, request id, message, fields, and the place of an error."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        head = f"{_time(record):%Y-%m-%d %H:%M:%S} {record.levelname:<7}"
        request_id = f" [{_request_id.get()}]" if _request_id.get() else ""
        fields = "".join(f" {k}={v}" for k, v in _fields(record).items())
        error = ""
        if record.exc_info and record.exc_info[1] is not None:
            told = error_fields(record.exc_info[1])
            error = f"\n  {told['type']}: {told['message']}" + "".join(f"\n    {frame}" for frame in told["frames"])
        return f"{head}{request_id} {record.getMessage()}{fields}{error}"


def configure_logging(
    style: Literal["json", "text"] = "text", level: int | str = logging.INFO, stream: TextIO | None = None
) -> None:
    """Sends all logging of the process to `stream` (standard error) in one form, uvicorn's too.

    uvicorn's own access lines are switched off: they hold the query, and so the prompt of an X-ray.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("kvboost").setLevel(logging.NOTSET)  # commands that are no servers keep it quiet
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = name != "uvicorn.access"


def error_fields(error: BaseException) -> dict[str, Any]:
    """Type, message and place of an error. A message that may quote what a user sent is left out."""
    frames = traceback.extract_tb(error.__traceback__)
    cause = error.__cause__ or error.__context__
    return {
        "type": type(error).__name__,
        "message": "(not told)" if isinstance(error, QUOTING) else str(error),
        "frames": [f"{f.filename}:{f.lineno} {f.name}" for f in frames],
        **({"cause": type(cause).__name__} if cause is not None else {}),
    }


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, timezone.utc)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return fields
