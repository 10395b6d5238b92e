"""What quantized chunks save, lose and cost: bytes, PSNR, added KL, task answers, load time.

    kvboost bench quant [--gemma] [--codec k8v4] [--cases 4] [--first 0] [--options 4] [--variants] [--out FILE]

The cases are those of `cells.json`, split `test`. Each is answered three times: over its records as they were computed,
over the same records packed, and by a full prefill. *continued*: the prompt itself was seen before, all but its last
tokens come from the store. *moved*: its documents were seen in another order; the default strategy repairs, without the
gate, so that it hides nothing. The task: which of four passages of a document stands a little behind the one that is
quoted? Bytes are those of bfloat16 models, with all metadata. *load* writes one chunk of 128 tokens to another place
(unpacked and rotated); *compute* is the stock forward of the same tokens behind the same cache; both sides alternate.

With `--variants` other ways to quantize are measured besides, on the continued prompts. `--out` keeps one line per case
and is read again, so that a run can be continued.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import cells
from compare import mcnemar
from fidelity import divergence, full_prefill
from kvboost import KVBoost, codec
from kvboost.codec import Packer
from kvboost.hf import compat
from kvboost.hf.embedded import GEMMA3, SMOLLM2, ensure
from kvboost.hf.load import load_rows
from kvboost.hf.prefill import model_lock, stock_prefill
from kvboost.hf.quant_probe import QuantProbe, probe_quantization
from kvboost.rotary import NO_ROTATION
from kvboost.store import MemoryTier
from kvboost.types import ChunkKV, Kind, LayerKV, ReusePlan, Segment, Span
from record import emit, rounded, versions

CHUNK_TOKENS = 128
PASSAGE_TOKENS = 16
Encode = Callable[[ChunkKV], ChunkKV]


class ListedTier(MemoryTier):
    """A memory tier that can replace what it holds."""

    def __init__(self, bytes_limit: int = 4 << 30) -> None:
        super().__init__(bytes_limit)
        self.ids: list[bytes] = []

    def put_many(self, records: Sequence[ChunkKV]) -> int:
        self.ids += [r.header.record_id for r in records]
        return super().put_many(records)

    def held(self) -> list[ChunkKV]:
        """All records, oldest first."""
        with self.get_many(self.ids) as lease:
            return list(lease.records.values())

    def replace_all(self, records: Sequence[ChunkKV]) -> None:
        """Forgets everything and keeps these."""
        self.delete()
        self.ids = []
        self.put_many(records)


def packer(kv: KVBoost, found: QuantProbe) -> Packer:
    """Packs records of short prompts; ends the program if the model is refused."""
    made = found.packer(kv.support.require_layout(), 0)
    if made is None:
        raise SystemExit(f"nothing is packed for this model: {found.refused}")
    return made


def in_bfloat16(record: ChunkKV) -> ChunkKV:
    """The record as a bfloat16 model would have made it."""
    return ChunkKV(record.header, tuple(LayerKV(g.keys.bfloat16(), g.values.bfloat16()) for g in record.payload))


# --- other ways to quantize -----------------------------------------------------------------------------------------


def lossy(record: ChunkKV, made: Packer) -> ChunkKV:
    """The record as it comes back from `made`, at its old place and in plain rows: the loss without the format."""
    payload = [made.round_trip(i, rows, record.header.position) for i, rows in enumerate(record.payload)]
    return ChunkKV(record.header, tuple(payload))


def no_mean(x: torch.Tensor) -> torch.Tensor:
    """Stands for the codec's removal of the channel means."""
    return x.new_zeros(*x.shape[:2], 1, x.shape[3], dtype=torch.float16)


def per_token(bits: int) -> Encode:
    """Keys as they lie in the cache, one symmetric scale per token and head: the plainest way. Values stay."""
    largest = 2 ** (bits - 1) - 1

    def encode(record: ChunkKV) -> ChunkKV:
        groups = []
        for g in record.payload:
            scale = g.keys.float().abs().amax(-1, keepdim=True).clamp_min(1e-20) / largest
            keys = (g.keys.float() / scale).round() * scale
            groups.append(LayerKV(keys.to(g.keys.dtype), g.values))
        return ChunkKV(record.header, tuple(groups))

    return encode


def variants(made: Packer) -> Iterator[tuple[str, Encode, dict[str, Any]]]:
    """Name, encoder, and what is replaced in the codec meanwhile."""

    def encode(record: ChunkKV) -> ChunkKV:
        return lossy(record, made)

    def rotated(record: ChunkKV) -> ChunkKV:
        return lossy(record, replace(made, specs=[NO_ROTATION] * len(made.specs)))

    yield "ours", encode, {}
    for rows in (0, 1, 32):
        yield f"{rows} sink rows", encode, {"SINK_ROWS": rows}
    for rows in (32, 64, 256):
        yield f"keys: {rows} tokens a scale", encode, {"GROUP_ROWS": rows}
    yield "values: 32 dims a scale", encode, {"GROUP_DIMS": 32}
    yield "no channel mean", encode, {"_remove_mean": no_mean}
    yield "keys after rotation", rotated, {}
    yield "keys per token, int8", per_token(8), {}
    yield "keys per token, int4", per_token(4), {}


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(kv: KVBoost, store: ListedTier, reader: cells.Reader, case: cells.Case, made: Packer, given: Any) -> Any:
    """One case: KL against the full prefill with plain and with packed records, bytes, and the task."""
    ids = reader.prompt(case)
    answer, truth = full_prefill(kv, ids)
    found: dict[str, Any] = {"case": case.name}
    kv.invalidate()
    kv.generate(ids, max_new_tokens=1, do_sample=False, fidelity="exact")
    plain = store.held()
    found["bytes"] = sizes(plain, made)
    found["continued"] = both(kv, store, plain, made.encode, ids, answer, truth, {})
    store.replace_all(plain)
    questions = list(quizzes(reader, case, given.options))
    found["right"] = {"plain": choose(kv, questions)}
    store.replace_all([made.encode(r) for r in plain])
    found["right"]["packed"] = choose(kv, questions)
    if given.variants:
        found["variants"] = alternatives(kv, store, plain, made, ids, answer, truth)
    kv.invalidate()
    for captured in reader.captures(case, "related"):
        kv.generate(captured, max_new_tokens=1, do_sample=False, fidelity="exact")
    found["moved"] = both(kv, store, store.held(), made.encode, ids, answer, truth, {"gate": False})
    return found


def both(
    kv: KVBoost,
    store: ListedTier,
    plain: Sequence[ChunkKV],
    encode: Encode,
    ids: torch.Tensor,
    answer: torch.Tensor,
    truth: torch.Tensor,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Scores over plain and over packed records; `reused` tokens show that both plans are the same."""
    store.replace_all(plain)
    before, report = kv.score(ids, answer, **settings)
    store.replace_all([encode(r) for r in plain])
    after, packed_report = kv.score(ids, answer, **settings)
    return {
        "reused": [report.prompt_tokens - r.fresh_tokens for r in (report, packed_report)],
        "exact": [r.exact_tokens for r in (report, packed_report)],
        "moved": [r.moved_tokens for r in (report, packed_report)],
        "kl_plain": divergence(truth, before)["kl"],
        "kl_packed": divergence(truth, after)["kl"],
        "kl_between": divergence(before, after)["kl"],
        "top1": divergence(before, after)["top1"],
    }


def alternatives(
    kv: KVBoost,
    store: ListedTier,
    plain: Sequence[ChunkKV],
    made: Packer,
    ids: torch.Tensor,
    answer: torch.Tensor,
    truth: torch.Tensor,
) -> dict[str, float]:
    """KL of every variant over the records of the prompt itself."""
    found = {}
    for name, encode, replaced in variants(made):
        with ExitStack() as stack:
            for attribute, value in replaced.items():
                stack.enter_context(mock.patch.object(codec, attribute, value))
            store.replace_all([encode(r) for r in plain])
        ours, _ = kv.score(ids, answer)
        found[name] = divergence(truth, ours)["kl"]
    return found


def sizes(plain: Sequence[ChunkKV], made: Packer) -> dict[str, float]:
    """Bytes of bfloat16 records and of packed ones: tensors of packed layers, and everything that is counted."""
    before = [in_bfloat16(r) for r in plain]
    after = [made.encode(r) for r in before]
    found: dict[str, float] = defaultdict(float)
    for a, b in zip(before, after, strict=True):
        found["cache_plain"] += a.num_bytes
        found["cache_packed"] += b.num_bytes
        if b.header.codec == "none":
            continue
        for rows, packed in zip(a.payload, b.payload, strict=True):
            stays = sum(t.nbytes for n, t in packed.named().items() if n.endswith(".plain"))
            found["layers_plain"] += rows.keys.nbytes + rows.values.nbytes - stays
            found["layers_packed"] += sum(t.nbytes for t in packed.named().values()) - stays
    return dict(found) | {"chunks": len(plain), "tokens": sum(r.num_rows for r in plain)}


# --- the task -------------------------------------------------------------------------------------------------------

Quiz = tuple[torch.Tensor, list[torch.Tensor]]


def quizzes(reader: cells.Reader, case: cells.Case, options: int) -> Iterator[Quiz]:
    """For each document a prompt that quotes from it, and passages of it; the first one stands a little further on."""
    if options < 2:
        return
    rng = np.random.default_rng(case.number)
    documents = [reader.document(case.kind, case.documents[i]) for i in case.order]
    for document in documents:
        places = rng.permutation(np.arange(24, document.shape[1] - PASSAGE_TOKENS, PASSAGE_TOKENS))[:options]
        if len(places) < options:
            continue
        quote = document[:, places[0] - 20 : places[0] - 8]  # what follows at once would be too easy
        asked = [reader.encode("Question: what stands a little behind this passage?\nPassage:"), quote]
        asked.append(reader.encode("\nAnswer:"))
        head = reader.head(f"{case.number + 7:04d} of the day")
        yield torch.cat([head, *documents, *asked], 1), [document[:, p : p + 8] for p in places]


def choose(kv: KVBoost, questions: Sequence[Quiz]) -> list[bool]:
    """Whether the right passage is the most likely one."""
    right = []
    for ids, options in questions:
        likely = []
        for option in options:
            logits, _ = kv.score(ids, option)
            likely.append(logits.log_softmax(-1).gather(1, option[0][:, None]).mean().item())
        right.append(max(range(len(likely)), key=likely.__getitem__) == 0)
    return right


# --- time -----------------------------------------------------------------------------------------------------------


def timed(kv: KVBoost, store: ListedTier, ids: torch.Tensor, made: Packer, repeats: int) -> dict[str, float]:
    """Seconds to encode, load and compute one chunk of 128 tokens, medians; load and compute alternate."""
    layout = kv.support.require_layout()
    start, moved_by = 384, 64
    ids = ids[:, : start + CHUNK_TOKENS]
    kv.invalidate()
    kv.generate(
        ids,
        max_new_tokens=1,
        do_sample=False,
        fidelity="exact",
        chunk_boundaries=(start, start + CHUNK_TOKENS),
        chunk_max_tokens=CHUNK_TOKENS,
    )
    plain = next(r for r in store.held() if r.header.position == start and r.num_rows >= CHUNK_TOKENS - 1)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        with clock(times, "encode"):
            packed = made.encode(plain)
        for name, record in (("load", packed), ("load plain", plain)):
            with clock(times, name):
                place(kv, record, start - moved_by)
        cache = compat.make_dynamic_cache(*prefix(kv, ids, start))
        with clock(times, "compute"), model_lock(kv.model):
            stock_prefill(kv.model, ids, cache, start + plain.num_rows, block_tokens=CHUNK_TOKENS)
    medians = {f"{name.replace(' ', '_')}_s": statistics.median(t) for name, t in times.items()}
    ratios = [c / p for c, p in zip(times["compute"], times["load"], strict=True)]
    return (
        medians
        | {"ratio": statistics.median(ratios), "worst_ratio": min(ratios), "rows": plain.num_rows}
        | {"bytes_per_token": layout.bytes_per_token}
    )


class clock:  # noqa: N801  # reads as a statement
    """Adds the seconds of its block to a list."""

    def __init__(self, times: dict[str, list[float]], name: str) -> None:
        self.times, self.name = times, name

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.times[self.name].append(time.perf_counter() - self.began)


def place(kv: KVBoost, record: ChunkKV, start: int) -> None:
    """Loads a record's rows to `start`, as the moved part of a prompt that has nothing else."""
    stop = start + record.num_rows
    served = Segment(Span(start, stop), Kind.MOVED, record.header.record_id, 0, record.header.position)
    plan = ReusePlan(stop + 1, (Segment(Span(0, start), Kind.FRESH), served, Segment(Span(stop, stop + 1), Kind.FRESH)))
    load_rows(plan, {record.header.record_id: record}, kv.support.require_layout(), 0, stop)


def prefix(kv: KVBoost, ids: torch.Tensor, stop: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Rows of the first `stop` tokens, out of the store."""
    plan = kv.plan(ids)
    with kv.store.get_many([s.record_id for s in plan if s.record_id]) as lease:
        rows, _ = load_rows(plan, lease.records, kv.support.require_layout(), 0, stop)
    return kv.support.require_layout().per_layer(rows)


# --- telling --------------------------------------------------------------------------------------------------------


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Everything that the claims name, over the cases."""
    found: dict[str, Any] = {"cases": len(lines)}
    total = {k: sum(line["bytes"][k] for line in lines) for k in lines[0]["bytes"]}
    found["layer_ratio"] = total["layers_packed"] / total["layers_plain"]
    found["cache_ratio"] = total["cache_packed"] / total["cache_plain"]
    found["tokens_per_chunk"] = total["tokens"] / total["chunks"]
    for kind in ("continued", "moved"):
        rows = [line[kind] for line in lines]
        kl = {k: statistics.mean(r[k] for r in rows) for k in ("kl_plain", "kl_packed", "kl_between", "top1")}
        added = [r["kl_packed"] - r["kl_plain"] for r in rows]
        found[kind] = {**kl, "added_kl": statistics.mean(added), "worst_added_kl": max(added)}
        found[kind]["same_plan"] = all(r["reused"][0] == r["reused"][1] for r in rows)
        found[kind]["exact_packed"] = sum(r["exact"][1] for r in rows)
    right = {side: [x for line in lines for x in line["right"][side]] for side in ("plain", "packed")}
    if right["plain"]:
        found["task"] = {
            "questions": len(right["plain"]),
            **{side: statistics.mean(r) for side, r in right.items()},
            "agree": statistics.mean(a == b for a, b in zip(right["plain"], right["packed"], strict=True)),
            "mcnemar_p": mcnemar(right["packed"], right["plain"]),
        }
    tried = [line["variants"] for line in lines if "variants" in line]
    if tried:
        found["variants"] = {name: statistics.mean(t[name] for t in tried) for name in tried[0]}
    return found


def quality(found: QuantProbe) -> dict[str, Any]:
    """Least and median PSNR per kind, and the layers that stay plain."""
    heads = {slot: [x for layer in layers for x in layer] for slot, layers in found.psnr_db.items()}
    return {
        "plain_layers": sorted(found.plain_layers),
        "probe_kl": found.kl,
        **{f"{slot}_db": {"min": min(x), "median": statistics.median(x)} for slot, x in heads.items()},
    }


def show(result: dict[str, Any]) -> None:
    """Prints the tables."""
    table = Table(title=f"{result['model']}, {result['codec']}, {result['dtype']}", show_header=False)
    for name, value in result.items():
        if name not in ("variants", "versions", "benchmark"):
            table.add_row(name, json.dumps(value) if isinstance(value, dict) else str(value))
    Console(width=160).print(table)
    for name, kl in result.get("variants", {}).items():
        print(f"  {name:28s} mean KL {kl:.5f}")


def recorded(path: Path | None, **wanted: str) -> dict[str, Any]:
    """The lines of a results file that belong to this run, by case."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["case"]: line for line in lines if all(line.get(k) == v for k, v in wanted.items())}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs the benchmark and ends with one JSON line, which is returned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--gemma", action="store_true", help="the embedded Gemma 3 270M instead")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--codec", default="k8v4", choices=["int8", "k8v4"])
    parser.add_argument("--kinds", nargs="+", default=list(cells.KINDS), choices=cells.KINDS)
    parser.add_argument("--cases", type=int, default=4, help="per kind of text")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--options", type=int, default=4, help="passages to choose among; 0: no task")
    parser.add_argument("--variants", action="store_true", help="other ways to quantize besides")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="no further case is begun after this time")
    parser.add_argument("--repeats", type=int, default=7, help="of the timed part")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append one line per case to this file, and use what it holds")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    embedded = GEMMA3 if given.gemma else SMOLLM2
    store = ListedTier()
    path = given.model or ensure(embedded)
    kv = KVBoost.from_pretrained(path, dtype=getattr(torch, given.dtype), store=store)
    began = time.perf_counter()
    with model_lock(kv.model):
        found = probe_quantization(kv.model, kv.support, given.codec)
    probe_s = time.perf_counter() - began
    made = packer(kv, found)
    run = {"model": Path(given.model or embedded.name).name, "codec": given.codec, "dtype": given.dtype}
    reader = cells.Reader(kv.tokenizer)
    chosen = [c for c in cells.load(given.kinds, ["test"], given.first + given.cases) if c.number >= given.first]
    lines = recorded(given.out, **run)
    for case in chosen:
        if case.name not in lines and (not lines or time.perf_counter() - began < given.limit_s):
            lines[case.name] = rounded(run | measure(kv, store, reader, case, made, given))
            emit_line(lines[case.name], given.out)
            print(f"{case.name}", file=sys.stderr)
    result = {"benchmark": "quant", **run, "threads": given.threads, "probe_s": probe_s, **quality(found)}
    result |= summary(list(lines.values()))
    result["time"] = timed(kv, store, reader.prompt(chosen[0]), made, given.repeats)
    result = rounded(result | {"versions": versions()})
    show(result)
    emit(result, None)
    return result


def emit_line(line: dict[str, Any], out: Path | None) -> None:
    """Appends one case to the results file."""
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
