"""Pictures of the page at /ui for the documents, from a real run: python tests/screenshots.py [DIRECTORY]

Serves SmolLM2, plays the stories of `kvboost demo` as chats, and photographs what Chromium shows while they run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image

from browser import Browser, Tab
from kvboost import KVBoost
from kvboost.demo.stories import load_stories
from kvboost.demo.story import make_requests
from kvboost.hf.embedded import SMOLLM2, ensure
from server_run import open_service, post, serving
from ui_site import apps

DOCS = Path(__file__).resolve().parents[1] / "docs"
SETTINGS = {"share_moved": "session", "shadow_share": 0.5, "cache_bytes": 200 << 20, "disk_bytes": 4 << 30}
SHOWN = "logs-subset-new"  # tokens of all kinds


def chats() -> Iterator[tuple[str, list[Mapping[str, str]]]]:
    """Names and messages of all requests, the second story first."""

    def chat(system: str, user: str) -> Any:
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]

    logs, review = load_stories()
    for story, other in ((review, logs), (logs, review)):
        for request in make_requests(story, other, chat):
            yield f"{story.name}-{request.shows.replace(' + ', '-').replace(' ', '-')}", request.prompt


def ask(url: str, name: str, messages: list[Mapping[str, str]]) -> None:
    body = {"model": "SmolLM2-135M-Instruct", "messages": messages, "max_tokens": 24, "temperature": 0}
    post(f"{url}/v1/chat/completions", json=body, headers={"x-request-id": name}).raise_for_status()


def photograph(tab: Tab, directory: Path) -> None:
    tab.wait("tick().then(() => $('tiles').innerText.includes('1 / 8'))")  # while the last one runs
    tab.screenshot(directory / "ui-overview.png", "body")


def photograph_xray(tab: Tab, directory: Path) -> None:
    tab.js("location.hash = 'xray'")
    tab.wait("document.querySelectorAll('#kept button').length")
    tab.js(f"lookAtKept({SHOWN!r}, $('refresh'))")
    tab.wait("!$('result').hidden")
    moved = "xray.parts.find((part) => part.kind === 'moved' && part.length > 10).index"
    tab.look(1280, 640)
    tab.js(f"select({moved}, true)")
    tab.screenshot(directory / "ui-xray.png", "#result")
    tab.look(390, 844, scale=1.5)
    tab.js(f"select({moved}, true), $('h-map').scrollIntoView()")
    tab.screenshot(directory / "ui-phone.png")
    for picture in directory.glob("ui-*.png"):  # few colours, and small
        Image.open(picture).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(picture, optimize=True)


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, Browser(Path(scratch)) as browser:
        settings = {**SETTINGS, "disk_directory": f"{scratch}/disk"}
        with KVBoost.from_pretrained(ensure(SMOLLM2), dtype="float32", **settings) as kv, open_service(kv) as service:
            api, admin = apps(kv, service, token=None, model="SmolLM2-135M-Instruct")
            with serving(api) as url, serving(admin) as admin_url, ThreadPoolExecutor(1) as clients:
                tab = browser.open(f"{admin_url}/ui")
                asked = [clients.submit(ask, url, name, messages) for name, messages in chats()]
                for done in asked[:-1]:
                    done.result()
                photograph(tab, directory)
                asked[-1].result()
                photograph_xray(tab, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
