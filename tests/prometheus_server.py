"""A real Prometheus on the loopback interface, and rules that need seconds instead of minutes."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from redis_server import free_port

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
MISSING = "{} is not installed (Debian: apt-get install prometheus)"
START_S = 30.0
_WINDOW = re.compile(r"\[\d+[smh]\]")
_OFFSET = re.compile(r"\boffset \d+[smh]")


def quickened(rules: Mapping[str, Any], *, window_s: int = 5, for_s: int = 1) -> dict[str, Any]:
    """The same rules with every window, offset and patience cut to seconds; thresholds stay."""
    quick = copy.deepcopy(dict(rules))
    for group in quick["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule["expr"] = _OFFSET.sub(f"offset {window_s}s", _WINDOW.sub(f"[{window_s}s]", rule["expr"]))
            if "alert" in rule:
                rule["for"] = f"{for_s}s"
    return quick


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs promtool; skips the test where it is missing."""
    if PROMTOOL is None:
        pytest.skip(MISSING.format("promtool"))
    return subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


class PrometheusServer:
    """Scrapes `target` (host:port) every second and evaluates `rules`. A context manager."""

    def __init__(self, directory: Path, target: str, rules: Mapping[str, Any], *, job: str = "kvboost") -> None:
        if PROMETHEUS is None:
            pytest.skip(MISSING.format("prometheus"))
        self._directory = directory
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        scrape = {"job_name": job, "static_configs": [{"targets": [target]}]}
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [scrape],
        }
        (directory / "rules.yaml").write_text(yaml.safe_dump(dict(rules), sort_keys=False))
        (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))

    def __enter__(self) -> PrometheusServer:
        assert PROMETHEUS is not None
        options = [
            f"--config.file={self._directory / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self._directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        with (self._directory / "prometheus.log").open("ab") as log:
            self._process = subprocess.Popen([PROMETHEUS, *options], stdout=log, stderr=log, cwd=self._directory)
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_text = (self._directory / "prometheus.log").read_text()
                self.__exit__()
                raise RuntimeError(f"prometheus did not start: {log_text}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The instant vector of an expression."""
        answer = self._get(f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        return list(answer["data"]["result"])

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        return {
            a["labels"]["alertname"] for a in self._get("/api/v1/alerts")["data"]["alerts"] if a["state"] == "firing"
        }

    def wait_until_firing(self, names: set[str], within_s: float) -> set[str]:
        """Which of `names` fired at some time before the deadline; returns as soon as all have."""
        seen: set[str] = set()
        deadline = time.monotonic() + within_s
        while not names <= seen and time.monotonic() < deadline:
            seen |= self.firing() & names
            time.sleep(0.1)
        return seen

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as answer:
            return json.load(answer)
