"""`kvboost cache`: looks into the records that outlive a process, checks, removes, and moves them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvboost.cli.console import bytes_text, make_table, note, out, print_json, step
from kvboost.cli.lasting import Survey, open_store
from kvboost.errors import InputError

if TYPE_CHECKING:
    from kvboost.store.tier import LastingTier, StoredRecord

DAMAGED = 1  # exit code
EXCERPT = 60  # characters of a text in the table

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look into a cache on disk or in Redis.")

WhereArgument = Annotated[str, typer.Argument(help="Directory of a disk cache, or a redis:// or rediss:// URL.")]
PrefixOption = Annotated[
    str | None, typer.Option("--prefix", metavar="NAME", help="Prefix of the keys in Redis. Default: kvboost.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Kind = Literal["own", "link"]
Order = Literal["used", "hits", "size", "position"]


@app.callback()
def _group() -> None:
    """Look into a cache on disk or in Redis: what is there, whether it is sound; remove it, or move it elsewhere.

    Records are checked with the secret in KVBOOST_HASH_SECRET, as the program that wrote them does.
    """


@app.command("ls")
def ls(
    where: WhereArgument,
    prefix: PrefixOption = None,
    kind: Annotated[
        Kind | None, typer.Option(metavar="own|link", help="Only chunks with rows of their own, or only links.")
    ] = None,
    lineage: Annotated[
        Literal["bit_exact", "lossy", "approximate"] | None,
        typer.Option(metavar="bit_exact|lossy|approximate", help="Only chunks of this lineage."),
    ] = None,
    codec: Annotated[str | None, typer.Option(metavar="NAME", help="Only chunks kept in this codec.")] = None,
    sort: Annotated[
        Order, typer.Option(metavar="used|hits|size|position", help="What comes first: last used, most hits, ...")
    ] = "used",
    limit: Annotated[int, typer.Option(metavar="N", min=0, help="Chunks to list at most; 0 for all.")] = 50,
    show_text: Annotated[bool, typer.Option("--show-text", help="Show the text too; needs --tokenizer.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model directory or hub name whose tokenizer reads the text.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the chunks: where each stood, how long and how true it is, and how it is used.

    Text is never shown unless it is asked for: records hold the tokens of prompts. The id is the beginning of the
    chunk's prefix hash, which is keyed by the secret.
    """
    if show_text and tokenizer is None:
        raise InputError("--show-text needs --tokenizer: records hold token ids, not text")
    decode = _decoder(tokenizer) if show_text and tokenizer else None
    wanted: list[tuple[float, dict[str, Any]]] = []
    total = 0
    with open_store(where, prefix) as store:
        for record in store.records():
            if record.header is None:
                continue
            total += 1
            entry = _entry(record)
            if _matches(entry, kind=kind, lineage=lineage, codec=codec):
                text = {} if decode is None else {"text": decode(record)}
                wanted.append((_rank(record, sort), {**entry, **text}))
    wanted.sort(key=lambda pair: pair[0])
    shown = [entry for _, entry in wanted[: limit or None]]
    if as_json:
        print_json(shown)
        return
    _print_entries(shown)
    note(f"{len(shown):,} of {len(wanted):,} chunks" + (f", {total:,} in all" if total > len(wanted) else ""))


@app.command("stats")
def stats(where: WhereArgument, prefix: PrefixOption = None, as_json: JsonOption = False) -> None:
    """Count what is there: records, bytes, and tokens by kind, lineage and codec."""
    with open_store(where, prefix) as store:
        totals = store.stats()
        survey = Survey.of(store.records())
    facts: dict[str, Any] = {
        "records": totals.entries,
        "bytes": totals.bytes_used,
        "tokens": survey.tokens,
        "hits": survey.hits,
        "unreadable": survey.unreadable,
    }
    if as_json:
        print_json({**facts, "groups": survey.groups})
        return
    for name, count in facts.items():
        out.print(f"{name:<10} {bytes_text(count) if name == 'bytes' else f'{count:,}':>12}", highlight=False)
    table = make_table("kind", "lineage", "codec", "records", "tokens", "size", numbers=(3, 4, 5))
    for group in survey.groups:
        counts = (f"{group['records']:,}", f"{group['tokens']:,}", bytes_text(group["bytes"]))
        table.add_row(group["kind"], group["lineage"], group["codec"], *counts)
    out.print(table)
    if survey.unreadable:
        note("unreadable: damaged, or of another secret (KVBOOST_HASH_SECRET); see `kvboost cache verify`")


@app.command("clear")
def clear(
    where: WhereArgument,
    prefix: PrefixOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove every record of every namespace, model and secret."""
    with open_store(where, prefix) as store:
        entries = store.stats().entries
        if not yes:
            typer.confirm(f"Remove all {entries:,} records of {_shown(where)}?", abort=True)
        removed = store.delete()
    note(f"removed {removed:,} records")


@app.command("verify")
def verify(
    where: WhereArgument,
    prefix: PrefixOption = None,
    delete: Annotated[bool, typer.Option("--delete", help="Remove the damaged records.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every record and check its seal.

    Exit code 0: all are sound. 1: some are damaged; each is told with the reason. When not a single record is sound
    nothing is removed: then it is more likely that the secret is another one.
    """
    with open_store(where, prefix) as store, step("checking"):
        sound, damaged = _check(store)
        refused = delete and damaged and not sound
        removed = store.delete(list(damaged)) if delete and damaged and not refused else 0
    if as_json:
        listed = [{"id": _short(i), "damage": reason} for i, reason in damaged.items()]
        print_json({"sound": sound, "damaged": listed, "removed": removed})
    else:
        for record_id, reason in damaged.items():
            out.print(f"{_short(record_id)}  {reason}", highlight=False, markup=False, soft_wrap=True)
        out.print(
            f"{sound:,} records are sound, {len(damaged):,} are damaged, {removed:,} were removed", highlight=False
        )
    if refused:
        note("nothing was removed: no record is sound, so KVBOOST_HASH_SECRET is probably another one than theirs")
    raise typer.Exit(DAMAGED if damaged else 0)


@app.command("export")
def export(
    where: WhereArgument,
    file: Annotated[Path, typer.Argument(help="The archive to write (tar); it must not exist.")],
    prefix: PrefixOption = None,
) -> None:
    """Write all sound records into one file, sealed as they are.

    The file holds prompts (tokens, keys and values), encrypted only if the records are; only this user may read it.
    Exit code 1: damaged records were left out.
    """
    from kvboost.cli.archive import write_archive

    with open_store(where, prefix) as store, step("exporting"):
        written, damaged = write_archive(file, store)
    note(f"wrote {written:,} records to {file}")
    _leave_with(damaged)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="An archive of `kvboost cache export`.")],
    where: WhereArgument,
    prefix: PrefixOption = None,
) -> None:
    """Read the records of an archive into a cache; each is checked first.

    They are served to the same model, namespace and secret only. Encrypted records stay encrypted. Exit code 1: records
    that are damaged, or of another secret, were left out.
    """
    from kvboost.cli.archive import read_archive

    with step("importing"):
        read, new, damaged = read_archive(file, where, prefix)
    note(f"read {read:,} records, {new:,} of them new")
    _leave_with(damaged)


def _leave_with(damaged: Counter[str]) -> None:
    for reason, count in damaged.items():
        note(f"left out {count:,}: {reason}")
    raise typer.Exit(DAMAGED if damaged else 0)


def _check(store: LastingTier) -> tuple[int, dict[bytes, str]]:
    """How many records are sound, and what is wrong with the others."""
    from kvboost.cli.archive import damage_of

    sound, damaged = 0, dict[bytes, str]()
    for record in store.records():
        reason = damage_of(store, record)
        if reason is None:
            sound += 1
        else:
            damaged[record.record_id] = reason
    still_there = {r.record_id for r in store.records()} if damaged else set()
    return sound, {i: reason for i, reason in damaged.items() if i in still_there}


def _matches(entry: dict[str, Any], **wanted: str | None) -> bool:
    return all(entry[key] == value for key, value in wanted.items() if value is not None)


def _rank(record: StoredRecord, order: Order) -> float:
    if order == "position":
        return record.header.position if record.header else 0
    return -{"used": record.used_at_s, "hits": record.hits, "size": record.num_bytes}[order]


def _entry(record: StoredRecord) -> dict[str, Any]:
    from kvboost.cli.lasting import described

    return {"id": _short(record.record_id), **described(record)}


def _print_entries(entries: list[dict[str, Any]]) -> None:
    text = ["text"] if entries and "text" in entries[0] else []
    columns = ("id", "position", "tokens", "kind", "lineage", "codec", "size", "hits", "last used")
    table = make_table(*columns, *text, numbers=(1, 2, 6, 7))
    for e in entries:
        counts = (f"{e['position']:,}", f"{e['tokens']:,}", e["kind"], e["lineage"], e["codec"])
        cells = (e["id"], *counts, bytes_text(e["bytes"]), f"{e['hits']:,}", e["used"])
        excerpt = [" ".join(e["text"].split())[:EXCERPT]] if text else []
        table.add_row(*cells, *(_plain(cell) for cell in excerpt))
    out.print(table)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)  # what a prompt says is no markup


def _decoder(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(f"cannot load a tokenizer from {name!r}: {error}") from None
    return lambda record: tokenizer.decode(record.header.tokens.tolist())


def _short(record_id: bytes) -> str:
    return record_id[-32:].hex()[:12]


def _shown(where: str) -> str:
    """A URL without its password."""
    scheme, found, rest = where.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if found else where
