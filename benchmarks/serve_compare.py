"""Time to first token beside `transformers serve`, with and without its continuous batching: one model, one run.

    kvboost bench serve_compare [--requests 20] [--tokens 1000] [--dtype float32]

Three servers on loopback, each a process of its own: `kvboost serve`, `transformers serve`, and the latter with
`--continuous-batching`. Two kinds of traffic, asked by one client as streamed chats. *Shared*: the same documents
behind a new line, or in another order; each server has answered one prompt over them before the clock starts. *New*:
files of which no server has seen a line. Every request goes to all servers, one after another with a short rest before
each, in every order in turn, so only one server works at a time and none always follows the same one. TTFT is from
sending the request to the first event with text. Ends with one JSON line.

`transformers serve` needs its own extra (`pip install 'transformers[serving]'`). A server that cannot run is left out,
and the line of results says why.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from load_server import KVBoostServer, Server
from prompts import DATA, shuffled
from record import emit, rounded, versions

OURS, PLAIN, BATCHING = "kvboost serve", "transformers serve", "transformers serve --continuous-batching"
QUESTION = "Question: which of the files above reports errors to the caller, and how?"
INTRO = "Files of one code base follow. Read them and answer the question.\n\n"
DOCUMENTS = 8
CHARACTERS_PER_TOKEN = 3.3  # of source code, about; the lengths that came out are told
CB_BLOCKS = ("--cb-num-blocks", "64", "--cb-max-batch-tokens", "2048")  # 16k tokens, not 60 % of the memory
LINE_CHARACTERS = 20  # shorter lines, such as imports, may come again: they are no run of 16 tokens
PATIENCE_S = 300.0
REST_S = 0.3


@dataclass
class Running:
    """A server that answers, or why it does not."""

    name: str
    url: str = ""
    model: str = ""
    refused: str | None = None
    ttfts_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    prompt_tokens: dict[str, int] = field(default_factory=Counter)
    cached_tokens: dict[str, int] = field(default_factory=Counter)  # as told in `usage`


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start_transformers(stack: ExitStack, folder: Path, model: str, name: str, options: Sequence[str]) -> Running:
    """`transformers serve` until `stack` closes. One that does not start is told as refused."""
    port = free_port()
    code = "from transformers.cli.transformers import app; app()"  # its `main` asks the network for a newer version
    command = [sys.executable, "-c", code, "serve", model, "--port", str(port), "--host", "127.0.0.1"]
    log = folder / f"{name.replace(' ', '')}.log"
    server = stack.enter_context(Server([*command, "--device", "cpu", *options], log, {"HF_HUB_OFFLINE": "1"}))
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/health", verify=False, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        server.wait_until(answers)
    except RuntimeError as error:
        return Running(name, refused=str(error)[-600:])
    return Running(name, url, model)


def start_all(stack: ExitStack, folder: Path, model: str, dtype: str) -> list[Running]:
    """All three servers; what does not start is told as refused."""
    ours = stack.enter_context(KVBoostServer(folder, "kvboost", model, "--dtype", dtype))
    running = [Running(OURS, ours.url, "served")]
    for name, options in ((PLAIN, ()), (BATCHING, ("--continuous-batching", *CB_BLOCKS))):
        running.append(start_transformers(stack, folder, model, name, ["--dtype", dtype, *options]))
    return running


async def ask(http: httpx.AsyncClient, server: Running, kind: str, text: str, new_tokens: int) -> None:
    """Notes the time to the first text of a streamed chat. Raises `RuntimeError` for anything but an answer."""
    body = {"model": server.model, "messages": [{"role": "user", "content": text}], "stream": True}
    body |= {"temperature": 0, "max_tokens": new_tokens}
    if server.name == OURS:
        body["stream_options"] = {"include_usage": True}
    began, first = time.perf_counter(), None
    async with http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(str(event["error"])[:300])
            if first is None and any(c["delta"].get("content") for c in event["choices"]):
                first = time.perf_counter()
            usage = event.get("usage") or {}
            server.prompt_tokens[kind] += usage.get("prompt_tokens", 0)
            server.cached_tokens[kind] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if first is None:
        raise RuntimeError("the answer has no text")
    server.ttfts_s[kind].append(first - began)


def unseen(texts: Iterable[str]) -> Iterator[str]:
    """The texts of which no longer line stood in an earlier one: files begin with the same licences."""
    seen: set[str] = set()
    for text in texts:
        lines = {line.strip() for line in text.splitlines() if len(line.strip()) >= LINE_CHARACTERS}
        if not lines & seen:
            yield text
        seen |= lines


def traffic(num_tokens: int, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Kind and text of every request, the kinds in turn; the first one fills the caches and is not counted."""
    rng = random.Random(seed)
    with (DATA / "buglocal.jsonl").open(encoding="utf-8") as file:
        sources = [json.loads(line)["buggy_source"] for line in file]
    rng.shuffle(sources)
    size = int(num_tokens * CHARACTERS_PER_TOKEN) // DOCUMENTS
    texts = unseen(text[:size] + "\n\n" for text in sources if len(text) >= size)

    def prompt(documents: Sequence[str], head: str = "") -> str:
        return f"{head}{INTRO}{''.join(documents)}{QUESTION}"

    shared = [f"File {i + 1}\n{next(texts)}" for i in range(DOCUMENTS)]
    yield "warm-up", prompt(shared)
    for number in range(count):
        if number % 2:
            yield "shared, reordered", prompt([shared[i] for i in shuffled(DOCUMENTS, rng)])
        else:
            yield "shared, head changed", prompt(shared, f"[request {number} of {count}] ")
        yield "new", f"[{number}] {''.join(next(texts) for _ in range(DOCUMENTS))}"


async def measure(running: Sequence[Running], requests: int, num_tokens: int, new_tokens: int, seed: int) -> None:
    """Asks every request of every server that runs, and notes the times. A server that fails is asked no more."""
    async with httpx.AsyncClient(timeout=PATIENCE_S, verify=False, trust_env=False) as http:
        orders = itertools.cycle(itertools.permutations(running))
        for (kind, text), order in zip(traffic(num_tokens, requests, seed), orders, strict=False):
            for server in order:
                if server.refused is not None:
                    continue
                await asyncio.sleep(REST_S)  # whoever answered last stores what it computed
                try:
                    await ask(http, server, kind, text, new_tokens)
                except (RuntimeError, httpx.HTTPError) as error:
                    server.refused = f"{kind}: {type(error).__name__}: {error}"[:600]


def summary(running: Sequence[Running]) -> list[dict[str, Any]]:
    """Per kind of traffic and server: the median, and how many times ours it is."""
    rows = []
    for kind in running[0].ttfts_s:
        ours = statistics.median(running[0].ttfts_s[kind])
        for server in running:
            times = server.ttfts_s.get(kind)
            if times:
                p50 = statistics.median(times)
                told = {"traffic": kind, "server": server.name, "requests": len(times)}
                told |= {"prompt_tokens": server.prompt_tokens[kind] / len(times)}
                told |= {"cached_tokens": server.cached_tokens[kind] / len(times)}
                rows.append({**told, "ttft_p50_s": p50, "times_ours": p50 / ours})
    return rows


def merge(running: Sequence[Running]) -> None:
    """Adds the kind `shared`: both of its forms."""
    for server in running:
        for values in (server.ttfts_s, server.prompt_tokens, server.cached_tokens):
            both = [value for kind, value in values.items() if kind.startswith("shared,")]
            if both:
                values["shared"] = sum(both[1:], both[0])


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table."""
    table = Table()
    for column in ("traffic", "server", "requests", "tokens", "cached", "TTFT p50 s", "times ours"):
        table.add_column(column, justify="left" if column in ("traffic", "server") else "right")
    for r in rows:
        counts = (str(r["requests"]), f"{r['prompt_tokens']:.0f}", f"{r['cached_tokens']:.0f}")
        table.add_row(r["traffic"], r["server"], *counts, f"{r['ttft_p50_s']:.2f}", f"{r['times_ours']:.2f}x")
    Console(stderr=True, width=130).print(table)


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark and ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=20, help="of each kind of traffic")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt, about")
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args(given)
    if arguments.model is None:
        from kvboost.hf.embedded import SMOLLM2, ensure

        arguments.model = str(ensure(SMOLLM2))
    with tempfile.TemporaryDirectory(prefix="kvboost-compare-") as folder, ExitStack() as stack:
        running = start_all(stack, Path(folder), str(arguments.model), arguments.dtype)
        asyncio.run(measure(running, arguments.requests, arguments.tokens, arguments.new_tokens, arguments.seed))
    merge(running)
    rows = summary(running)
    show(rows)
    result = {
        "benchmark": "serve_compare",
        "dtype": arguments.dtype,
        "versions": versions(),
        "left_out": {s.name: s.refused for s in running if s.refused is not None},
        "rows": rounded(rows),
    }
    emit(result, arguments.out)
    return result


if __name__ == "__main__":
    main()
