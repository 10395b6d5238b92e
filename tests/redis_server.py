"""A real Redis server on the loopback interface, and a proxy in front of it that makes it slow."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

BINARY = shutil.which("redis-server")
START_S = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class RedisServer:
    """One process without persistence. `stop` and `start` again: it comes back empty, on the same port."""

    def __init__(self, directory: Path, options: Sequence[str] = (), *, tls: bool = False) -> None:
        if BINARY is None:
            pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
        self.port = free_port()
        self.url = f"{'rediss' if tls else 'redis'}://127.0.0.1:{self.port}/0"
        self._tls = tls
        self._directory = directory
        self._options = list(options)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        assert BINARY is not None
        ports = ["--port", "0", "--tls-port", str(self.port)] if self._tls else ["--port", str(self.port)]
        options = [*ports, "--bind", "127.0.0.1", "--dir", str(self._directory)]
        options += ["--save", "", "--appendonly", "no", "--daemonize", "no", *self._options]
        log = (self._directory / "redis.log").open("ab")
        with log:
            self._process = subprocess.Popen([BINARY, *options], stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start: {(self._directory / 'redis.log').read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A client of the test's own, to look at and to damage what the tier keeps."""
        return redis.Redis(port=self.port)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 0.5):
            return True
        return False


class SlowProxy:
    """Forwards to a server; every piece of an answer waits `delay_s` and is at most `piece_bytes` long."""

    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self.piece_bytes = 1 << 16
        self._to = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._server.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for source, sink, slow in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._pump, args=(source, sink, slow), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        with suppress(OSError), source, sink:
            while data := source.recv(1 << 16):
                size = self.piece_bytes if slow else len(data)
                for at in range(0, len(data), size):
                    if slow:
                        time.sleep(self.delay_s)
                    sink.sendall(data[at : at + size])
