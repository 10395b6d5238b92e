"""The page at /ui: one HTML document of the files in `page/`, put together once, with headers that let it do little.

It holds no secret, so it is given to everybody who reaches the port. What it shows it asks for with the token.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

PATH = "/ui"
SCRIPTS = ("base.js", "overview.js", "xray.js", "main.js")  # joined in this order


@dataclass(frozen=True, slots=True)
class Page:
    """What is sent."""

    body: bytes
    headers: Mapping[str, str]


def make_page(*, token_needed: bool) -> Page:
    """The page; with `token_needed` it asks for the administrators' token before anything else."""
    style, script = _read("page.css"), "\n".join(map(_read, SCRIPTS))
    html = _read("page.html")
    if token_needed:
        html = html.replace('<html lang="en">', '<html lang="en" data-token="needed">')
    html = html.replace("<style></style>", f"<style>{style}</style>")
    html = html.replace("<script></script>", f"<script>{script}</script>")
    return Page(html.encode(), _headers(style, script))


def _read(name: str) -> str:
    return (files("kvboost.server") / "page" / name).read_text(encoding="utf-8")


def _headers(style: str, script: str) -> dict[str, str]:
    """Only these very style and script act, and they speak to this server alone; no string becomes markup."""
    policy = (
        "default-src 'none'",
        f"style-src {_hash(style)}",
        f"script-src {_hash(script)}",
        "connect-src 'self'",
        "img-src data:",  # its own icon
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
