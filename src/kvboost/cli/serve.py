"""`kvboost serve`: OpenAI's and TGI's API over one model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvboost.cli.console import note
from kvboost.cli.models import HUB_NAME, DTypeOption, ModelOption, open_engine
from kvboost.errors import InputError

if TYPE_CHECKING:
    from kvboost.engine import KVBoost
    from kvboost.server import ServerOptions

FLUSH_S = 60.0


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
) -> None:
    """Serve a model by HTTP until SIGTERM or Ctrl-C, then answer what was accepted and leave.

    It listens once the model is loaded. Text that one session brought is not moved into another's prompt, unless
    KVBOOST_SHARE_MOVED=namespace says so.
    """
    _require_extra()
    from kvboost.server import ServerOptions

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("kvboost").setLevel(logging.INFO)
    options = ServerOptions(
        model_name or Path(model or HUB_NAME).name,
        api_keys=api_keys,
        max_body_bytes=max_body_bytes,
        max_new_tokens=max_new_tokens,
        deadline_s=deadline_s,
    )
    with open_engine(model, dtype, share_moved="session") as kv:
        drained = _serve(kv, options, host, port, slots, queue, drain_s)
        if not kv.flush(FLUSH_S):
            note(f"Not everything could be written to slower tiers within {FLUSH_S:.0f} s.")
    if not drained:
        note(f"Some requests had to be ended: they were not answered within {drain_s:g} s.")
        raise typer.Exit(1)


def _serve(kv: KVBoost, options: ServerOptions, host: str, port: int, slots: int, queue: int, drain_s: float) -> bool:
    """Listens, serves, drains; False if requests had to be ended."""
    import asyncio

    from kvboost.server import make_app, process
    from kvboost.serving.scheduler import Scheduler

    service = Scheduler(kv, slots=slots, queue=queue)
    try:
        with process.listen(host, port) as listener:
            site = process.Site(make_app(service, kv, options), listener)
            listening = f"listening on {site.url}"
            return asyncio.run(
                process.run([site], lambda: service.drain(drain_s), service.close, lambda: note(listening))
            )
    finally:
        service.close()


def _require_extra() -> None:
    """Raises `InputError` with the line to install what is missing."""
    try:
        import fastapi
        import uvicorn
    except ModuleNotFoundError as error:
        raise InputError(f"serve needs {error.name}; install it with: pip install 'kvboost[server]'") from None
    del fastapi, uvicorn
