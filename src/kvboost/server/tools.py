"""Calls of tools in what a model says: `<tool_call>{json}</tool_call>`, or an answer that is the JSON of calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(f"{OPEN}(.*?)(?:{CLOSE}|$)", re.DOTALL)


class ToolCallReader:
    """Reads an answer as it comes. Text is held back while it may turn out to be a call of one of `names`."""

    def __init__(self, names: Collection[str], *, several: bool = True) -> None:
        self._names, self._several = names, several
        self._held = ""
        self._said = False  # whether any text was let through

    def feed(self, text: str) -> str:
        """Takes what the model says next; returns what is no call for certain."""
        self._held += text
        start = self._held.lstrip()
        if not self._said and (not start or start[0] in "{["):
            return ""
        free = len(self._held) - _overlap(self._held, OPEN)
        if OPEN in self._held:
            free = self._held.index(OPEN)
        if not self._said and not self._held[:free].strip():
            return ""
        said, self._held = self._held[:free], self._held[free:]
        self._said = True
        return said

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """At the end of the answer: the rest of the text, and the calls in OpenAI's shape."""
        held, self._held = self._held, ""
        calls = [] if self._said else self._calls_of(held)
        rest = "" if calls else _BLOCK.sub(lambda block: self._take(block, calls), held)
        kept = calls if self._several else calls[:1]
        return (rest.strip() if calls else rest), kept

    def _take(self, block: re.Match[str], calls: list[dict[str, Any]]) -> str:
        """Moves the calls of a block to `calls`; a block that is none stays text."""
        found = self._calls_of(block[1])
        calls.extend(found)
        return "" if found else block[0]

    def _calls_of(self, text: str) -> list[dict[str, Any]]:
        """The calls that a JSON text is; none if it is anything else."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return []
        calls = [self._call(item) for item in (value if isinstance(value, list) else [value])]
        return [] if None in calls else [c for c in calls if c is not None]

    def _call(self, item: Any) -> dict[str, Any] | None:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str) or item["name"] not in self._names:
            return None
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str):
            return None
        function = {"name": item["name"], "arguments": arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` are the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark)), 0, -1) if text.endswith(mark[:n])), 0)
