"""Files of requests: public block traces, and request logs whose text is read.

mooncake      {"timestamp", "input_length", "hash_ids"} per line, a hash per 512 tokens of history
claude_code   a session per line: {"block_size", "requests": [{"t", "h": [[first id, count], ...]}, ...]}
openai        {"messages": [...]}, or batch lines {"body": {"messages": [...]}}, with or without "tools"
prompts       a JSON string, {"prompt": "..."}, or a line of plain text
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost.errors import InputError
from kvboost.simulation.trace import Piece, Trace

MOONCAKE_BLOCK_TOKENS = 512
SESSION_GROUP_BLOCKS = 8  # blocks of a session that are one piece: 512 tokens
CONCURRENT_SESSIONS = 20  # sessions carry no common clock: they start at random so that on average so many overlap
SEED = 20261129


@dataclass(frozen=True)
class Log:
    """Prompts as text, in the order of their arrival."""

    name: str
    prompts: list[str]


def read(path: Path, kind: str = "auto") -> Trace | Log:
    """The requests of a file. Raises `InputError` that names the file, the line and what is wrong with it."""
    lines = _lines(path)
    kind = detect(lines[0][1]) if kind == "auto" else kind
    if kind not in READERS:
        raise InputError(f"there is no format {kind!r}; there are: auto, {', '.join(READERS)}")
    return READERS[kind](path, lines)


def detect(line: str) -> str:
    """The format that a file's first line looks like."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return "prompts"
    if not isinstance(value, dict):
        return "prompts"
    if "hash_ids" in value:
        return "mooncake"
    if "requests" in value and "block_size" in value:
        return "claude_code"
    return "openai" if "body" in value or "messages" in value else "prompts"


def read_mooncake(path: Path, lines: list[tuple[int, str]]) -> Trace:
    """Blocks of 512 tokens; the last one of a request is shorter."""
    requests = []
    for number, line in lines:
        with_error = _Where(path, number)
        value = with_error.json(line)
        ids, rest = with_error.get(value, "hash_ids", list), with_error.get(value, "input_length", int)
        pieces = []
        for i in ids:
            size = min(MOONCAKE_BLOCK_TOKENS, rest)
            if not isinstance(i, int):
                raise with_error(f"the block {i!r} is no number")
            if size <= 0:
                raise with_error(f"{len(ids)} blocks are too many for {value['input_length']} tokens")
            pieces.append(Piece(b"%d" % i, size))
            rest -= size
        requests.append(pieces)
    return Trace(path.stem, "prefix", requests)


def read_claude_code(path: Path, lines: list[tuple[int, str]]) -> Trace:
    """Sessions, interleaved; block ids are a session's own. What is left of a group of blocks at the end is dropped."""
    rng = random.Random(SEED)
    sessions = []
    for number, line in lines:
        where = _Where(path, number)
        value = where.json(line)
        try:
            sessions.append((_block_tokens(value["block_size"]), list(_session(value["requests"], 0.0))))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise where(f"it is no session: {error!r}") from None
    span_s = sum(max((t for t, _ in requests), default=0.0) for _, requests in sessions) / CONCURRENT_SESSIONS
    events: list[tuple[float, int, list[Piece]]] = []
    for number, (block_tokens, requests) in enumerate(sessions):
        start = rng.random() * span_s
        for at, ids in requests:
            events.append((start + at, len(events), _groups(number, ids, block_tokens)))
    return Trace(path.stem, "prefix", [pieces for _, _, pieces in sorted(events, key=lambda e: e[:2])])


def read_openai(path: Path, lines: list[tuple[int, str]]) -> Log:
    """Chat requests, rendered as ChatML with the tools in front, as most templates do."""
    prompts = []
    for number, line in lines:
        where = _Where(path, number)
        value = where.json(line)
        body = value.get("body", value) if isinstance(value, Mapping) else value
        if isinstance(body, Mapping) and isinstance(body.get("prompt"), str):
            prompts.append(body["prompt"])
        elif isinstance(body, Mapping) and isinstance(body.get("messages"), list) and body["messages"]:
            prompts.append(render(body["messages"], body.get("tools")))
        else:
            raise where("it holds neither `messages` nor a `prompt`, nor a `body` with one of them")
    return Log(path.stem, prompts)


def read_prompts(path: Path, lines: list[tuple[int, str]]) -> Log:
    """One prompt per line."""
    plain = not lines[0][1].lstrip().startswith(('"', "{"))
    prompts = []
    for number, line in lines:
        where = _Where(path, number)
        value = line if plain else where.json(line)
        value = value.get("prompt") if isinstance(value, Mapping) else value
        if not isinstance(value, str) or not value:
            raise where("it is neither a text nor an object with the text as `prompt`")
        prompts.append(value)
    return Log(path.stem, prompts)


READERS: dict[str, Callable[[Path, list[tuple[int, str]]], Trace | Log]] = {
    "mooncake": read_mooncake,
    "claude_code": read_claude_code,
    "openai": read_openai,
    "prompts": read_prompts,
}


def render(messages: list[Any], tools: Any = None) -> str:
    """Chat messages as text, up to where the assistant answers."""
    head = f"<|im_start|>tools\n{_listed(tools)}<|im_end|>\n" if tools else ""
    turns = (f"<|im_start|>{m.get('role', '')}\n{_content(m)}<|im_end|>\n" for m in messages if isinstance(m, Mapping))
    return head + "".join(turns) + "<|im_start|>assistant\n"


def _listed(tools: Any) -> str:
    """A tool per paragraph, so that each can be found alone."""
    return "\n\n".join(map(json.dumps, tools)) if isinstance(tools, list) else json.dumps(tools)


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(p.get("text", "")) for p in content if isinstance(p, Mapping))
    elif content is not None and not isinstance(content, str):
        content = json.dumps(content)
    calls = message.get("tool_calls")
    return (content or "") + (json.dumps(calls) if calls else "")


def _block_tokens(value: Any) -> int:
    if int(value) < 1:
        raise ValueError(f"a block of {value!r} tokens")
    return int(value)


def _session(requests: list[Any], base_s: float) -> Iterator[tuple[float, list[int]]]:
    """Time and block ids of a session's requests, those of its subagents too."""
    for request in requests:
        at = base_s + float(request["t"])
        if "requests" in request:
            yield from _session(request["requests"], at)
        elif "h" in request:
            yield at, [i for first, count in request["h"] for i in range(first, first + count)]


def _groups(session: int, ids: list[int], block_tokens: int) -> list[Piece]:
    """Ids name histories, so the last one of a group names all of it."""
    size = SESSION_GROUP_BLOCKS
    ends = range(size - 1, len(ids), size)
    return [Piece(b"%d/%d" % (session, ids[i]), size * block_tokens) for i in ends]


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"cannot read {str(path)!r}: {reason}") from None
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f"{str(path)!r} holds no request; write one JSON document per line")
    return lines


class _Where:
    """Makes errors that name file and line."""

    def __init__(self, path: Path, number: int) -> None:
        self._place = f"line {number} of {str(path)!r}"

    def __call__(self, what: str) -> InputError:
        return InputError(f"{self._place}: {what}")

    def json(self, line: str) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:  # of no JSON, of numbers and nesting beyond what Python reads
            raise self(f"it is not JSON: {error}") from None

    def get(self, value: Any, key: str, kind: type) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get(key), kind):
            raise self(f"`{key}` is missing, or no {kind.__name__}")
        return value[key]
