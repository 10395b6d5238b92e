"""A server under load, whose settings change and that is then ended; its answers are checked alone.

    kvboost bench load [--clients 64] [--minutes 10] [--check 200] [--replays 100]

Starts `kvboost serve` as a process of its own on loopback, with a directory, an admin port and a watched settings file.
Every client asks one request at a time: shared documents in any order, repeats, new text; chats and completions,
streamed or whole; two in five at fidelity=exact. Some clients leave before their answer, some bodies are broken.

1. Under load the settings file changes: kill switch, strategy, budget, a bad version. Timed until metrics show it; no
   answer to a request that came a second later may contradict it, and no request may fail.
2. Afterwards nothing runs or waits, every slot answers, and memory beside the cache has not grown.
3. Exact answers are asked again, one at a time and without the cache: the same tokens, up to near ties (1e-4).
4. SIGTERM while streams run: every accepted request ends with its answer or a clear error; a new start is warm.
5. A second, shorter load on a server in this process, which notes every plan: answers over moved rows are replayed
   alone on the plans that they had.

Exit code 1 if a promise is broken; the line of results names it. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from load_asks import COMPLETIONS, Ask, Mix, request
from load_changes import WANTED_S, Made, judged, make_changes
from load_check import (
    QUEUED,
    RUNNING,
    Sample,
    at_once,
    exact_as_alone,
    first_after_restart,
    memory,
    sample,
    settled,
    terminate,
    watch,
)
from load_clients import OUTCOMES, Result, account, client
from load_server import KVBoostServer
from prompts import DATA
from record import emit, rounded, versions

SLOTS = 8  # the server's default
STREAMS = 16  # in flight at SIGTERM
GROWTH = 1.1  # memory beside the cache, last third of the run over the first
EXPECTED_ERRORS = "the settings file is rejected"

say = Console(stderr=True, highlight=False).print


@dataclass
class Observed:
    """What a load left behind."""

    results: list[Result] = field(default_factory=list)
    changes: list[Made] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0


def make_mix(arguments: argparse.Namespace) -> Mix:
    """Documents and text of real source files."""
    path = DATA / "buglocal.jsonl"
    if not path.exists():
        raise SystemExit(f"{path.name} is missing: this benchmark reads the shared data folder beside the project")
    with path.open(encoding="utf-8") as file:
        sources = [json.loads(line)["buggy_source"] for line in file]
    random.Random(arguments.seed).shuffle(sources)
    size = arguments.document_characters
    long_enough = [s for s in sources if len(s) >= size]
    documents, rest = long_enough[: arguments.documents], long_enough[arguments.documents :]
    return Mix(
        [f"File {i + 1}\n{text[:size]}" for i, text in enumerate(documents)],
        "\n".join(rest),
        tuple(arguments.new_tokens),
        arguments.per_prompt,
        seed=arguments.seed,
    )


async def under_load(server: KVBoostServer, mix: Mix, arguments: argparse.Namespace) -> Observed:
    """Clients, changes of settings and a look at memory, all at once, until every client is done."""
    seen, began = Observed(), time.monotonic()
    limit_s, each = 60 * arguments.minutes, arguments.requests
    finished = asyncio.Event()

    def progress() -> float:
        done = len(seen.results) / (each * arguments.clients) if each else (time.monotonic() - began) / limit_s
        return 1.0 if finished.is_set() else done

    def stop() -> bool:
        return each is None and time.monotonic() - began >= limit_s

    asks = [itertools.islice(mix.asks(i), each) for i in range(arguments.clients)]
    clients = [client(server.url, a, seen.results, stop) for a in asks]
    watching = asyncio.create_task(watch(server, seen.samples, 0.2 if each else limit_s / 300))
    changing = asyncio.create_task(make_changes(server, progress))
    await asyncio.gather(*clients)
    seen.seconds = time.monotonic() - began
    finished.set()
    seen.changes = await changing
    watching.cancel()
    return seen


async def examine(
    server: KVBoostServer, mix: Mix, arguments: argparse.Namespace
) -> tuple[list[Result], dict[str, Any]]:
    """Everything about one server, from the load to its end; the results of the load, and what is told of it."""
    async with server.admin() as admin:
        before = await sample(server, admin)
    say(f"{arguments.clients} clients")
    seen = await under_load(server, mix, arguments)
    say("the load is over; looking for what it left")
    idle = await settled(server)
    async with server.admin() as admin:
        after = await sample(server, admin)
    probes = [Ask("fresh", COMPLETIONS, request(COMPLETIONS, f"Slot {i}", 4)) for i in range(SLOTS)]
    slots = await at_once(server.url, probes)
    say("asking the exact answers again, alone")
    told = {
        "seconds": seen.seconds,
        "clients": arguments.clients,
        "load": account(seen.results),
        "server": {k: v for k, v in idle.items() if k.startswith("kvboost_requests_total")},
        "running_after": idle[RUNNING],
        "queued_after": idle[QUEUED],
        "slots_answering": sum(r.outcome == "answered" for r in slots),
        "memory": memory(before, seen.samples, after),
        "changes": judged(seen.changes, seen.results),
        "exact_as_alone": await exact_as_alone(server.url, seen.results, arguments.check),
    }
    say("SIGTERM while streams run")
    told["sigterm"] = await terminate(server, mix.streams(STREAMS, arguments.last_tokens))
    told["errors_logged"] = [e for e in server.errors() if not e.startswith(EXPECTED_ERRORS)][:10]
    return seen.results, told


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All parts, one after another."""
    mix = make_mix(arguments)
    options = ["--dtype", arguments.dtype, "--queue", str(arguments.queue), "--drain-s", "60"]
    settings = {"KVBOOST_DISK_DIRECTORY": str(folder / "disk"), "KVBOOST_CACHE_BYTES": arguments.cache_bytes}
    settings["KVBOOST_DISK_BYTES"] = arguments.disk_bytes
    with KVBoostServer(folder, "first", str(arguments.model), *options, **settings) as server:
        results, told = asyncio.run(examine(server, mix, arguments))
    say("starting again on the same directory")
    with KVBoostServer(folder, "second", str(arguments.model), *options, **settings) as server:
        told["restart"] = asyncio.run(first_after_restart(server, mix, results))
        server.process.terminate()
        told["restart"]["exit_code"] = server.process.wait(60)
    if arguments.replays:
        say("a second load, whose plans are replayed")
        told["replay"] = replay(arguments, mix)
    return told


def replay(arguments: argparse.Namespace, mix: Mix) -> dict[str, Any]:
    """The part that runs in this process."""
    import torch

    from kvboost import KVBoost
    from load_replay import replay_check

    dtype = getattr(torch, arguments.dtype)
    clients = min(arguments.clients, 16)
    requests = -(-3 * arguments.replays // clients)  # two in five are exact, and some of the rest reuse nothing
    with KVBoost.from_pretrained(arguments.model, dtype=dtype, share_moved="session") as kv:
        return replay_check(kv, mix, clients, requests, arguments.replays)


def broken_promises(told: Mapping[str, Any]) -> list[str]:
    """What did not hold, in words."""
    load, sigterm, restart = told["load"], told["sigterm"], told["restart"]
    kept = {
        "no request failed": load["failed"] == load["server_errors"] == 0,
        "every request ended in one way": sum(load[outcome] for outcome in OUTCOMES) == load["requests"],
        "nothing runs or waits afterwards": told["running_after"] == told["queued_after"] == 0,
        "every slot answers afterwards": told["slots_answering"] == SLOTS,
        "exact answers are those of a solo run": told["exact_as_alone"]["different"] == 0,
        "no error was logged": not told["errors_logged"],
        "SIGTERM: every accepted request ended clearly": sigterm["unclear"] == 0 and sigterm["exit_code"] == 0,
        "a new start is warm": restart["entries_on_disk"] > 0 and restart["first_cached_tokens"] > 0,
    }
    if "replay" in told:
        failed = told["replay"]["load"]["failed"]
        kept["replayed answers are those of the load"] = told["replay"]["different"] == failed == 0
    for change in told["changes"]:
        name = f"{change['change']}: within {WANTED_S:g} s"
        kept[name] = change["effect_s"] is not None and change["effect_s"] <= WANTED_S and not change["contradicting"]
    return [name for name, held in kept.items() if not held]


def growth(told: Mapping[str, Any]) -> float:
    """Memory beside the cache in the last third of the run over that in the first."""
    m = told["memory"]
    return float((m["last_mb"] - m["last_cache_mb"]) / (m["first_mb"] - m["first_cache_mb"]))


def show(told: Mapping[str, Any]) -> None:
    """Prints the table."""
    table = Table(show_header=False)
    for name in ("load", "memory", "exact_as_alone", "sigterm", "restart", "replay"):
        for key, value in told.get(name, {}).items():
            if not isinstance(value, (dict, list)):
                table.add_row(name, key, f"{value:,.3f}" if isinstance(value, float) else str(value))
    for change in told["changes"]:
        acted = "never" if change["effect_s"] is None else f"{change['effect_s']:.3f} s"
        table.add_row("change", change["change"], f"{acted}, {change['contradicting']} of {change['answers_after']}")
    Console(stderr=True).print(table)


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark and ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests", type=int, help="per client, instead of minutes")
    parser.add_argument("--documents", type=int, default=24, help="that are shared")
    parser.add_argument("--document-characters", type=int, default=300)
    parser.add_argument("--per-prompt", type=int, default=3, help="documents in a prompt")
    parser.add_argument("--new-tokens", type=int, nargs=2, default=[8, 24], metavar=("LEAST", "MOST"))
    parser.add_argument("--last-tokens", type=int, default=48, help="of the streams that run at SIGTERM")
    parser.add_argument("--queue", type=int, default=48, help="requests that may wait at the server")
    parser.add_argument("--cache-bytes", default="1GiB")
    parser.add_argument("--disk-bytes", default="4GiB")
    parser.add_argument("--check", type=int, default=200, help="distinct exact asks that are asked again")
    parser.add_argument("--replays", type=int, default=100, help="answers that are replayed; 0: no second load")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args(given)
    if arguments.model is None:
        from kvboost.hf.embedded import SMOLLM2, ensure

        arguments.model = str(ensure(SMOLLM2))
    with tempfile.TemporaryDirectory(prefix="kvboost-load-") as folder:
        told = measure(arguments, Path(folder))
    told["memory"]["growth"] = growth(told)
    broken = broken_promises(told)
    if arguments.requests is None and told["memory"]["growth"] > GROWTH:
        broken.append("memory beside the cache does not grow")
    show(told)
    result = {"benchmark": "load", "dtype": arguments.dtype, "versions": versions(), **told, "broken": broken}
    result = rounded({**result, "ok": not broken})
    emit(result, arguments.out)
    return result


if __name__ == "__main__":
    sys.exit(0 if main()["ok"] else 1)
