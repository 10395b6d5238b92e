"""Reads the stories that the package ships: `stories.json` and the texts in `documents/`."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from kvboost.demo.story import Story


@cache
def load_stories() -> tuple[Story, ...]:
    """Log triage and code review, with five documents and five questions each."""
    folder = files("kvboost.demo")
    stories = json.loads((folder / "stories.json").read_text(encoding="utf-8"))
    for story in stories:
        texts = [folder / "documents" / story["name"] / f"{name}.txt" for name in story["documents"]]
        story["documents"] = tuple(text.read_text(encoding="utf-8").strip() for text in texts)
        story["questions"] = tuple(story["questions"])
    return tuple(Story(**story) for story in stories)
