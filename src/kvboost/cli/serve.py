"""`kvboost serve`: OpenAI's and TGI's API over one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from kvboost.cli.console import note
from kvboost.cli.models import HUB_NAME, DTypeOption, ModelOption, open_engine
from kvboost.errors import InputError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kvboost.engine import KVBoost
    from kvboost.server import ServerOptions
    from kvboost.serving.scheduler import Scheduler

T = TypeVar("T")
FLUSH_S = 60.0


@dataclass(frozen=True, slots=True)
class Admin:
    """The administrators' port, None for none; its token; whether it may be open; how many prompts are kept."""

    port: int | None
    token: str | None
    open: bool
    keep: int


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the server listens; without a port of their own the metrics are on the main one if it has no tenants."""

    host: str
    port: int
    metrics_port: int | None
    admin: Admin


def run(
    model: ModelOption = None,
    dtype: DTypeOption = "auto",
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 for any free one.")] = 8080,
    model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What clients call the model. Default: its directory's name.")
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Tenants and the hashes of their keys. Default: no keys.")
    ] = None,
    slots: Annotated[int, typer.Option(metavar="N", min=1, help="Requests that are decoded together.")] = 8,
    queue: Annotated[int, typer.Option(metavar="N", min=1, help="Requests that may wait; more get a 429.")] = 64,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens that one answer may have at most.")
    ] = 4096,
    max_body_bytes: Annotated[
        int, typer.Option(metavar="N", min=1024, help="Largest body of a request; more gets a 413.")
    ] = 4 << 20,
    deadline_s: Annotated[
        float | None, typer.Option(metavar="S", min=0.001, help="Deadline of requests that bring none. Default: none.")
    ] = None,
    drain_s: Annotated[
        float, typer.Option(metavar="S", min=0, help="On SIGTERM, wait so long for the requests that run.")
    ] = 30.0,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, max=65535, help="Port of /metrics. Default: the main port, or none with --api-keys."
        ),
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="Port of the administrators. Default: none.")
    ] = None,
    admin_token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The token that administrators send.")
    ] = None,
    admin_without_token: Annotated[
        bool, typer.Option("--admin-without-token", help="Leave the admin port open; on a loopback address only.")
    ] = False,
    keep_requests: Annotated[
        int, typer.Option(metavar="N", min=0, help="Keep the last N prompts for the administrators' X-ray.")
    ] = 0,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(metavar="text|json", help="One line per event: for people, or JSON.")
    ] = "text",
) -> None:
    """Serve a model by HTTP until SIGTERM or Ctrl-C, then answer what was accepted and leave.

    It listens once the model is loaded. Text that one session brought is not moved into another's prompt, unless
    KVBOOST_SHARE_MOVED=namespace says so.
    """
    _require_extra()
    from kvboost.logs import configure_logging
    from kvboost.server import ServerOptions
    from kvboost.store.heap import keep_free_pages

    keep_free_pages()
    configure_logging(log_format)
    options = ServerOptions(
        model_name or Path(model or HUB_NAME).name,
        api_keys=api_keys,
        max_body_bytes=max_body_bytes,
        max_new_tokens=max_new_tokens,
        deadline_s=deadline_s,
    )
    admin = Admin(admin_port, _read_token(admin_token_file), admin_without_token, keep_requests)
    with _in_passing(lambda: open_engine(model, dtype, share_moved="session")) as kv:
        drained = _serve(kv, options, Listening(host, port, metrics_port, admin), slots, queue, drain_s)
        if not kv.flush(FLUSH_S):
            note(f"Not everything could be written to slower tiers within {FLUSH_S:.0f} s.")
    if not drained:
        note(f"Some requests had to be ended: they were not answered within {drain_s:g} s.")
        raise typer.Exit(1)


def _in_passing(work: Callable[[], T]) -> T:
    """The result of `work`, which is done in a thread that is gone afterwards.

    A thread that has computed keeps its team of OpenMP threads. Where all teams together have more threads than there
    are processors, libgomp lets none of them wait actively: with the main thread's beside the worker's, prefills took
    8 % longer.
    """
    with ThreadPoolExecutor(1) as passing:
        return passing.submit(work).result()


def _serve(kv: KVBoost, options: ServerOptions, where: Listening, slots: int, queue: int, drain_s: float) -> bool:
    """Listens, serves, drains; False if requests had to be ended."""
    import asyncio

    from kvboost.server import process
    from kvboost.serving.scheduler import Scheduler

    service = _in_passing(lambda: Scheduler(kv, slots=slots, queue=queue))
    try:
        with ExitStack() as sockets:
            sites = [
                process.Site(app, sockets.enter_context(process.listen(where.host, port)))
                for app, port in _apps(kv, service, options, where)
            ]
            listening = "listening on " + ", ".join(site.url for site in sites)
            return asyncio.run(
                process.run(sites, lambda: service.drain(drain_s), service.close, lambda: note(listening))
            )
    finally:
        service.close()


def _apps(kv: KVBoost, service: Scheduler, options: ServerOptions, where: Listening) -> Iterator[tuple[FastAPI, int]]:
    """Every application and its port: the clients', the metrics' and the administrators'."""
    from kvboost.metrics import Metrics
    from kvboost.server import make_app
    from kvboost.server.admin import make_admin_app
    from kvboost.server.app import make_metrics_app
    from kvboost.server.observing import Observing
    from kvboost.server.tenants import Caller
    from kvboost.server.xray import RequestRing

    metrics, ring = Metrics(kv, model=options.model_name, service_stats=service.stats), RequestRing(where.admin.keep)
    on_main = where.metrics_port is None and options.api_keys is None  # no key is asked for there
    shared = metrics.expose if on_main else None
    app = make_app(service, kv, options, observe=Observing(metrics, ring), expose=shared)
    yield app, where.port
    if where.metrics_port is not None:
        yield make_metrics_app(metrics.expose), where.metrics_port
    if where.admin.port is not None:
        admin = make_admin_app(
            kv,
            metrics,
            token=where.admin.token,
            host=where.host,
            without_token=where.admin.open,
            ring=ring,
            anyone={"session": app.state.backend.namespaces.session(Caller(), None, None)},
        )
        yield admin, where.admin.port


def _read_token(path: Path | None) -> str | None:
    """The token of a file, without the line's end. Raises `InputError` if it cannot be read or is empty."""
    if path is None:
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise InputError(f"the admin token in {path} cannot be read: {error}") from None
    if not token:
        raise InputError(f"the file {path} holds no admin token; write one into it")
    return token


def _require_extra() -> None:
    """Raises `InputError` with the line to install what is missing."""
    try:
        import fastapi
        import uvicorn
    except ModuleNotFoundError as error:
        raise InputError(f"serve needs {error.name}; install it with: pip install '.[server]'") from None
    del fastapi, uvicorn
