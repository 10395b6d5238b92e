"""The prompts on which repair is chosen and judged: fixed in `cells.json` before anything was tuned.

    python benchmarks/cells.py            # writes cells.json anew from its seed; the file is committed

A *case* is five documents of one kind of text, the order in which they are asked about, and a question. A *cell* is a
kind of text times a capture context, on one model. Every case is run in each of three capture contexts:

    isolated    every document alone behind the system prompt
    related     the five documents in another order, behind another head and another document
    unrelated   every document behind two documents of another case

Between the system prompt and the documents stands a line of its own for each request, so nothing but the system prompt
is an exact hit. Odd cases ask for something that needs two documents, their order, or a negation; even ones quote a
passage or ask what the data set asks. Splits: `tune` for choosing, `calibrate` for the gate's curve, `test` for claims.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from prompts import DATA, encode, shuffled

CELLS = Path(__file__).with_name("cells.json")
SEED = 20261129
DOCUMENTS = 5
DOCUMENT_TOKENS = 160
SPLITS = {"tune": 40, "calibrate": 40, "test": 200}
CONTEXTS = ("isolated", "related", "unrelated")
HEAD = "head"  # a capture context beside the committed three: the same documents in the same order, behind another line
SYSTEM = (
    "You are a careful assistant. Several documents follow, each behind a line of dashes. Read all of them with "
    "care, then answer the question that stands at the end. Answer in one or two short sentences.\n\n"
)
HARD = (
    "Compare documents {a} and {b}: what does each say that the other does not?",
    'Which document stands directly after the one that begins with "{quote}", and what is it about?',
    "Name the documents in the order in which they stand, with a few words for each.",
    "Leave document {a} aside. What do the other documents have in common?",
    "Which of the documents do not mention what document {b} is about?",
)
EASY = "How does the text go on after this passage?\nPassage: {passage}"


@dataclass(frozen=True)
class Case:
    """One prompt. Documents are numbers into the kind's pool; `others` are unrelated ones for the capture contexts."""

    kind: str
    split: str
    number: int
    documents: list[int]
    order: list[int]  # in which they are asked about
    captured: list[int]  # in which they were captured together
    others: list[int]
    target: int
    second: int
    passage_start: int
    template: int  # into HARD; -1: quote a passage; -2: the data set's own question

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.split}/{self.number}"


# --- pools of documents, read from the shared data -------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """A text, and a question that the data set asks about it, if there is one."""

    text: str
    question: str = ""


def pool(kind: str) -> list[Document]:
    """All documents of one kind, in a fixed order."""
    documents = {"code": _code, "prose": _prose, "logs": _logs, "agents": _agents}[kind]()
    return [d for d in documents if len(d.text) > 500]


def _rows(*path: str) -> Iterator[Any]:
    with DATA.joinpath(*path).open() as file:
        yield from map(json.loads, file)


def _code() -> list[Document]:
    return [
        Document(row["buggy_source"], f"Which function must change for this report? {row['report'][:150]}")
        for row in _rows("buglocal.jsonl")
        if not row["names_in_report"]
    ]


def _prose() -> list[Document]:
    found = {
        f"{c['title']}\n{' '.join(c['sentences'])}": row["question"]
        for row in _rows("mdqa", "hotpotqa_distractor_100.jsonl")
        for c in row["context"]
        if any(title == c["title"] for title, _ in row["supporting_facts"])
    }
    rest = {f"{row['title']}\n{row['text']}": "" for row in _rows("mdqa", "nq_docs.jsonl")}
    return [Document(text, question) for text, question in {**rest, **found}.items()]


def _logs() -> list[Document]:
    documents = []
    for path in sorted((DATA / "logs").glob("*_2k.log")):
        lines = path.read_text(errors="replace").splitlines()
        documents += [Document("\n".join(lines[i : i + 12])) for i in range(0, len(lines) - 12, 12)]
    return documents


def _agents() -> list[Document]:
    texts = {}
    for row in _rows("agents", "taubench_airline_gpt4o.jsonl"):
        for message in row["messages"]:
            content = message.get("content")
            if message["role"] in ("tool", "assistant", "user") and isinstance(content, str):
                texts[content] = ""
    for row in _rows("agents", "swe_agent_demos.jsonl"):
        for message in row["messages"][1:]:
            if isinstance(message.get("content"), str):
                texts[message["content"]] = ""
    for row in _rows("chat", "oasst_en_100_tree.jsonl"):
        texts[row["prompt"]["text"]] = ""
        for reply in row["prompt"].get("replies", []):
            texts[reply["text"]] = row["prompt"]["text"][:200]
    return [Document(text, question) for text, question in texts.items()]


KINDS = ("code", "prose", "logs", "agents")


# --- drawing the cases -----------------------------------------------------------------------------------------------


def draw(kind: str, rng: random.Random) -> Iterator[Case]:
    """Cases of one kind; a document stands in one split only, so that nothing tuned on is tested on."""
    numbers = list(range(len(pool(kind))))
    rng.shuffle(numbers)
    total = sum(SPLITS.values())
    at = 0
    for split, count in SPLITS.items():
        share = numbers[at : at + max(12, len(numbers) * count // total)]
        at += len(share)
        for number in range(count):
            yield _case(kind, split, number, rng.sample(share, DOCUMENTS + 3), rng)


def _case(kind: str, split: str, number: int, drawn: list[int], rng: random.Random) -> Case:
    order = shuffled(DOCUMENTS, rng)
    captured = list(range(DOCUMENTS))
    target, second = rng.sample(range(DOCUMENTS), 2)
    template = rng.randrange(len(HARD)) if number % 2 else rng.choice((-1, -2))
    start = rng.randrange(20, DOCUMENT_TOKENS - 70)
    return Case(
        kind, split, number, drawn[:DOCUMENTS], order, captured, drawn[DOCUMENTS:], target, second, start, template
    )


def load(kinds: list[str], splits: list[str], limit: int | None = None) -> list[Case]:
    """The committed cases, at most `limit` per kind and split."""
    cases = [Case(**c) for c in json.loads(CELLS.read_text())["cases"]]
    cases.sort(key=lambda c: c.number)  # kinds in turns, so that a run that is stopped has some of each
    return [c for c in cases if c.kind in kinds and c.split in splits and (limit is None or c.number < limit)]


# --- token ids -------------------------------------------------------------------------------------------------------


class Reader:
    """Turns cases into prompts of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pools: dict[str, list[Document]] = {}
        bos = tokenizer.bos_token_id
        starts = bos is not None and tokenizer("x").input_ids[0] == bos
        self.system = torch.cat([torch.tensor([[bos] if starts else []], dtype=torch.long), self.encode(SYSTEM)], 1)

    def encode(self, text: str) -> torch.Tensor:
        """Token ids [1, n] without special tokens."""
        return encode(text, self._tokenizer)

    def document(self, kind: str, number: int) -> torch.Tensor:
        """Token ids [1, n] of a document, cut at about `DOCUMENT_TOKENS`; the same wherever it stands."""
        if kind not in self._pools:
            self._pools[kind] = pool(kind)
        body = self.encode(f"---\n{self._pools[kind][number].text}")[:, : DOCUMENT_TOKENS - 2]
        return torch.cat([body, self.encode("\n\n")], 1)

    def head(self, text: str) -> torch.Tensor:
        """The line of its own that a request has behind the system prompt."""
        return torch.cat([self.system, self.encode(f"Request {text}\n\n")], 1)

    def prompt(self, case: Case) -> torch.Tensor:
        """The prompt that is measured, [1, T]."""
        documents = [self.document(case.kind, case.documents[i]) for i in case.order]
        return torch.cat([self.head(f"{case.number + 7:04d} of the day"), *documents, self.question(case)], 1)

    def question(self, case: Case) -> torch.Tensor:
        """What is asked, [1, n]."""
        target = self.document(case.kind, case.documents[case.target])
        passage = self._tokenizer.decode(target[0, case.passage_start : case.passage_start + 16])
        own = self._pools[case.kind][case.documents[case.target]].question
        places = {d: place + 1 for place, d in enumerate(case.order)}
        if case.template >= 0:
            quote = self._tokenizer.decode(target[0, 3:11])
            text = HARD[case.template].format(a=places[case.target], b=places[case.second], quote=quote.strip())
        elif case.template == -2 and own:
            text = own
        else:
            return self.encode(f"Question: {EASY.format(passage=passage)}")
        return self.encode(f"Question: {text}\nAnswer:")

    def captures(self, case: Case, context: str) -> list[torch.Tensor]:
        """The requests, [1, T] each, that bring the documents into the cache in one capture context."""
        documents = [self.document(case.kind, n) for n in case.documents]
        others = [self.document(case.kind, n) for n in case.others]
        if context == "isolated":
            return [torch.cat([self.system, d], 1) for d in documents]
        if context == HEAD:
            return [torch.cat([self.head("of yesterday"), *(documents[i] for i in case.order)], 1)]
        if context == "related":
            together = [others[2], *(documents[i] for i in case.captured)]
            return [torch.cat([self.head("of yesterday"), *together], 1)]
        before = torch.cat([self.head("from elsewhere"), *others[:2]], 1)
        return [torch.cat([before, d], 1) for d in documents]


def main() -> None:
    """Writes the committed file."""
    cases = [case for kind in KINDS for case in draw(kind, random.Random(f"{SEED} {kind}"))]
    header = {
        "seed": SEED,
        "documents": DOCUMENTS,
        "document_tokens": DOCUMENT_TOKENS,
        "weights": "every cell counts alike; mean, p95 and worst over its cases",
        "budget": 0.15,
        "continuation_tokens": 32,
        "systems": ["none", "epic", "cacheblend (values)", "cacheblend (attention)", "guided"],
    }
    lines = ",\n".join(json.dumps(asdict(c), separators=(",", ":")) for c in cases)
    CELLS.write_text(f'{json.dumps(header)[:-1]}, "cases": [\n{lines}\n]}}\n')
    print(f"{len(cases)} cases")


if __name__ == "__main__":
    main()
