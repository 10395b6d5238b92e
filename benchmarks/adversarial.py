"""Prompts that are made to break reuse: unchanged text that means something else behind what stands before it now.

    kvboost bench adversarial [--gemma] [--fidelity balanced]

Six kinds: a pronoun whose referent changed, a reference to "the document before", contradicting documents of which the
later counts, a question in front of the documents, an instruction in front of unchanged text, and a negation in front.
Each is captured with one beginning and asked with another. An answer is *right* if the KL of the full prefill's own 32
greedy tokens is within the bound of the fidelity, and else must have been escalated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fidelity import divergence, full_prefill
from kvboost import KVBoost
from kvboost.hf.embedded import GEMMA3, SMOLLM2, ensure
from kvboost.repair.gate import bound
from prompts import encode

SYSTEM = (
    "You answer questions about notes of a small harbour town. Read all notes with care, in the order in which they "
    "stand, and answer in one short sentence. Quote names and dates exactly.\n\n"
)
PEOPLE = ("Maria Lopez", "Ingrid Olsen", "Tom Baker", "Yusuf Demir")
NOTE = (
    "Note: {who} has run the harbour office since the spring of {year}. The office stands behind the fish market,"
    " next to the old crane, and opens at seven. On Mondays it is closed, because the ferry does not run.\n\n"
)
PRONOUN = (
    "Note: In the same year that person signed the contract for the new pier, over the protest of the council, "
    "and paid the first bill out of the office's own money. The bill was for nine thousand crowns, the pier took "
    "two summers, and the council has never forgotten it. All who ask are sent to that person, who keeps the "
    "papers in a blue box.\n\n"
)
BEFORE = (
    "Note: What the note directly before this one says about opening hours is wrong; everything else in it is "
    "right. The true hours are nine to four, on all days but Sunday. Whoever comes earlier waits in the café "
    "across the street, where the harbour master has breakfast with the pilots and the two customs officers.\n\n"
)
FIRST = (
    "Note: The ferry to the islands leaves at six in the morning from the north pier, says the notice of the council."
    "\n\n"
)
SECOND = (
    "Note: The ferry to the islands leaves at eight in the evening from the south pier, says the harbour master.\n\n"
)
LATER = (
    "Note: Of two notes that contradict each other the later one counts. This rule was made after the winter of "
    "the two ferries, when half of the passengers stood on one pier and half on the other, and the boat left with"
    " nobody but the cook. It has been kept since then, and nobody in town has missed the boat because of a note.\n\n"
)
ASK = "Question: {question}\nAnswer:"


@dataclass(frozen=True)
class Trap:
    """What is captured, and what is asked over the same text with another beginning."""

    kind: str
    captured: str
    asked: str


def traps() -> Iterator[Trap]:
    """All prompts, a few of each kind."""
    for i, who in enumerate(PEOPLE):
        other, year = PEOPLE[(i + 1) % len(PEOPLE)], 1990 + 3 * i
        notes = [NOTE.format(who=w, year=year + n) for n, w in enumerate((who, other))]
        ask = ASK.format(question="Who signed the contract for the new pier?")
        yield Trap("pronoun", SYSTEM + notes[0] + PRONOUN + ask, SYSTEM + notes[1] + PRONOUN + ask)
        ask = ASK.format(question="Of whose office are the opening hours wrong?")
        yield Trap(
            "the document before",
            SYSTEM + notes[0] + notes[1] + BEFORE + ask,
            SYSTEM + notes[1] + notes[0] + BEFORE + ask,
        )
    ask = ASK.format(question="From which pier does the ferry leave, and when?")
    for gap in ("", PRONOUN, BEFORE):
        yield Trap(
            "contradiction", SYSTEM + FIRST + gap + SECOND + LATER + ask, SYSTEM + SECOND + gap + FIRST + LATER + ask
        )
    body = NOTE.format(who=PEOPLE[0], year=1994) + PRONOUN + BEFORE + LATER
    questions = ("Which animal is named?", "What is the colour of the box?", "Who has breakfast in the café?")
    for one, other in zip(questions, questions[1:] + questions[:1], strict=True):
        yield Trap(
            "question in front",
            f"{SYSTEM}Keep this question in mind: {one}\n\n{body}The answer is:",
            f"{SYSTEM}Keep this question in mind: {other}\n\n{body}The answer is:",
        )
    orders = ("List all names of people.", "List all dates and numbers.", "Write the first words of each note.")
    for one, other in zip(orders, orders[1:] + orders[:1], strict=True):
        yield Trap(
            "instruction in front", f"{SYSTEM}Task: {one}\n\n{body}Result:", f"{SYSTEM}Task: {other}\n\n{body}Result:"
        )
    for what in ("money", "the ferry", "the office"):
        yield Trap(
            "negation in front",
            f"{SYSTEM}Speak of {what} only.\n\n{body}Summary:",
            f"{SYSTEM}Leave {what} out, never speak of it.\n\n{body}Summary:",
        )


def judge(kv: KVBoost, trap: Trap, **settings: Any) -> dict[str, Any]:
    """Captures, asks, and compares with a full prefill."""
    kv.invalidate()
    captured, asked = (torch.cat([start_of_text(kv), encode(t, kv.tokenizer)], 1) for t in (trap.captured, trap.asked))
    kv.generate(captured, max_new_tokens=1, do_sample=False)
    answer, truth = full_prefill(kv, asked)
    ours, report = kv.score(asked, answer, **settings)
    found = divergence(truth, ours)
    allowed = bound(kv.settings(**settings))
    return {
        "kind": trap.kind,
        "kl": found["kl"],
        "top1": found["top1"],
        "risk": report.risk,
        "bound": allowed,
        "moved": report.moved_tokens,
        "escalations": report.escalations,
        "prefilled": report.fallback is not None,
        "right": found["kl"] <= allowed,
    }


def start_of_text(kv: KVBoost) -> torch.Tensor:
    """The token that this tokenizer puts in front of a text, [1, 0 or 1]."""
    bos = kv.tokenizer.bos_token_id
    starts = bos is not None and kv.tokenizer("x").input_ids[0] == bos
    return torch.tensor([[bos] if starts else []], dtype=torch.long)


def main() -> None:
    """Runs the benchmark and ends with one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma", action="store_true", help="Gemma 3 270M instead of SmolLM2-135M-Instruct")
    parser.add_argument("--fidelity", default="balanced", choices=["balanced", "fast"])
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kv = KVBoost.from_pretrained(ensure(GEMMA3 if arguments.gemma else SMOLLM2), dtype=torch.float32)
    rows = [judge(kv, trap, fidelity=arguments.fidelity) for trap in traps()]
    table = Table(title=f"adversarial prompts, fidelity {arguments.fidelity}")
    for column in ("kind", "moved", "risk", "KL", "top-1", "escalations", "prefilled", "right"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for r in rows:
        shown = (str(r["moved"]), f"{r['risk'] or 0:.3f}", f"{r['kl']:.4f}", f"{r['top1']:.0%}", str(r["escalations"]))
        table.add_row(r["kind"], *shown, "yes" if r["prefilled"] else "", "yes" if r["right"] else "NO")
    Console(width=110, stderr=True).print(table)
    wrong = sum(not r["right"] for r in rows)
    print(json.dumps({"benchmark": "adversarial", "prompts": len(rows), "wrong": wrong, "rows": rows}))


if __name__ == "__main__":
    main()
