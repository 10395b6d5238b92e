"""`kvboost generate`: one answer, with what was reused for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvboost.cli.console import err, out, print_json, step
from kvboost.cli.models import DTypeOption, ModelOption, open_engine, read_texts
from kvboost.cli.reports import report_json, report_table
from kvboost.errors import InputError

if TYPE_CHECKING:
    from kvboost.engine import Generation, KVBoost

FidelityOption = Annotated[
    Literal["exact", "balanced", "fast"] | None,
    typer.Option(metavar="exact|balanced|fast", help="exact: no moved text is reused. Default: the setting in force."),
]
NewTokensOption = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to generate at most.")]


def run(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: ModelOption = None,
    dtype: DTypeOption = "auto",
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's chat message.")] = False,
    max_new_tokens: NewTokensOption = 128,
    fidelity: FidelityOption = None,
    warm: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text file to warm first; may be repeated.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Print on stderr what was reused.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print answer and report as JSON.")] = False,
) -> None:
    """Answer a prompt greedily and print the text.

    A single call reuses what --warm computed before, and what earlier calls kept if KVBOOST_DISK_DIRECTORY or
    KVBOOST_REDIS_URL is set.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise InputError("the prompt is empty; pass at least one word")
    documents = read_texts(warm or [])
    kv = open_engine(model, dtype)
    settings = {} if fidelity is None else {"fidelity": fidelity}
    for i, document in enumerate(documents):
        with step(f"warming {(warm or [])[i].name}"):
            kv.warm(document)
    with step("generating"):
        asked = [{"role": "user", "content": text}] if chat else text
        answer = kv.generate(asked, **greedy(kv, max_new_tokens), **settings)
    print_answer(answer, report=report, as_json=as_json)


def greedy(kv: KVBoost, max_new_tokens: int) -> dict[str, Any]:
    """Arguments of a reproducible generation that tell transformers everything it would warn about."""
    token = kv.model.generation_config.pad_token_id
    ends = kv.model.generation_config.eos_token_id
    end = ends[0] if isinstance(ends, list) else ends
    return {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": end if token is None else token}


def print_answer(answer: Generation, *, report: bool, as_json: bool) -> None:
    """The text on stdout; the report beside it."""
    if as_json:
        print_json({"text": answer.text, "token_ids": answer.token_ids, "report": report_json(answer.report)})
        return
    out.out(answer.text, highlight=False)
    if report:
        err.print(report_table(answer.report))
