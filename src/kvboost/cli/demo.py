"""`kvboost demo`: a story of real requests, each beside a full prefill, and a token map of one of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Group
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvboost.cli.console import make_table, out, seconds_text
from kvboost.cli.generate import greedy
from kvboost.cli.models import DTypeOption, ModelOption, converse, open_engine
from kvboost.errors import InputError

if TYPE_CHECKING:
    from kvboost.demo.play import Outcome
    from kvboost.demo.story import Story
    from kvboost.engine import KVBoost
    from kvboost.tokenmap import MappedChunk

NEW_TOKENS = 24
COLUMNS = ("request", "full s", "ours s", "gain", "exact", "cont", "moved", "rep.", "fresh", "answer")
LEGEND = (
    "full, ours: seconds to the first token of a full prefill, and of KVBoost. cont: kept rows built on moved "
    "text. rep.: moved rows that were computed again. ≠ N: the answers part at token N."
)
KINDS = ("exact", "continued", "moved", "repaired", "fresh")
PAGE_COLUMNS = ("request", "full prefill (s)", "KVBoost (s)", "gain", *KINDS, "answer")


def run(
    model: ModelOption = None,
    story: Annotated[
        Literal["logs", "review", "both"], typer.Option(metavar="logs|review|both", help="Which story to play.")
    ] = "logs",
    html: Annotated[Path, typer.Option(metavar="FILE", help="Where the token map goes.")] = Path("kvboost-demo.html"),
    dtype: DTypeOption = "auto",
) -> None:
    """Play a story of real requests and draw where one prompt's KV came from.

    Every request runs twice: through the cache, and as a full prefill. The table tells the time to the first token of
    both, how many prompt tokens were exact, continued, moved, repaired (a part of moved) and fresh, and whether the
    greedy answers agree. The model is fetched and converted on first use; that takes a minute or two.
    """
    if not html.absolute().parent.is_dir():
        raise InputError(f"cannot write {str(html)!r}: its folder does not exist")
    kv = open_engine(model, dtype)
    from kvboost.demo.stories import load_stories

    stories = load_stories()
    played: list[Outcome] = []
    for one in stories:
        if story in (one.name, "both"):
            played += _play(kv, one, next(s for s in stories if s is not one))
    _summarize(kv, played)
    _draw(kv, played, html)


def _play(kv: KVBoost, story: Story, other: Story) -> list[Outcome]:
    from kvboost.demo.play import play
    from kvboost.demo.story import make_requests

    kv.invalidate()  # every story starts cold
    requests = list(make_requests(story, other, lambda system, user: converse(kv, user, system)))
    out.print(Text(f"\n{story.title}", style="bold"))
    table = make_table(*COLUMNS, numbers=range(1, 9))
    table.columns[0].no_wrap = True
    bar = Progress(TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    task = bar.add_task(requests[0].shows, total=len(requests))
    played: list[Outcome] = []
    with Live(Group(table, bar), console=out, refresh_per_second=4) as live:
        for outcome in play(kv, requests, **greedy(kv, NEW_TOKENS)):
            played.append(outcome)
            table.add_row(*_cells(outcome))
            coming = requests[len(played)].shows if len(played) < len(requests) else ""
            bar.update(task, advance=1, description=coming)
        live.update(table, refresh=True)
    out.print()
    return played


def _cells(outcome: Outcome) -> list[str | Text]:
    report = outcome.ours.report
    apart = outcome.first_difference
    return [
        outcome.request.shows,
        f"{outcome.full.report.ttft_s:.2f}",
        f"{report.ttft_s:.2f}",
        f"{outcome.speedup:.1f}x",
        *(f"{getattr(report, f'{kind}_tokens'):,}" for kind in KINDS),
        Text("same", "green") if apart is None else Text(f"≠ {apart + 1}", "yellow"),
    ]


def _summarize(kv: KVBoost, played: Sequence[Outcome]) -> None:
    """What the columns mean, the sums, and the answers that differ."""
    full, ours = (sum(getattr(o, side).report.ttft_s for o in played) for side in ("full", "ours"))
    prompt, reused = (sum(getattr(o.ours.report, f"{n}_tokens") for o in played) for n in ("prompt", "reused"))
    same = sum(o.first_difference is None for o in played)
    out.print(
        f"Time to the first token, all requests: {seconds_text(full)} in full, {seconds_text(ours)} with KVBoost. "
        f"{reused:,} of {prompt:,} prompt tokens were not computed. {same} of {len(played)} greedy answers of "
        f"{NEW_TOKENS} tokens are the same. {_dtype(kv)} on {kv.model.device}.",
        highlight=False,
    )
    out.print(f"[dim]{LEGEND}[/]", highlight=False)
    for outcome in played:
        if outcome.first_difference is not None:
            _print_answers(outcome)


def _print_answers(outcome: Outcome) -> None:
    answers = Table.grid(padding=(0, 2))
    for name, side in (("full prefill", outcome.full), ("KVBoost", outcome.ours)):
        answers.add_row(Text(name, "dim"), Text(" ".join(side.text.split())))
    out.print(Text(f"\n{outcome.request.shows}:"))
    out.print(Padding(answers, (0, 0, 0, 2)))


def _draw(kv: KVBoost, played: Sequence[Outcome], path: Path) -> None:
    """The token map of the prompt that mixes most kinds, in the terminal and as a page."""
    from kvboost.cli.strip import TokenStrip
    from kvboost.demo.page import render_page

    outcome = max(played, key=lambda o: (_variety(o), o.ours.report.moved_tokens))
    chunks = _token_map(kv, outcome)
    out.print(Text(f"\nWhere the rows of {outcome.request.shows!r} came from, token by token", "bold"))
    out.print(TokenStrip(chunks))
    rows = [PAGE_COLUMNS, *([str(c) for c in _cells(o)] for o in played)]
    try:
        path.write_text(render_page(chunks, f"KVBoost token map: {outcome.request.shows}", rows), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from None
    out.print(f"The same map with its text, for a browser: {path}", highlight=False)


def _token_map(kv: KVBoost, outcome: Outcome) -> tuple[MappedChunk, ...]:
    from kvboost.prompts import encode
    from kvboost.tokenmap import make_token_map

    ids = encode(outcome.request.prompt, kv.tokenizer, kv.model)[0].tolist()
    return make_token_map(outcome.ours.plan, ids, kv.tokenizer)


def _variety(outcome: Outcome) -> int:
    return sum(getattr(outcome.ours.report, f"{kind}_tokens") > 0 for kind in KINDS)


def _dtype(kv: KVBoost) -> str:
    return str(kv.model.dtype).removeprefix("torch.")
