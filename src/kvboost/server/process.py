"""Runs applications on sockets until a signal, then drains: who was accepted is answered, who is new is turned away."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from kvboost.errors import SettingsError

LAST_BYTES_S = 5  # in which open connections get what is left for them once nothing runs any more


@dataclass(frozen=True, slots=True)
class Site:
    """An application and where it listens."""

    app: ASGIApp
    listener: socket.socket

    @property
    def url(self) -> str:
        """Where a client on this machine finds it."""
        host, port = self.listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Server(uvicorn.Server):
    """One of several servers of a process, so none of them may take the signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one. Raises `SettingsError` if the address cannot be had.

    Its connections send at once. asyncio sees to that only for sockets that were made with a protocol number, which
    these are not, and then every answer of two writes would wait 40 ms for the client's delayed acknowledgement.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise SettingsError(f"cannot listen on {host} port {port}: {error}; choose another --host or --port") from None


async def run(
    sites: Sequence[Site],
    drain: Callable[[], Awaitable[bool]],
    end: Callable[[], None],
    ready: Callable[[], None] = lambda: None,
) -> bool:
    """Serves until SIGTERM or SIGINT, then awaits `drain` while the sites still answer; a second signal calls `end`.

    `ready` is called once all listen. Returns what `drain` did, False if it was cut short.
    """
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    servers = [_Server(_config(site.app)) for site in sites]
    serving = [
        asyncio.create_task(server.serve(sockets=[site.listener])) for server, site in zip(servers, sites, strict=True)
    ]
    while not all(server.started for server in servers) and not any(task.done() for task in serving):
        await asyncio.sleep(0.01)
    ready()
    await _first(stop.wait(), *serving)
    drained = await _first(drain(), hurry.wait())
    if hurry.is_set():
        await asyncio.to_thread(end)
    for server in servers:
        server.should_exit, server.force_exit = True, hurry.is_set()
    await asyncio.gather(*serving)
    return bool(drained) and not hurry.is_set()


def _config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=LAST_BYTES_S
    )


async def _first(*waits: Awaitable[object]) -> object:
    """The result of the first that is done; coroutines among the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, wait in zip(tasks, waits, strict=True):
        if task is not wait:
            task.cancel()
    return next(iter(done)).result()
