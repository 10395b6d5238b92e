"""A server in a process of its own on loopback, watched from outside: its log, its memory, its metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from kvboost.config import ENV_PREFIX

START_S = 300.0  # a model may have to be converted first
LISTENING = "listening on "
TOKEN = "the token of a benchmark"


class Server:
    """A process whose output goes to `log`. A context manager: what still runs at its end is killed."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env={**inherited, **(environment or {})})

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def heard(self) -> str:
        """What it has said so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Raises `RuntimeError` with the end of the log if the server ends, or takes too long."""
        until = time.monotonic() + START_S
        while not ready():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not start:\n{self.heard()[-3000:]}")
            time.sleep(0.1)

    def anonymous_bytes(self) -> int:
        """Resident memory that is no file's."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024


class KVBoostServer(Server):
    """`kvboost serve` with an admin port and a watched file of settings. It listens when it is made."""

    def __init__(self, folder: Path, name: str, model: str, *options: str, **environment: str) -> None:
        """Keeps its files in `folder`, the log as `name`; `environment` may hold settings of KVBoost and others."""
        self.settings_file, token = folder / "settings", folder / "token"
        self.settings_file.write_text("")
        token.write_text(TOKEN)
        command = [sys.executable, "-m", "kvboost.cli", "serve", "--model", model, "--model-name", "served"]
        command += ["--port", "0", "--admin-port", "0", "--admin-token-file", str(token), "--log-format", "json"]
        super().__init__(
            [*command, *options],
            folder / f"{name}.log",
            {**environment, f"{ENV_PREFIX}SETTINGS_FILE": str(self.settings_file)},
        )
        try:
            self.wait_until(lambda: "\n" in self.heard().partition(LISTENING)[2])
        except BaseException:
            self.__exit__()
            raise
        urls = self.heard().partition(LISTENING)[2].splitlines()[0].split(", ")
        self.url, self.admin_url = (url.strip().rstrip("/") for url in urls)

    def change(self, lines: Sequence[str]) -> None:
        """Replaces the settings file in one step."""
        new = self.settings_file.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(self.settings_file)

    def admin(self) -> httpx.AsyncClient:
        """A client of the administrators' port."""
        headers = {"authorization": f"Bearer {TOKEN}"}
        return httpx.AsyncClient(base_url=self.admin_url, headers=headers, timeout=60, verify=False, trust_env=False)

    def errors(self) -> list[str]:
        """Messages that were logged as errors."""
        lines = [json.loads(line) for line in self.heard().splitlines() if line.startswith("{")]
        return [line["message"] for line in lines if line.get("level") in ("error", "critical")]


async def state(admin: httpx.AsyncClient) -> dict[str, Any]:
    """Every metric by its exposed name with labels, and every setting by its name."""
    metrics, settings = await admin.get("/metrics"), await admin.get("/admin/settings")
    samples = (line.rpartition(" ") for line in metrics.text.splitlines() if line and not line.startswith("#"))
    found: dict[str, Any] = {name: float(value) for name, _, value in samples}
    return {**found, **{name: told["value"] for name, told in settings.json()["settings"].items()}}
