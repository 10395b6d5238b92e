"""Traffic of other kinds out of the shared data: retrieved paragraphs, documents, logs, agents, key-value look-up.

A request is WARM if at least half of its pieces (paragraphs, documents, lines, messages; all records in `lookup`) were
in a request before it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from prompts import DATA
from request import SEED, Request, Seen, Writer, rows

WARM_SHARE = 0.5
RETRIEVAL = "Paragraphs of an encyclopedia follow. Read them all.\n\n"
MDQA = "Write a short answer for the question, using only the documents below; some of them do not matter.\n\n"
LOGS = "You are on call. A part of a log follows, the oldest line first. Answer the question that comes after it.\n\n"
LOOKUP = "Extract the value that belongs to the given key from the records below.\n\n"
NEIGHBOURHOOD = range(10, 21)  # requests that share paragraphs, in an episode of `retrieval`
LOG_EPISODE = 20
LINE_CHARACTERS = 120  # the component that is asked for stands further in front in every line
PARAGRAPH_TOKENS = 300
AGENTS_AT_ONCE = 4
MAX_AGENT_TOKENS = 2500
LOOKUP_TOKENS = 1300
LOOKUPS = 4  # per set of records: the first is COLD


def retrieval(tokenizer: Any, count: int) -> list[Request]:
    """Five paragraphs each, as a real retriever returned them; the trace holds no questions.

    Repeats lie a median of 171 requests apart, more than a cache of some GB holds. So the trace is cut into
    neighbourhoods: 10 to 20 requests that share paragraphs with one another, in the order of the trace. 613 of its
    1,000 requests are in one; 25 % of their slots repeat inside it, 28 % in the whole trace.
    """
    writer = Writer(tokenizer)
    place = DATA / "traces" / "rag_retrieval_2wikimultihopqa.json"
    if not place.exists():
        raise SystemExit(f"{place.name} is missing: this benchmark reads the shared data folder beside the project")
    trace = json.loads(place.read_text(encoding="utf-8"))
    question = writer.encode("Question: who or what do these paragraphs have in common?\nAnswer:")

    def paragraph(i: int) -> torch.Tensor:
        return torch.cat([writer.cut(trace["docs"][i], PARAGRAPH_TOKENS), writer.encode("\n\n")], 1)

    made = []
    for episode, requests in enumerate(neighbourhoods([r["docs"] for r in trace["requests"]])):
        seen = Seen()
        for number, shown in enumerate(requests):
            pieces = [paragraph(i) for i in shown]
            warm = seen.share(shown) >= WARM_SHARE
            made.append(Request("retrieval", episode, number, warm, writer.prompt(RETRIEVAL, *pieces, question)))
            if len(made) == count:
                return made
    return made


def neighbourhoods(requests: list[list[int]]) -> Iterator[list[list[int]]]:
    """Requests that are connected by shared documents, at most 20 each, fewer than 10 left out; none stands in two."""
    users: dict[int, list[int]] = defaultdict(list)
    for i, documents in enumerate(requests):
        for document in documents:
            users[document].append(i)
    used: set[int] = set()
    for first in range(len(requests)):
        found, queue = list[int](), [first]
        while queue and len(found) < NEIGHBOURHOOD[-1]:
            at = queue.pop(0)
            if at not in used:
                used.add(at)
                found.append(at)
                queue += [i for document in requests[at] for i in users[document] if i not in used]
        if len(found) in NEIGHBOURHOOD:
            yield [requests[i] for i in sorted(found)]


def mdqa(tokenizer: Any, count: int) -> list[Request]:
    """Real questions over ten numbered documents; an episode's documents come from a pool of 40."""
    writer = Writer(tokenizer)
    documents = {row["id"]: row for row in rows("mdqa", "nq_docs.jsonl")}
    made = []
    for pool, group in itertools.groupby(rows("mdqa", "nq_multidoc_600.jsonl"), key=lambda row: row["pool"]):
        seen = Seen()
        for number, row in enumerate(group):
            pieces = []
            for place, d in enumerate((documents[i] for i in row["doc_ids"]), 1):
                pieces += [writer.encode(f"Document [{place}]"), writer.encode(f"(Title: {d['title']}) {d['text']}\n")]
            question = writer.encode(f"\nQuestion: {row['question']}\nAnswer:")
            warm = seen.share(row["doc_ids"]) >= WARM_SHARE
            ids = writer.prompt(MDQA, *pieces, question)
            made.append(Request("mdqa", pool, number, warm, ids, expected=tuple(f" {a}" for a in row["answers"])))
            if len(made) == count:
                return made
    return made


def logs(tokenizer: Any, count: int) -> list[Request]:
    """Windows of 30 log lines that slide by about ten; which component wrote the first warning?"""
    writer = Writer(tokenizer)
    made: list[Request] = []
    for _, group in itertools.groupby(rows("logs", "log_qa.jsonl"), key=lambda row: row["log"]):
        windows = list(group)
        for start in range(0, len(windows), LOG_EPISODE):
            episode = made[-1].episode + 1 if made else 0
            made += _log_episode(writer, episode, windows[start : start + LOG_EPISODE])
    return made[:count]


def _log_episode(writer: Writer, episode: int, windows: list[Any]) -> Iterator[Request]:
    seen, rng = Seen(), random.Random(f"{SEED} logs {episode}")
    for number, row in enumerate(windows):
        head = writer.encode(f"It is {rng.randrange(24):02d}:{rng.randrange(60):02d}. The log of {row['log']}:\n")
        lines = [writer.encode(f"{line[:LINE_CHARACTERS]}\n") for line in row["lines"]]
        question = writer.encode(f"\nQuestion: {row['question']}\nAnswer:")
        places = range(row["first_line"], row["first_line"] + len(row["lines"]))
        yield Request(
            "logs",
            episode,
            number,
            seen.share(places) >= WARM_SHARE,
            writer.prompt(LOGS, head, *lines, question),
            options=tuple(writer.encode(f" {choice}\n") for choice in row["choices"]),
            right=row["choices"].index(row["answer"]),
            expected=(f" {row['answer']}",),
        )


def agents(tokenizer: Any, count: int) -> list[Request]:
    """The turns of agent runs with tools, several runs at once: histories grow, tool outputs repeat between runs.

    A run's first turn is COLD, though the runs of an episode share their system prompt.
    """
    writer = Writer(tokenizer)
    runs = [row["messages"] for row in rows("agents", "taubench_airline_gpt4o.jsonl")]
    runs += [row["messages"] for row in rows("agents", "swe_agent_demos.jsonl")]
    random.Random(f"{SEED} agents").shuffle(runs)
    made: list[Request] = []
    for episode, start in enumerate(range(0, len(runs), AGENTS_AT_ONCE)):
        turns = [list(_turns(writer, run)) for run in runs[start : start + AGENTS_AT_ONCE]]
        order = [(i, ids) for step in itertools.zip_longest(*turns) for i, ids in enumerate(step) if ids is not None]
        started: set[int] = set()
        for number, (run, ids) in enumerate(order):
            made.append(Request("agents", episode, number, run in started, ids))
            started.add(run)
        if len(made) >= count:
            break
    return made[:count]


def _turns(writer: Writer, messages: list[Any]) -> Iterator[torch.Tensor]:
    """The prompt of every answer of the assistant, as long as it is not too long."""
    history: list[torch.Tensor] = []
    for message in messages:
        if message["role"] == "assistant" and history:
            ids = writer.prompt("", *history, writer.encode("assistant:\n"))
            if ids.shape[1] > MAX_AGENT_TOKENS:
                return
            yield ids
        calls = message.get("tool_calls")
        text = (message.get("content") or "") + (json.dumps(calls) if calls else "")
        history.append(writer.encode(f"{message['role']}:\n{text}\n\n"))


def lookup(tokenizer: Any, count: int) -> list[Request]:
    """Which value belongs to a key? The same records in another order, another key asked: exact, or reuse is wrong."""
    writer = Writer(tokenizer)
    made: list[Request] = []
    for episode, row in enumerate(rows("mdqa", "kv_retrieval_75keys_50.jsonl")):
        rng = random.Random(f"{SEED} lookup {episode}")
        records = _fitting(writer, row["ordered_kv_records"])
        for number, (key, value) in enumerate(rng.sample(records, LOOKUPS)):
            shown = records if number == 0 else rng.sample(records, len(records))
            values = [value, *rng.sample([v for _, v in records if v != value], 3)]
            rng.shuffle(values)
            pieces = [writer.encode(_record(*record)) for record in shown]
            question = writer.encode(f'\nKey: "{key}"\nIts value: "')
            made.append(
                Request(
                    "lookup",
                    episode,
                    number,
                    number > 0,
                    writer.prompt(LOOKUP, *pieces, question),
                    options=tuple(writer.encode(v) for v in values),
                    right=values.index(value),
                    expected=(value,),
                )
            )
        if len(made) >= count:
            break
    return made[:count]


def _record(key: str, value: str) -> str:
    return f'"{key}": "{value}"\n'


def _fitting(writer: Writer, records: list[list[str]]) -> list[list[str]]:
    """The first records, as many as fit."""
    ends = itertools.accumulate(writer.sizes([_record(*record) for record in records]))
    return records[: sum(end <= LOOKUP_TOKENS for end in ends)]
