"""`kvboost warm`: computes the chunks of files, and says what was kept and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvboost.cli.console import bytes_text, make_table, note, out, seconds_text, step
from kvboost.cli.generate import NewTokensOption, greedy, print_answer
from kvboost.cli.models import DTypeOption, ModelOption, converse, open_engine, read_texts

if TYPE_CHECKING:
    from kvboost.engine import KVBoost

ENDS = "The chunks were in this process's memory and end with it. Set KVBOOST_DISK_DIRECTORY to keep them."
FLUSH_S = 60.0


def run(
    files: Annotated[list[Path], typer.Argument(help="Text files.")],
    model: ModelOption = None,
    dtype: DTypeOption = "auto",
    context: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Text that stands before each file. Default: the template's system prompt."),
    ] = None,
    then: Annotated[
        str | None, typer.Option(metavar="QUESTION", help="Then answer this question about all files.")
    ] = None,
    max_new_tokens: NewTokensOption = 128,
) -> None:
    """Compute the KV of text files and report what is kept.

    What is kept outlives the command if KVBOOST_DISK_DIRECTORY or KVBOOST_REDIS_URL is set. Otherwise it is this
    process's memory; --then shows what warming is worth.
    """
    texts = read_texts(files)
    kv = open_engine(model, dtype)
    table = make_table("file", "tokens", "reused", "kept", "chunks", "size", "time", numbers=range(1, 7))
    for path, text in zip(files, texts, strict=True):
        before = kv.store.stats()
        with step(f"warming {path.name}"):
            report = kv.warm(text, context)
        after = kv.store.stats()
        counts = (report.prompt_tokens, report.reused_tokens, report.written_tokens, after.entries - before.entries)
        size = bytes_text(after.bytes_used - before.bytes_used)
        table.add_row(path.name, *(f"{c:,}" for c in counts), size, seconds_text(report.ttft_s))
    out.print(table)
    note(_what_lasts(kv))
    if then is not None:
        with step("answering"):
            prompt = converse(kv, "\n\n".join([*texts, then]), context)
            answer = kv.generate(prompt, **greedy(kv, max_new_tokens))
        print_answer(answer, report=True, as_json=False)


def _what_lasts(kv: KVBoost) -> str:
    """Where the chunks are once the command has ended."""
    lower = [tier.name for tier in kv.store.tiers[1:]]
    if not lower:
        return ENDS
    if not kv.flush(FLUSH_S):
        return f"Not everything could be written to {' and '.join(lower)} within {FLUSH_S:.0f} s; see the log."
    failed = {name: dict(s.errors) for name, s in kv.store.stats_by_tier().items() if name in lower and s.errors}
    return f"Kept on {' and '.join(lower)}." if not failed else f"Some chunks were not kept: {failed}"
