"""A real headless Chromium, told what to do by the DevTools protocol over two pipes: no driver, and no open port."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "chromium is not installed (Debian: apt-get install chromium)"
ANSWER_S = 60.0
OPTIONS = (
    "--headless=new",
    "--remote-debugging-pipe",  # commands come in at descriptor 3, answers go out at 4
    "--no-sandbox",  # the tests may run as root in a container
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
LAUNCH = """
import fcntl, os, sys
given = [int(n) for n in sys.argv[1:3]]
spare = [fcntl.fcntl(n, fcntl.F_DUPFD_CLOEXEC, 10) for n in given]
for n in given:
    os.close(n)
for target, n in enumerate(spare, 3):
    os.dup2(n, target)
os.execv(sys.argv[3], sys.argv[3:])
"""
KEYS = {  # name: virtual key code, text
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "End": (35, ""),
    "Home": (36, ""),
    "PageUp": (33, ""),
    "PageDown": (34, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
}
MODIFIERS = {"": 0, "Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}


class Browser:
    """A Chromium with a profile in `directory`. A context manager; skips the test where there is none."""

    def __init__(self, directory: Path) -> None:
        if CHROMIUM is None:
            pytest.skip(MISSING)
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        self._heard = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []
        self._log = directory / "chromium.log"
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={directory / 'profile'}", "about:blank"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, str(read), str(write), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(read, write),
                start_new_session=True,  # so that all its processes can be ended together
                env={**os.environ, "HOME": str(directory)},
            )
        os.close(read)
        os.close(write)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        os.close(self._from)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Tab:
        """A new tab of a session of its own: storage is shared with no other."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        tab = Tab(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"], target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
        tab.look(width, height, dark=dark)
        tab.call("Page.navigate", url=url)
        tab.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        return tab

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The result of a command. Raises `RuntimeError` for a refusal, or if the browser has gone."""
        self._last_id += 1
        wanted = self._last_id
        message = {"id": wanted, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        until = time.monotonic() + ANSWER_S
        while True:
            heard = self._hear(until)
            if heard.get("id") != wanted:
                self.events.append(heard)
            elif "error" in heard:
                raise RuntimeError(f"{method}: {heard['error']['message']}")
            else:
                return dict(heard["result"])

    def _hear(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._heard:
            ready = select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0]
            more = os.read(self._from, 1 << 20) if ready else b""
            if not more:
                what = "has gone" if ready else f"did not answer in {ANSWER_S:.0f} s"
                raise RuntimeError(f"the browser {what}: {self._log.read_text(errors='replace')[-2000:]}")
            self._heard += more
        message, _, self._heard = self._heard.partition(b"\0")
        return dict(json.loads(message))


class Tab:
    """One page."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def look(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        """The size of the window in CSS pixels, and the scheme of colours; up to 600 wide it is a phone."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
            mobile=width <= 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def js(self, expression: str) -> Any:
        """The value of an expression, awaited. Raises `RuntimeError` with what it threw."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            thrown = answer["exceptionDetails"]
            raise RuntimeError(thrown.get("exception", {}).get("description") or thrown["text"])
        return answer["result"].get("value")

    def wait(self, expression: str, limit_s: float = 30.0) -> Any:
        """The value of an expression as soon as it is true."""
        until = time.monotonic() + limit_s
        while not (value := self.js(expression)):
            assert time.monotonic() < until, f"{expression}\n{self.js('document.body.innerText')}"
            time.sleep(0.02)
        return value

    def text(self, selector: str) -> str:
        """What a person reads in an element."""
        return str(self.js(f"document.querySelector({json.dumps(selector)}).innerText"))

    def press(self, key: str, times: int = 1, modifier: str = "") -> None:
        code, text = KEYS[key]
        stroke = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": MODIFIERS[modifier]}
        for _ in range(times):
            self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **stroke)
            self.call("Input.dispatchKeyEvent", type="keyUp", **stroke)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def tab_to(self, selector: str, *, back: bool = False, most: int = 60) -> None:
        """Presses Tab, or Shift and Tab, until an element has the focus."""
        for _ in range(most):
            self.press("Tab", modifier="Shift" if back else "")
            if self.js(f"document.activeElement?.matches({json.dumps(selector)}) ?? false"):
                return
        raise AssertionError(f"{selector} was not reached by {most} times Tab")

    def screenshot(self, path: Path, selector: str | None = None) -> None:
        """A PNG of the window, or from an element's top to the bottom of the page."""
        params: dict[str, Any] = {}
        if selector is not None:
            box = self.js(
                f"(() => {{ const b = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
                " return {x: 0, y: b.top + scrollY, width: innerWidth, height: b.height, scale: 1}; })()"
            )
            params = {"clip": box, "captureBeyondViewport": True}
        answer = self.call("Page.captureScreenshot", format="png", **params)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _events(self, method: str) -> list[dict[str, Any]]:
        self.js("0")  # what was said before the answer is heard with it
        return [
            e["params"]
            for e in self._browser.events
            if e.get("method") == method and e.get("sessionId") == self._session
        ]

    def requested(self) -> list[str]:
        """The URL of everything that the page asked for."""
        return [e["request"]["url"] for e in self._events("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """What a person would see in the console as an error or a warning."""
        thrown = [e["exceptionDetails"]["text"] for e in self._events("Runtime.exceptionThrown")]
        told = [str(e["args"]) for e in self._events("Runtime.consoleAPICalled") if e["type"] in ("error", "warning")]
        logged = [
            e["entry"]["text"] for e in self._events("Log.entryAdded") if e["entry"]["level"] in ("error", "warning")
        ]
        return [*thrown, *told, *logged]
