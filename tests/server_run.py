"""A real server on a free port of this machine, and the small trained model that it serves in tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from kvboost import KVBoost
from kvboost.server.process import listen
from kvboost.serving.scheduler import Scheduler

# the model's tokenizer has none; this one takes tools and joins what is said
CHAT_TEMPLATE = (
    "{% if tools %}{% for t in tools %}Tool {{ t.function.name }}. {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    " {% endfor %}"
)
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her friends. "
    "One day, she saw a big red ball. She wanted to play with it, but it was too high in the tree. "
    "Lily asked her mom to help her. Her mom said yes and they got the ball. "
)


def stories(shared_data: Path, **flags: Any) -> KVBoost:
    kv = KVBoost.from_pretrained(shared_data / "models" / "stories260K-llama", **flags)
    kv.tokenizer.chat_template = CHAT_TEMPLATE
    return kv


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The base URL of `app`, served until the block ends."""
    with listen("127.0.0.1", 0) as listener:
        config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            eventually(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def eventually(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Waits until something that another thread does is done."""
    until = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


def get(url: str, **more: Any) -> httpx.Response:
    return httpx.get(url, timeout=60, verify=False, **more)  # nothing to verify, and reading certificates takes long


def post(url: str, **more: Any) -> httpx.Response:
    return httpx.post(url, timeout=60, verify=False, **more)


class RawReply:
    """Status, headers and body of a response that was read from a socket."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}


def address(base_url: str) -> tuple[str, int]:
    host, _, port = base_url.removeprefix("http://").partition(":")
    return host, int(port)


def exchange(url: str, data: bytes) -> RawReply:
    """Sends bytes and reads until the server closes or falls silent."""
    with socket.create_connection(address(url)) as connection:
        connection.settimeout(10)
        connection.sendall(data)
        heard = b""
        while part := connection.recv(65536):
            heard += part
            head, _, rest = heard.partition(b"\r\n\r\n")
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if length and len(rest) >= int(length[0].split(b":")[1]):
                break
    return RawReply(heard)


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", "host: here", "content-type: application/json", *lines, "", ""]
    ).encode()


@contextmanager
def open_service(kv: KVBoost, **options: Any) -> Iterator[Scheduler]:
    """The service that stands behind the server."""
    service = Scheduler(kv, **options)
    try:
        yield service
    finally:
        service.close()


def idle(service: Scheduler) -> bool:
    stats = service.stats()
    return stats.queued == stats.prefilling == stats.decoding == 0
