"""Can a tenant tell by time what another one has cached? Latencies of guessed prompts, and how well they tell.

    kvboost bench timing [--probes 1000] [--words 45] [--cache-mib 512] [--disk-mib 512]

`kvboost serve` runs as a process of its own, with a key for each of two tenants. In rounds, ann sends documents that
nobody has sent, twice. Then bob guesses: he sends each of them, and as many that nobody has sent, once each, in random
order. Mixed in as well is the *control*: ann sends some of her documents again, and new ones. What a client can measure
is the time from its request to the end of the answer of one token.

The AUC is the probability that a document that nobody has sent takes longer than one that ann has: 0.5 tells nothing, 1
all. It comes with a 95 % interval (DeLong, DeLong and Clarke-Pearson 1988). Between tenants it should hold 0.5, for the
control be clearly above, or the probe could not see a hit at all. Memory, and with `--disk-mib` a directory too, holds
the documents of a few rounds: something is evicted all the time. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import http.client
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvboost.hf.embedded import SMOLLM2, ensure
from load_server import KVBoostServer, state
from record import emit, rounded, versions

SEED = 5
VOCABULARY = 2000  # words
CONTROL_SHARE = 5  # one of so many documents of a round
WARM_UP = 5  # requests that are not counted
Z_95 = 1.959964
Floats = npt.NDArray[np.float64]


# --- what tells the classes apart ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Auc:
    """P(fresh > known) + P(equal) / 2, and its 95 % interval."""

    auc: float
    low: float
    high: float


def auc(known: Sequence[float], fresh: Sequence[float]) -> Auc:
    """How well values tell two classes apart, by ranks alone. Raises `ValueError` for fewer than two of a class."""
    if min(len(known), len(fresh)) < 2:
        raise ValueError(f"an AUC needs two values of each class; got {len(known)} and {len(fresh)}")
    a, b = np.asarray(known, float), np.asarray(fresh, float)
    above, below = _share_above(a, b), 1 - _share_above(b, a)
    value = float(above.mean())
    half = Z_95 * float(np.sqrt(above.var(ddof=1) / len(a) + below.var(ddof=1) / len(b)))
    return Auc(value, max(0.0, value - half), min(1.0, value + half))


def _share_above(values: Floats, others: Floats) -> Floats:
    """For each value the share of the others that are larger; equal ones count half."""
    ordered = np.sort(others)
    left, right = np.searchsorted(ordered, values, "left"), np.searchsorted(ordered, values, "right")
    return 1 - (left + right) / (2 * len(others))


# --- what is sent ----------------------------------------------------------------------------------------------------


class Writer:
    """Makes documents of random words of one vocabulary: no two share a run of words."""

    def __init__(self, words: int) -> None:
        self._random = random.Random(SEED)
        self._words = words
        self._vocabulary = [self._word() for _ in range(VOCABULARY)]

    def document(self) -> str:
        """A text that was never sent."""
        return " ".join(self._random.choices(self._vocabulary, k=self._words)).capitalize() + "."

    def _word(self) -> str:
        syllables = self._random.randint(1, 3)
        return "".join(
            self._random.choice("bdfgklmnprstvw") + self._random.choice("aeiou") for _ in range(syllables)
        ) + self._random.choice(["", "n", "r", "s", "t"])


@dataclass
class Probes:
    """What came of one kind of probe."""

    seconds: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)  # share of the prompt


class Client:
    """Sends completions on one connection, which is never idle for long."""

    def __init__(self, url: str, keys: dict[str, str], model: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
        self._keys, self._model = keys, model
        self.prompt_tokens: list[int] = []

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def ask(self, tenant: str, text: str, into: Probes) -> None:
        """Sends a text; notes the time to the end of the answer, and what was cached of it."""
        body = json.dumps({"model": self._model, "prompt": text, "max_tokens": 1, "temperature": 0}).encode()
        headers = {"authorization": f"Bearer {self._keys[tenant]}", "content-type": "application/json"}
        began = time.perf_counter()
        self._connection.request("POST", "/v1/completions", body, headers)
        answer = self._connection.getresponse()
        data = answer.read()
        seconds = time.perf_counter() - began
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}: {data.decode()}")
        usage = json.loads(data)["usage"]
        into.seconds.append(seconds)
        into.cached.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
        self.prompt_tokens.append(usage["prompt_tokens"])


def measure(client: Client, writer: Writer, probes: int, per_round: int) -> dict[tuple[str, str], Probes]:
    """By tenant and whether ann had sent the document before."""
    found = {(tenant, kind): Probes() for tenant in ("bob", "ann") for kind in ("known", "fresh")}
    for _ in range(WARM_UP):
        client.ask("ann", writer.document(), Probes())
    done = 0
    while done < probes:
        size = min(per_round, probes - done)
        known = [writer.document() for _ in range(size)]
        for text in [*known, *known]:  # what came once may not be taken into a full memory
            client.ask("ann", text, Probes())
        again = known[: -(-size // CONTROL_SHARE)]
        turns = [("bob", "known", text) for text in known] + [("bob", "fresh", writer.document()) for _ in known]
        turns += [("ann", "known", text) for text in again] + [("ann", "fresh", writer.document()) for _ in again]
        random.Random(SEED + done).shuffle(turns)
        for tenant, kind, text in turns:
            client.ask(tenant, text, found[tenant, kind])
        done += size
        print(f"{done} of {probes}", file=sys.stderr, flush=True)
    return found


def told(known: Probes, fresh: Probes) -> dict[str, Any]:
    """One comparison, as the results have it."""
    return {
        **asdict(auc(known.seconds, fresh.seconds)),
        "probes": [len(known.seconds), len(fresh.seconds)],
        "known_s": statistics.median(known.seconds),
        "fresh_s": statistics.median(fresh.seconds),
        "known_cached": statistics.mean(known.cached),  # of one's own documents some share a first token
        "fresh_cached": statistics.mean(fresh.cached),
    }


# --- the server ------------------------------------------------------------------------------------------------------


def start(model: Path, folder: Path, keys: dict[str, str], arguments: argparse.Namespace) -> KVBoostServer:
    """A server that knows the keys of both tenants."""
    hashed = [f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n" for name, key in keys.items()]
    (folder / "keys").write_text("".join(hashed))
    settings = {"OMP_NUM_THREADS": str(arguments.threads), "KVBOOST_CACHE_BYTES": f"{arguments.cache_mib}MiB"}
    if arguments.disk_mib:
        settings["KVBOOST_DISK_DIRECTORY"] = str(folder / "chunks")
        settings["KVBOOST_DISK_BYTES"] = f"{arguments.disk_mib}MiB"
    options = ("--dtype", "float32", "--api-keys", str(folder / "keys"))
    return KVBoostServer(folder, "timing", str(model), *options, **settings)


async def evicted_chunks(server: KVBoostServer) -> int:
    """Chunks that left a tier for want of room."""
    async with server.admin() as admin:
        return int((await state(admin))['kvboost_cache_evictions_total{reason="importance_low"}'])


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table(title=f"documents of {result['prompt_tokens']:g} tokens, sent before or not")
    for column in ("who asks", "cached", "known ms", "fresh ms", "AUC", "95 % interval"):
        table.add_column(column, justify="left" if column == "who asks" else "right")
    for name in ("another tenant", "the same tenant"):
        r = result[name.replace(" ", "_")]
        interval = f"{r['low']:.3f} to {r['high']:.3f}"
        times = (f"{1000 * r['known_s']:.1f}", f"{1000 * r['fresh_s']:.1f}")
        table.add_row(name, f"{r['known_cached']:.0%}", *times, f"{r['auc']:.3f}", interval)
    Console(width=100, stderr=True).print(table)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark and ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory; default: the embedded SmolLM2")
    parser.add_argument("--probes", type=int, default=1000, help="of each kind, by the other tenant")
    parser.add_argument("--round", type=int, default=10, help="documents that ann sends before bob guesses")
    parser.add_argument("--words", type=int, default=45, help="of a document")
    parser.add_argument("--cache-mib", type=int, default=512)
    parser.add_argument("--disk-mib", type=int, default=0, help="a disk tier of this size; 0 for none")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args(argv)
    model = arguments.model or ensure(SMOLLM2)
    keys = {name: secrets.token_hex(16) for name in ("ann", "bob")}
    with (
        tempfile.TemporaryDirectory() as folder,
        start(model, Path(folder), keys, arguments) as server,
        closing(Client(server.url, keys, "served")) as client,
    ):
        found = measure(client, Writer(arguments.words), arguments.probes, arguments.round)
        evicted = asyncio.run(evicted_chunks(server))
    result = {
        "benchmark": "timing",
        "model": model.name,
        "versions": versions(),
        **{name: getattr(arguments, name) for name in ("words", "cache_mib", "disk_mib", "threads")},
        "prompt_tokens": statistics.median(client.prompt_tokens),
        "evicted_chunks": evicted,
        "another_tenant": told(found["bob", "known"], found["bob", "fresh"]),
        "the_same_tenant": told(found["ann", "known"], found["ann", "fresh"]),
    }
    show(result)
    emit(rounded(result), arguments.out)
    return rounded(result)  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
