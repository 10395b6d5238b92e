"""Log lines and spans: what they tell of a request, and that they never tell what a user wrote."""

from __future__ import annotations

import io
import itertools
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from pydantic import BaseModel

from kvboost import InputError, KVBoost
from kvboost.hf.loading import load_model
from kvboost.logs import configure_logging, log_request, request_context
from kvboost.tracing import stages, trace_request
from kvboost.types import ReuseReport

REPORT = ReuseReport(
    100,
    exact_tokens=60,
    moved_tokens=30,
    repaired_tokens=6,
    fresh_tokens=10,
    lookup_s=0.01,
    load_s=0.02,
    prefill_s=0.3,
    ttft_s=0.5,
    fallback="out of memory",
)
SECRET_TEXT = "my grandmother's recipe"


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """Everything that is logged as JSON from now on; logging is as it was afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logging("json", logging.DEBUG, stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("uvicorn.access").propagate = True


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_that_names_the_request(logged: io.StringIO) -> None:
    with request_context("r1"):
        logging.getLogger("kvboost").warning("two\nlines of %s", "text")
    logging.getLogger("uvicorn.error").info("started")
    first, second = lines(logged)
    assert first["message"] == "two\nlines of text"
    assert (first["level"], first["logger"], first["request_id"]) == ("warning", "kvboost", "r1")
    assert first["time"].endswith("Z")
    assert "request_id" not in second


def test_a_request_that_has_ended_is_one_line_with_its_counts(logged: io.StringIO) -> None:
    log_request("r2", "eos", REPORT, status=200)
    (line,) = lines(logged)
    assert (line["request_id"], line["outcome"], line["status"]) == ("r2", "eos", 200)
    assert (line["exact_tokens"], line["moved_tokens"], line["ttft_s"]) == (60, 30, 0.5)


def test_a_field_cannot_replace_what_the_line_itself_says(logged: io.StringIO) -> None:
    log_request("r3", "eos", message="forged", level="forged")
    assert lines(logged)[0]["level"] == "info"


class _Model(BaseModel):
    number: int


@pytest.mark.parametrize("quotes", [True, False])
def test_an_error_tells_its_place_but_no_message_that_may_quote_a_user(logged: io.StringIO, quotes: bool) -> None:
    def fail() -> None:
        if quotes:
            _Model(number=SECRET_TEXT)  # type: ignore[arg-type]
        raise RuntimeError("the disk is full")

    try:
        fail()
    except (RuntimeError, ValueError):
        logging.getLogger("kvboost").exception("it failed")
    error = lines(logged)[0]["error"]
    assert error["message"] == ("(not told)" if quotes else "the disk is full")
    assert any(frame.endswith(" fail") for frame in error["frames"])
    assert SECRET_TEXT not in logged.getvalue()


def test_access_lines_of_uvicorn_are_off(logged: io.StringIO) -> None:
    logging.getLogger("uvicorn.access").info('"GET /admin/xray?text=%s HTTP/1.1" 200', SECRET_TEXT)
    assert logged.getvalue() == ""


def test_no_log_line_of_a_request_holds_its_prompt(
    shared_data: Path, logged: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = load_model(shared_data / "models" / "stories260K-llama")
    with KVBoost(model, tokenizer) as kv:

        def ask(**settings: Any) -> None:
            kv.generate(f"Once upon a time {SECRET_TEXT} " * 4, max_new_tokens=2, do_sample=False, **settings)

        for settings in ({}, {}, {"mode": "observe"}, {"mode": "off"}, {"cache_salt": SECRET_TEXT}):
            ask(**settings)
        with monkeypatch.context() as broken:
            broken.setattr(kv.store, "find", lambda names: 1 / 0)
            ask()
        with pytest.raises(InputError):
            kv.generate([{"role": "user", "content": SECRET_TEXT}])
    assert any("error" in line for line in lines(logged)), "the failure was logged"
    assert "grandmother" not in logged.getvalue()


def test_lines_for_people_tell_the_same(logged: io.StringIO) -> None:
    configure_logging("text", logging.INFO, logged)
    try:
        raise OSError("gone")
    except OSError:
        with request_context("r4"):
            logging.getLogger("kvboost").exception("it failed")
    log_request("r5", "eos", REPORT)
    text = logged.getvalue()
    assert "ERROR   [r4] it failed\n  OSError: gone\n" in text
    assert "[r5] request ended: eos outcome=eos prompt_tokens=100" in text


# --- spans -----------------------------------------------------------------------------------------------------------


class RecordedSpan(trace.NonRecordingSpan):
    def __init__(self, name: str, parent: Any, attributes: Any, started_ns: int) -> None:
        number = len(name)
        super().__init__(trace.SpanContext(7, number, False))
        self.name, self.parent, self.attributes, self.started_ns = name, parent, attributes or {}, started_ns
        self.ended_ns: int | None = None

    def end(self, end_time: int | None = None) -> None:
        self.ended_ns = end_time


class RecordingTracer(trace.Tracer):
    """OpenTelemetry's own interface, without its SDK."""

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def start_span(self, name: str, context: Any = None, *args: Any, **kwargs: Any) -> RecordedSpan:
        parent = trace.get_current_span(context) if context is not None else None
        self.spans.append(RecordedSpan(name, parent, kwargs.get("attributes"), kwargs["start_time"]))
        return self.spans[-1]

    @contextmanager
    def start_as_current_span(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield self.start_span(*args, **kwargs)


def test_a_request_becomes_a_span_with_its_stages_inside() -> None:
    tracer = RecordingTracer()
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"Traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    assert trace_request(REPORT, request_id="r", started_at_s=1000, ended_at_s=1002, headers=headers, tracer=tracer)
    whole, *inside = tracer.spans
    assert format(whole.parent.get_span_context().trace_id, "032x") == trace_id
    assert whole.attributes["kvboost.exact_tokens"] == 60
    assert whole.attributes["kvboost.fallback"] == "out of memory"
    assert "kvboost.risk" not in whole.attributes
    assert [s.name for s in inside] == [f"kvboost.{n}" for n in ("wait", "lookup", "load", "prefill", "decode")]
    assert all(s.parent is whole for s in inside)
    assert (whole.started_ns, whole.ended_ns) == (1000 * 10**9, 1002 * 10**9)
    assert inside[-1].ended_ns == whole.ended_ns


def test_stages_stand_one_behind_the_other_and_cover_the_request() -> None:
    found = list(stages(REPORT, 10.0, 12.0))
    assert found[0] == ("wait", 10.0, pytest.approx(10.17))
    for (_, _, stop), (_, start, _) in itertools.pairwise(found):
        assert start == pytest.approx(stop)
    assert found[-1] == ("decode", pytest.approx(10.5), 12.0)


def test_without_a_tracer_set_up_nothing_is_emitted_and_nothing_fails() -> None:
    assert trace_request(REPORT, request_id="r", started_at_s=1, ended_at_s=2)


def test_a_server_logs_what_other_commands_keep_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("kvboost").setLevel(logging.ERROR)  # as `silence_libraries` does for every command
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging("json", stream=sys.stderr)
        log_request("a1", "stop")
        assert json.loads(capsys.readouterr().err)["request_id"] == "a1"
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
