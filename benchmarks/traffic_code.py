"""Bug localization as traffic: reports over excerpts of code, as pairs that share a prefix, or shifted.

Nothing in the data repeats by itself (1,627 of 1,632 excerpts differ), so the traffic is made, from `SEED`. Reports are
dealt into pools of 20 of one repository; a prompt shows the target's excerpt and two more of its pool, drawn by Zipf's
law. An excerpt is the heads of the four functions that its report's question names, filled up to a fixed length.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from request import SEED, Request, Seen, Writer, rows

SYSTEM = (
    "You are a careful software engineer. Excerpts of source files of one project follow, each behind its path. Read "
    "them all, then name the one function that must be changed so that the report at the end is resolved.\n\n"
)
FIELDS = ("id", "repo", "path", "report", "buggy_source", "functions", "choices", "answer_function", "names_in_report")
"""All that is read. The fix and its commit are not among them, so they can stand in no prompt."""
POOL = 20
SHOWN = 3  # excerpts in a prompt
REPORTS = 3  # over one context in `pairs`: the first is COLD, the others WARM
ROUNDS = 2  # how often a pool's reports are asked in `shifted`, each time in other company
EXCERPT_TOKENS = 410  # a prompt has about 1,200 to 1,500 in all
REPORT_TOKENS = 80
LINE_CHARACTERS = 120

Row = dict[str, Any]


def code_rows() -> list[Row]:
    """The samples whose report does not name the function, with the fields that may be used."""
    return [{f: row[f] for f in FIELDS} for row in rows("buglocal.jsonl") if not row["names_in_report"]]


def pools(samples: Iterable[Row]) -> list[list[Row]]:
    """Samples of one repository, `POOL` each, most popular first; every sample is in one pool at most."""
    rng = random.Random(f"{SEED} pools")
    by_repository: dict[str, list[Row]] = defaultdict(list)
    for row in samples:
        by_repository[row["repo"]].append(row)
    dealt = []
    for _, found in sorted(by_repository.items()):
        rng.shuffle(found)
        dealt += [found[i : i + POOL] for i in range(0, len(found) - POOL + 1, POOL)]
    rng.shuffle(dealt)
    return dealt


def pairs(tokenizer: Any, count: int, excerpt_tokens: int = EXCERPT_TOKENS) -> list[Request]:
    """Several reports over the same excerpts in the same order: all of an episode's prompts share a long prefix."""
    writer = CodeWriter(tokenizer, excerpt_tokens)
    made = (_pair_episode(writer, *drawn) for drawn in enumerate(_contexts()))
    return list(itertools.islice(itertools.chain.from_iterable(made), count))


def shifted(tokenizer: Any, count: int, excerpt_tokens: int = EXCERPT_TOKENS) -> list[Request]:
    """Every request has a head of its own, another order and other neighbours; WARM if all its excerpts were seen."""
    writer = CodeWriter(tokenizer, excerpt_tokens)
    made = (_shifted_episode(writer, number, pool) for number, pool in enumerate(pools(code_rows())))
    return list(itertools.islice(itertools.chain.from_iterable(made), count))


def _contexts() -> Iterator[list[Row]]:
    """The excerpts of an episode of `pairs`, from what its pool has left, so that no report is asked twice.

    The last pools come first: up to 500 requests of each traffic share no report.
    """
    for number, pool in enumerate(reversed(pools(code_rows()))):
        rng, left = random.Random(f"{SEED} pairs {number}"), list(pool)
        while len(left) >= SHOWN:
            context = with_company(rng.choice(left), left, rng)
            yield context
            left = [row for row in left if all(row is not used for used in context)]


def _pair_episode(writer: CodeWriter, episode: int, context: list[Row]) -> Iterator[Request]:
    shown = random.Random(f"{SEED} order {episode}").sample(context, len(context))
    for number, target in enumerate(context[:REPORTS]):
        yield writer.request("pairs", episode, number, number > 0, target, shown)


def _shifted_episode(writer: CodeWriter, episode: int, pool: list[Row]) -> Iterator[Request]:
    rng = random.Random(f"{SEED} shifted {episode}")
    seen, neighbours = Seen(), Counter[tuple[str, str]]()
    targets = [target for _ in range(ROUNDS) for target in rng.sample(pool, len(pool))]
    for number, target in enumerate(targets):
        shown = newest_order(with_company(target, pool, rng), neighbours, rng)
        neighbours.update(adjacent(shown))
        warm = seen.share([row["id"] for row in shown]) == 1
        yield writer.request("shifted", episode, number, warm, target, shown, head(rng))


def with_company(target: Row, pool: list[Row], rng: random.Random) -> list[Row]:
    """The target and more samples of its pool, the popular ones more often (Zipf, exponent 1)."""
    chosen = [target]
    weights = [1 / rank for rank in range(1, len(pool) + 1)]
    while len(chosen) < SHOWN:
        drawn = rng.choices(pool, weights)[0]
        if all(drawn is not row for row in chosen):
            chosen.append(drawn)
    return chosen


def newest_order(context: list[Row], neighbours: Counter[tuple[str, str]], rng: random.Random) -> list[Row]:
    """The order that has the fewest neighbours in common with what was shown before."""
    orders = [list(order) for order in itertools.permutations(context)]
    rng.shuffle(orders)
    return min(orders, key=lambda order: sum(neighbours[pair] for pair in adjacent(order)))


def adjacent(shown: list[Row]) -> list[tuple[str, str]]:
    """Ids of neighbours."""
    return [(a["id"], b["id"]) for a, b in itertools.pairwise(shown)]


def head(rng: random.Random) -> str:
    """A ticket's number and the time at which it came; prompts differ from its first characters on."""
    day, hour, minute, second = rng.randrange(1, 29), rng.randrange(24), rng.randrange(60), rng.randrange(60)
    return f"{rng.getrandbits(32):08x}: a ticket of 2026-03-{day:02d}, {hour:02d}:{minute:02d}:{second:02d}\n\n"


class CodeWriter:
    """Excerpts, questions and options as ids of one tokenizer."""

    def __init__(self, tokenizer: Any, excerpt_tokens: int) -> None:
        self._writer = Writer(tokenizer)
        self._excerpt_tokens = excerpt_tokens
        self._excerpts: dict[str, torch.Tensor] = {}

    def request(
        self, source: str, episode: int, number: int, warm: bool, target: Row, shown: list[Row], head: str = ""
    ) -> Request:
        """The target's report asked over the excerpts `shown`."""
        encode = self._writer.encode
        pieces = [encode(head)] if head else []
        ids = self._writer.prompt(SYSTEM, *pieces, *map(self.excerpt, shown), self.question(target))
        return Request(
            source,
            episode,
            number,
            warm,
            ids,
            options=tuple(encode(f" {choice}\n") for choice in target["choices"]),
            right=target["choices"].index(target["answer_function"]),
            mentioned=mentioned(target),
        )

    def excerpt(self, row: Row) -> torch.Tensor:
        """The heads of the functions that may be chosen, in the order of the file: about `excerpt_tokens` ids."""
        if row["id"] not in self._excerpts:
            lines = [line[:LINE_CHARACTERS] for line in row["buggy_source"].split("\n")]
            kept = _lines_in_turns(row, self._writer.sizes([f"{line}\n" for line in lines]), self._excerpt_tokens)
            text = f"File: {row['path']}\n" + "\n".join(_with_gaps(lines, kept))
            self._excerpts[row["id"]] = self._writer.encode(f"{text}\n\n")
        return self._excerpts[row["id"]]

    def question(self, target: Row) -> torch.Tensor:
        """What is asked, up to where a function's name is the answer."""
        return torch.cat(
            [
                self._writer.encode("Report: "),
                self._writer.cut(target["report"].strip(), REPORT_TOKENS),
                self._writer.encode(f"\nCandidates: {', '.join(target['choices'])}\nThe function to change is"),
            ],
            1,
        )


def mentioned(row: Row) -> tuple[int, ...]:
    """Options whose own name, without its class, stands in the report."""
    return tuple(i for i, choice in enumerate(row["choices"]) if choice.rpartition(".")[2] in row["report"])


def _lines_in_turns(row: Row, sizes: list[int], limit: int) -> list[int]:
    """Line numbers: a line of each function in turn, from its `def` on, then all others, up to `limit` tokens."""
    places = {f["name"]: range(f["start"] - 1, f["end"]) for f in row["functions"]}
    bodies = [places[choice] for choice in row["choices"]]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*bodies))
    kept, spent = set[int](), 0
    for line in itertools.chain(turns, range(len(sizes))):
        if line is None or line in kept:
            continue
        spent += sizes[line]
        if spent > limit:
            break
        kept.add(line)
    return sorted(kept)


def _with_gaps(lines: list[str], kept: list[int]) -> Iterator[str]:
    """The kept lines, with a mark where some are left out."""
    for before, line in zip([None, *kept], kept, strict=False):
        if before is not None and line != before + 1:
            yield "    ..."
        yield lines[line]
