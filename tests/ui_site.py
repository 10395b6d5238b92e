"""A server with its administrators' port as `kvboost serve` makes them, and what a person reads on the page at /ui."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from browser import Browser, Tab
from kvboost import KVBoost
from kvboost.cli.serve import Admin, Listening, _apps
from kvboost.server import ServerOptions
from kvboost.types import ReusePlan
from scenario import SMALL
from server_run import post

TOKEN = "a token of söme length"
STORY = "Once upon a time there was a little girl named Lily. She loved to play outside in the park with her red ball. "
OTHER = "One day a big dog came and took the ball away. Lily was very sad and wanted her mom to help her get it back. "
MIXED = STORY[:90] + "And then. " + OTHER  # the beginning of STORY + OTHER, then OTHER moved
HOSTILE = '<img src=x onerror="hit=1"><script>hit=1</script>\'"><b>&amp;\u202e'
PLAIN = {**SMALL, "min_moved_share": 0.0, "recompute_strategy": "epic", "gate": False, "share_moved": "session"}
KINDS = ("exact", "continued", "moved", "repaired", "fresh")

LONG_PROMPT = """(() => {
    const kindOf = (i) => (i % 25 ? 'moved' : 'repaired');
    const tokens = Array.from({length: 10000}, (_, i) => ({text: `word${i} `, kind: kindOf(i)}));
    const source = {kind: 'moved', shift: 5, tier: 'memory', age_s: 5, hits: 1, lineage: 'bit_exact', codec: 'none'};
    const place = (i) => ({start: 125 * i, stop: 125 * (i + 1), source_position: 125 * i - 5});
    const segments = Array.from({length: 80}, (_, i) => ({...source, ...place(i)}));
    const counts = {exact: 0, continued: 0, moved: 9600, repaired: 400, fresh: 0};
    const rows = {full_tokens: 10000, computed_tokens: 400, repaired_tokens: 400};
    const cost = {...rows, full_prefill_s: 10, computed_s: 0.4};
    showXray({num_tokens: 10000, tokens, segments, counts, cost}, 'a long prompt');
})()"""

STOPS = """(() => {
    const nameOf = (e) => (e.getAttribute('aria-label') || e.innerText
        || [...(e.labels ?? [])].map((label) => label.innerText).join()
        || $(e.getAttribute('aria-labelledby'))?.innerText || '').trim();
    const told = (e) => {
        e.focus();
        const style = getComputedStyle(e);
        return [e.outerHTML.slice(0, 60), style.outlineStyle, parseFloat(style.outlineWidth), nameOf(e)];
    };
    return [...document.querySelectorAll('a[href], button, input, textarea, summary, [tabindex="0"]')]
        .filter((e) => e.checkVisibility()).map(told);
})()"""

CONTRAST = """(() => {
    const parts = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
    const channel = (c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const paper = (e) => {
        for (; e; e = e.parentElement) {
            const [r, g, b, a = 1] = parts(getComputedStyle(e).backgroundColor);
            if (a > 0) return [r, g, b];
        }
        return [255, 255, 255];
    };
    const texts = [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility()
        && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.tagName !== 'TITLE');
    return texts.map((e) => {
        const style = getComputedStyle(e);
        const [a, b] = [light(parts(e instanceof SVGElement ? style.fill : style.color)), light(paper(e))];
        const what = `${e.tagName}.${e.getAttribute('class')} ${e.textContent.slice(0, 40)}`;
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), what];
    });
})()"""


@dataclass
class Site:
    kv: KVBoost
    url: str
    admin_url: str
    session: str  # of a request without a key

    def complete(self, text: str, **headers: str) -> None:
        body = {"model": "stories", "prompt": text, "max_tokens": 2, "temperature": 0}
        post(f"{self.url}/v1/completions", json=body, headers=headers).raise_for_status()

    def ask(self, path: str) -> Any:
        bearer = {"Authorization": f"Bearer {TOKEN}".encode()}
        return httpx.get(f"{self.admin_url}{path}", headers=bearer, timeout=60).raise_for_status().json()

    def plan(self, text: str) -> ReusePlan:
        return self.kv.plan(text, session=self.session)


def apps(
    kv: KVBoost, service: Any, token: str | None = TOKEN, keep: int = 20, model: str = "stories"
) -> tuple[FastAPI, FastAPI]:
    """The clients' and the administrators' app, as `kvboost serve` makes them."""
    where = Listening("127.0.0.1", 0, None, Admin(0, token, token is None, keep))
    api, admin = (app for app, _ in _apps(kv, service, ServerOptions(model), where))
    return api, admin


def signed_in(browser: Browser, site: Site, view: str = "overview", **look: Any) -> Tab:
    tab = browser.open(f"{site.admin_url}/ui#{view}", **look)
    tab.wait("document.activeElement.id === 'token'")
    tab.type(TOKEN)
    tab.press("Enter")
    tab.wait("document.querySelectorAll('#tiles dd').length")
    return tab


def x_ray(tab: Tab, text: str, *, messages: bool = False) -> None:
    """Pastes a prompt and waits for its X-ray, or for the reason why there is none."""
    form = "messages" if messages else "text"
    tab.js(
        f"$('prompt').value = {json.dumps(text)}, $('ask').elements.form.value = '{form}', $('result').hidden = true"
    )
    tab.js("$('ask').requestSubmit()")
    tab.wait("!$('result').hidden || $('ask-error').textContent")


def rows(tab: Tab, within: str) -> dict[str, list[str]]:
    """The cells of a table by the first one of each row."""
    read = f"[...document.querySelectorAll('#{within} tbody tr')].map(r => [...r.cells].map(c => c.innerText.trim()))"
    return {first: rest for first, *rest in tab.js(read)}


def tiles(tab: Tab) -> dict[str, tuple[str, str]]:
    read = "[...document.querySelectorAll('#tiles div')].map(d => [...d.children].map(c => c.innerText))"
    return {name: (value, more) for name, value, more in tab.js(read)}


def drawn(tab: Tab) -> list[list[list[str]]]:
    """Of every chunk the runs of tokens: class and text."""
    read = (
        "[...document.querySelectorAll('#map .seg')].map(s => [...s.children].map(r => [r.className, r.textContent]))"
    )
    return list(tab.js(read))


def assert_quiet(tab: Tab, site: Site) -> None:
    """Nothing was asked of anybody else, and the console is empty."""
    assert tab.complaints() == []
    assert [url for url in tab.requested() if not url.startswith((f"{site.admin_url}/", "data:"))] == []
    tab.close()


def amount(text: str) -> float:
    """A number of bytes or seconds as the page writes it."""
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "ms": 1e-3, "s": 1}
    number, unit = text.split()
    return float(number.replace(",", "")) * units[unit]
