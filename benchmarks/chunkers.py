"""How much repeated text each chunker lets a cache find, beside the ideal.

    kvboost bench chunkers [--quick] [--chunkers fixed,content] [--traffic rag,logs]

Each traffic is a sequence of prompts, drawn from real texts with a fixed seed; every prompt is looked up in all
prompts before it, with an endless cache. `whole` counts the tokens in chunks whose text was a chunk before, at any
position. `extended` adds what comes of comparing tokens to both sides of such a chunk. `planned` is what the engine's
planner finds over chunks of that kind: chunks, sampled windows, and stored neighbours. `ideal` is the share of tokens
in runs of 16 or more that stood anywhere before, `prefix` that of the longest common prefix. `tokens` is the mean
size of a chunk, `ms/4k` the chunker's time per 4,096 tokens. No model runs, so nothing here tells what reuse costs in
quality.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from ideal import Mask, RunIndex, common_prefix, ideal_prefix_reuse
from kvboost.capture import cut, own_header
from kvboost.chunking import Chunker, Separators, make_chunker
from kvboost.config import Settings
from kvboost.errors import SettingsError
from kvboost.keys import KeySpace
from kvboost.planning import Limits, Prompt, make_plan
from kvboost.store import MemoryTier
from kvboost.types import ChunkKV, Int32Array, Kind, Lineage, Span

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SEED = 20240915
KEPT_COPIES = 4  # of one chunk that extension tries: the cache's default number of variants

Traffic = Callable[[random.Random], Iterator[str]]


def chat(*turns: tuple[str, str]) -> str:
    """Turns in ChatML, up to the point where the assistant answers."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"


def rows(name: str) -> list[dict[str, Any]]:
    """A JSONL file of the shared data."""
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def rag_shuffled(rng: random.Random) -> Iterator[str]:
    """Ten documents per question, from pools: most repeat, at another place and with another number."""
    docs = {row["id"]: row for row in rows("mdqa/nq_docs.jsonl")}
    for row in rows("mdqa/nq_multidoc_600.jsonl"):
        texts = [docs[i] for i in row["doc_ids"]]
        shown = "\n".join(f"Document [{i}](Title: {d['title']}) {d['text']}" for i, d in enumerate(texts, 1))
        yield chat(("system", "Answer from the documents."), ("user", f"{shown}\n\nQuestion: {row['question']}"))


def rag_retriever(rng: random.Random) -> Iterator[str]:
    """What a real retriever returned: five paragraphs, nothing but blank lines between them."""
    data = json.loads((DATA / "traces/rag_retrieval_2wikimultihopqa.json").read_text(encoding="utf-8"))
    for request in data["requests"]:
        texts = (data["docs"][i] for i in request["docs"])
        yield chat(("user", "\n\n".join(texts) + "\n\nWhich of these matter?"))


def log_windows(rng: random.Random) -> Iterator[str]:
    """The last 60 lines of a log, a few lines later each time, behind a head that tells the time."""
    for name in ("HDFS", "Linux", "OpenStack", "Spark", "Apache"):
        lines = (DATA / f"logs/{name}_2k.log").read_text(encoding="utf-8", errors="replace").splitlines()
        start = rng.randrange(200)
        for step in range(40):
            start += rng.randrange(1, 15)
            window = "\n".join(lines[start : start + 60])
            yield chat(("user", f"It is 12:{step:02}. Is anything wrong in this log of {name}?\n\n{window}"))


def agents(rng: random.Random) -> Iterator[str]:
    """Conversations with tools, seen at a random assistant turn: shared policies, repeated tool outputs."""
    runs = rows("agents/taubench_airline_gpt4o.jsonl")
    for run in rng.sample(runs, len(runs)):
        stops = [i for i, m in enumerate(run["messages"]) if m["role"] == "assistant"]
        yield chat(*((m["role"], _shown(m)) for m in run["messages"][: rng.choice(stops)]))


def _shown(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return (message.get("content") or "") + (json.dumps(calls) if calls else "")


def changed_head(rng: random.Random) -> Iterator[str]:
    """One long document after another, each asked about four times behind a session line of varying length."""
    runs = rng.sample(rows("agents/swe_agent_demos.jsonl"), 18)
    for run in runs:
        text = "\n".join(_shown(m) for m in run["messages"])[:16_000]
        for _ in range(4):
            session = f"{rng.randrange(10**9):x}" * rng.randrange(1, 4)
            yield chat(("system", f"Session {session}. Be brief."), ("user", f"{text}\n\nSummarize."))


def one_change(rng: random.Random) -> Iterator[str]:
    """A prose document in one piece, one word of it changed each time."""
    words = " ".join(row["text"] for row in rows("mdqa/nq_docs.jsonl")[:40]).split()
    for _ in range(60):
        words[rng.randrange(len(words))] = rng.choice(("blue", "seven", "Lisbon", "quickly"))
        yield chat(("user", " ".join(words)))


def code_context(rng: random.Random) -> Iterator[str]:
    """A target and two excerpts of the same repository, from a pool of 20, in any order."""
    pools = defaultdict(list)
    for row in rows("buglocal.jsonl"):
        pools[row["repo"]].append(row)
    popularity = [1 / rank for rank in range(1, 21)]
    for _ in range(100):
        pool = pools[rng.choice(sorted(pools))][:20]
        chosen = rng.choices(pool, popularity[: len(pool)], k=3)
        parts = (f"File: {row['path']}\n{row['buggy_source']}" for row in chosen)
        yield chat(("user", "\n".join(parts) + f"\nReport: {chosen[0]['report']}"))


TRAFFIC: dict[str, Traffic] = {
    "rag": rag_shuffled,
    "retriever": rag_retriever,
    "logs": log_windows,
    "agents": agents,
    "head": changed_head,
    "change": one_change,
    "code": code_context,
}


@dataclass
class Found:
    """Tokens found by one chunker, and what it took."""

    whole: int = 0
    extended: int = 0
    planned: int = 0
    chunks: int = 0
    seconds: float = 0.0


def measure(chunker: Chunker, prompts: list[Int32Array], ideals: list[Mask]) -> Found:
    """Look up each prompt in those before it. Tokens outside the ideal, in matches too short to use, do not count."""
    found, copies = Found(), defaultdict[bytes, list[tuple[Int32Array, int]]](list)
    for prompt, ideal in zip(prompts, ideals, strict=True):
        began = time.perf_counter()
        spans = chunker.split(prompt)
        found.seconds += time.perf_counter() - began
        hits = {span: copies[name] for span in spans if (name := _name(prompt, span)) in copies}
        found.whole += sum(int(ideal[span.start : span.stop].sum()) for span in hits)
        found.extended += int((_extended(prompt, hits) & ideal).sum())
        found.chunks += len(spans)
        for span in spans:
            kept = copies[_name(prompt, span)]
            kept.append((prompt, span.start))
            del kept[:-KEPT_COPIES]
    return found


def planned(chunker: Chunker, prompts: list[Int32Array], ideals: list[Mask]) -> int:
    """Tokens that the engine's own planner finds, with sampled windows; sinks and the live suffix are not moved."""
    keys = KeySpace(secret="", fingerprint=b"", namespace="")
    store, found = MemoryTier(1 << 40), 0
    for tokens, ideal in zip(prompts, ideals, strict=True):
        prompt = Prompt(tokens, chunker.split(tokens), keys)
        plan = make_plan(prompt, store.find, Limits(min_moved_share=0))
        for segment in plan:
            span = segment.span
            if segment.kind is not Kind.FRESH:
                found += int(ideal[span.start : span.stop].sum())
                continue
            headers = [own_header(prompt, p, Lineage.BIT_EXACT) for p in cut(prompt.chunks, span.start, span.stop)]
            store.put_many([ChunkKV(header, ()) for header in headers])
    return found


def _name(prompt: Int32Array, span: Span) -> bytes:
    return prompt[span.start : span.stop].tobytes()


def _extended(prompt: Int32Array, hits: dict[Span, list[tuple[Int32Array, int]]]) -> Mask:
    covered = np.zeros(len(prompt), np.bool_)
    for span, places in hits.items():
        for text, start in places:
            left = common_prefix(prompt[: span.start][::-1], text[:start][::-1])
            covered[span.start - left : span.start + common_prefix(prompt[span.start :], text[start:])] = True
    return covered


def ideal_masks(prompts: list[Int32Array]) -> list[Mask]:
    """Per prompt the tokens that any-position reuse of the prompts before it could find at best."""
    index, masks = RunIndex(), []
    for prompt in prompts:
        masks.append(index.mask(prompt))
        index.add(prompt)
    return masks


def load_tokenizer() -> Any:
    """A real 151k vocabulary."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / "models" / "qwen2_tokenizer")


def chunkers(names: list[str], tokenizer: Any) -> dict[str, Chunker]:
    """The named chunkers with default sizes; one whose extra is not installed is left out, said on stderr."""
    separators = Separators.from_tokenizer(tokenizer)
    made: dict[str, Chunker] = {}
    for name in names:
        kind = "content" if name == "hash-only" else name
        known = Separators() if name == "hash-only" else separators
        try:
            made[name] = make_chunker(Settings.model_validate({"chunker": kind}), known, tokenizer=tokenizer)
        except SettingsError as error:
            print(f"left out: {error}", file=sys.stderr)
    return made


def run(names: list[str], traffic: list[str], limit: int) -> list[dict[str, Any]]:
    """One record per traffic and chunker."""
    tokenizer, records = load_tokenizer(), []
    made = chunkers(names, tokenizer)
    for kind in traffic:
        texts = [text for text, _ in zip(TRAFFIC[kind](random.Random(SEED)), range(limit), strict=False)]
        prompts = [np.array(ids, np.int32) for ids in tokenizer(texts)["input_ids"]]
        total = sum(map(len, prompts))
        ideals = ideal_masks(prompts)
        anywhere = sum(int(mask.sum()) for mask in ideals)
        prefix = sum(ideal_prefix_reuse(prompt, prompts[:i]) for i, prompt in enumerate(prompts))
        shares = {"traffic": kind, "prompts": len(prompts), "tokens": total, "prefix": prefix / total}
        for name, chunker in made.items():
            found = measure(chunker, prompts, ideals)
            found.planned = planned(chunker, prompts, ideals)
            records.append(
                shares
                | {"chunker": name, "whole": found.whole / total, "extended": found.extended / total}
                | {"planned": found.planned / total}
                | {"ideal": anywhere / total, "chunk_tokens": total / found.chunks}
                | {"ms_per_4k": 4096e3 * found.seconds / total}
            )
    return records


def show(records: list[dict[str, Any]]) -> None:
    """The table, then the records as one line of JSON."""
    table = Table("traffic", "chunker")
    for title in ("whole", "extended", "planned", "ideal", "prefix", "tokens", "ms/4k"):
        table.add_column(title, justify="right")
    for i, r in enumerate(records):
        last = i + 1 == len(records) or records[i + 1]["traffic"] != r["traffic"]
        shares = (f"{r[key]:.1%}" for key in ("whole", "extended", "planned", "ideal", "prefix"))
        table.add_row(r["traffic"], r["chunker"], *shares, f"{r['chunk_tokens']:.0f}", f"{r['ms_per_4k']:.2f}")
        if last:
            table.add_section()
    Console(width=100).print(table)
    rounded = [{k: round(v, 4) if isinstance(v, float) else v for k, v in r.items()} for r in records]
    print(json.dumps({"benchmark": "chunkers", "seed": SEED, "results": rounded}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 prompts per traffic, no semantic chunker")
    parser.add_argument("--prompts", type=int, default=100, help="at most so many per traffic")
    parser.add_argument("--chunkers", help="comma-separated: fixed, hash-only (no separators), content, semantic")
    parser.add_argument("--traffic", default=",".join(TRAFFIC), help="comma-separated: " + ", ".join(TRAFFIC))
    args = parser.parse_args()
    if not DATA.is_dir():
        parser.exit(2, f"no data at {DATA}\n")
    default = "fixed,hash-only,content" + ("" if args.quick else ",semantic")
    limit = 20 if args.quick else args.prompts
    show(run((args.chunkers or default).split(","), args.traffic.split(","), limit))


if __name__ == "__main__":
    main()
