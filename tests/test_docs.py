"""The documents say what is true: their code runs, their links lead somewhere, the settings that they name exist."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from kvboost.config import ENV_PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
PRINTED = re.compile(r"^\s*print\((?P<code>.*)\)  # (?P<expected>.*)$", re.MULTILINE)
CERTAIN = re.compile(r"True|False|switched off|\d+(?=[:;]|$)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_settings_named_in_the_documents_exist() -> None:
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    planned = {"KVBOOST_NAME"}  # stands for any of them
    named = set(re.findall(r"`(KVBOOST_[A-Z_]+)", "".join(p.read_text() for p in PAGES)))
    assert named - planned <= known
    assert named & known


def test_defaults_in_the_readme_are_the_defaults() -> None:
    rows = re.findall(r"^\| `(KVBOOST_[A-Z_]+)` \| `?([^`|]*?)`? \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    defaults = Settings()
    assert len(rows) >= 5
    for name, shown in rows:
        value = getattr(defaults, name.removeprefix(ENV_PREFIX).lower())
        assert shown == {None: ""}.get(value, str(value)), name


def test_the_code_of_the_description_runs_and_prints_what_it_says() -> None:
    page = (ROOT / "docs" / "description.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    program = "\n".join(blocks)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/description.md", "exec"), {})
    expected = [m["expected"] for m in PRINTED.finditer(program)]
    lines = printed.getvalue().splitlines()
    assert len(blocks) >= 8
    assert len(lines) >= len(expected)
    certain = [(e, CERTAIN.match(e)) for e in expected]
    for text, match in certain:
        if match:
            assert any(line.startswith(match[0]) for line in lines), text
