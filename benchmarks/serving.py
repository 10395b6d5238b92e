"""Runs a traffic through several systems on one model: time to first token, choices, and distance from a full prefill.

Every system is a set of settings for `kv.generate` with a namespace of its own (`cache_salt`), so each keeps its own
rows. All of them answer a request before the next one comes, in an order that rotates. The cache starts empty with
every episode, so episodes are measured and resumed alone.

Only the call to the first token is timed. Options and expected answers are then scored on the very cache with which
`generate` answered (it returns it), all options in one small batch: no second prefill, and nothing is stored.
`kv.score` would need one call per option, and a full prefill for each where the cache is off. And it would read moved
rows that were corrected but not recomputed from the store, which keeps such rows as they were captured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import kvboost
from ideal import RunIndex, ideal_prefix_reuse
from kvboost import KVBoost
from kvboost.hf import compat
from kvboost.hf.embedded import GEMMA3, SMOLLM2, ensure
from kvboost.types import Int32Array, ReuseReport
from request import SEED, Request, Source, Writer, episodes

FULL, PREFIX = "full prefill", "prefix caching"
SYSTEMS: Mapping[str, dict[str, Any]] = {
    FULL: {"disable": True},
    PREFIX: {"fidelity": "exact"},
    "none": {"recompute_strategy": "none", "gate": False},
    "selective": {"recompute_strategy": "selective", "gate": False},
    "cacheblend": {"recompute_strategy": "cacheblend", "gate": False},
    "epic": {"recompute_strategy": "epic", "gate": False},
    "guided, fast": {"recompute_strategy": "guided", "fidelity": "fast"},
    "guided, balanced": {"recompute_strategy": "guided", "fidelity": "balanced"},
    "guided, 40 %": {"recompute_strategy": "guided", "recompute_ratio": 0.4, "gate": False},
}


@dataclass(frozen=True)
class Outcome:
    """One system on one request: a line of a results file."""

    request: str
    system: str
    source: str
    warm: bool
    model: str
    dtype: str
    ttft_s: float  # a whole call of `generate` for one token
    kl: float  # of the first token's distribution, full prefill || this, in nat
    same_token: bool  # as the full prefill's
    choice: int | None  # the most likely option
    right: int | None
    options: int
    mentioned: tuple[int, ...]
    matched: bool | None  # whether greedy decoding gives an expected text
    prompt_tokens: int
    exact_tokens: int
    continued_tokens: int
    moved_tokens: int
    repaired_tokens: int
    fresh_tokens: int
    charged: float
    overlap_tokens: int  # in common with the most similar earlier prompt of the episode, order aside
    ideal_tokens: int  # that any-position reuse could find
    ideal_prefix_tokens: int  # that prefix reuse could find
    fallback: str | None

    @property
    def reused_share(self) -> float:
        """Share of the prompt that was found in the cache."""
        return 1 - self.fresh_tokens / self.prompt_tokens

    def as_json(self) -> dict[str, Any]:
        """Rounded, so that lines stay short."""
        return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class Answer:
    """What one system said to one request."""

    seconds: float
    first: torch.Tensor  # float64 [V]: log-probabilities of the first token
    choice: int | None
    matched: bool | None
    report: ReuseReport


# --- one request -----------------------------------------------------------------------------------------------------


def ask(kv: KVBoost, request: Request, system: str, settings: Mapping[str, Any]) -> Answer:
    """Answers a request; only the call itself is timed."""
    began = time.perf_counter()
    out = kv.generate(
        request.ids,
        max_new_tokens=1,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        cache_salt=system,
        **settings,
    )
    seconds = time.perf_counter() - began
    first = out.output.logits[0][0].double().log_softmax(-1)
    options = [o[0].tolist() for o in request.options]
    writer = Writer(kv.tokenizer)
    expected = [writer.encode(text)[0].tolist() for text in request.expected]
    scored = follow(kv, first, out.output[compat.CACHE_ARGUMENT], options + expected)
    sums = [sum(likelihood.tolist()) for likelihood, _ in scored[: len(options)]]
    return Answer(
        seconds,
        first,
        choice=int(np.argmax(sums)) if options else None,
        matched=any(greedy for _, greedy in scored[len(options) :]) if expected else None,
        report=out.report,
    )


def follow(
    kv: KVBoost, first: torch.Tensor, cache: Any, continuations: Sequence[Sequence[int]]
) -> list[tuple[torch.Tensor, bool]]:
    """Per continuation the log-probabilities of its tokens [m], and whether greedy decoding would give them.

    `cache` holds the prompt and is used up; `first` are the log-probabilities behind it. One batch, padded at the
    right, where no query sees the padding.
    """
    if not continuations:
        return []
    longest = max(map(len, continuations))
    padded = torch.tensor([[*c, *[0] * (longest - len(c))] for c in continuations])
    scores = first.float().expand(len(continuations), 1, -1)
    if longest > 1:
        cache.batch_repeat_interleave(len(continuations))
        with torch.no_grad():
            logits = compat.forward(kv.model, cache, input_ids=padded[:, :-1]).logits
        scores = torch.cat([scores, logits.float().log_softmax(-1)], 1)
    found = []
    for tokens, row in zip(continuations, scores, strict=True):
        wanted = torch.tensor(list(tokens))
        here = row[: len(tokens)]
        found.append((here.gather(1, wanted[:, None])[:, 0], bool((here.argmax(-1) == wanted).all())))
    return found


def measure(
    kv: KVBoost, request: Request, systems: Mapping[str, Mapping[str, Any]], turn: int, fields: Mapping[str, Any]
) -> list[Outcome]:
    """All systems on one request, the `turn`-th first; `fields` are what all their outcomes have in common."""
    names = list(systems)
    names = names[turn % len(names) :] + names[: turn % len(names)]
    answers = {name: ask(kv, request, name, systems[name]) for name in names}
    truth = answers[FULL].first
    return [outcome(request, name, answers[name], truth, fields) for name in systems]


def outcome(request: Request, system: str, answer: Answer, truth: torch.Tensor, fields: Mapping[str, Any]) -> Outcome:
    """One line of results."""
    seen = answer.report
    return Outcome(
        request=request.name,
        system=system,
        source=request.source,
        warm=request.warm,
        ttft_s=answer.seconds,
        kl=float((truth.exp() * (truth - answer.first)).sum()),
        same_token=bool(truth.argmax() == answer.first.argmax()),
        choice=answer.choice,
        right=request.right,
        options=len(request.options),
        mentioned=request.mentioned,
        matched=answer.matched,
        prompt_tokens=seen.prompt_tokens,
        exact_tokens=seen.exact_tokens,
        continued_tokens=seen.continued_tokens,
        moved_tokens=seen.moved_tokens,
        repaired_tokens=seen.repaired_tokens,
        fresh_tokens=seen.fresh_tokens,
        charged=seen.charged_budget,
        fallback=seen.fallback,
        **fields,
    )


class Ceilings:
    """What any cache could find of the prompts of one episode."""

    def __init__(self) -> None:
        self._index = RunIndex()
        self._texts: list[Int32Array] = []
        self._bags: list[Counter[int]] = []

    def of(self, ids: torch.Tensor) -> dict[str, int]:
        """Tokens of a prompt, [1, T], that could be reused from the prompts before it; then it is one of them."""
        tokens = ids[0].numpy().astype(np.int32)
        bag = Counter(tokens.tolist())
        found = {
            "overlap_tokens": max(((bag & other).total() for other in self._bags), default=0),
            "ideal_tokens": int(self._index.mask(tokens).sum()),
            "ideal_prefix_tokens": ideal_prefix_reuse(tokens, self._texts),
        }
        self._index.add(tokens)
        self._texts.append(tokens)
        self._bags.append(bag)
        return found


# --- a whole traffic -------------------------------------------------------------------------------------------------


def run(
    kv: KVBoost,
    requests: Sequence[Request],
    systems: Mapping[str, Mapping[str, Any]],
    out: Path | None = None,
    shard: tuple[int, int] = (0, 1),
    model: str = "",
) -> list[Outcome]:
    """Measures what `out` does not hold yet and returns everything that it then holds.

    An episode that was cut short is run again from its start, because its cache is gone; its recorded lines stay.
    """
    results = recorded(out)
    names = {"model": model, "dtype": str(kv.model.dtype).removeprefix("torch.")}
    done = {(r.request, r.system) for r in results if {"model": r.model, "dtype": r.dtype} == names}
    mine = episodes(requests)[shard[0] :: shard[1]]
    for position, episode in enumerate(mine):
        missing = [s for s in systems if any((r.name, s) not in done for r in episode)]
        for fresh in _episode(kv, episode, {s: systems[s] for s in (FULL, *missing)} if missing else {}, names):
            new = [r for r in fresh if (r.request, r.system) not in done and r.system in systems]
            results += new
            append(out, new)
        print(f"{position + 1} of {len(mine)}: {episode[-1].name}", file=sys.stderr, flush=True)
    return results


def _episode(
    kv: KVBoost, episode: Sequence[Request], systems: Mapping[str, Mapping[str, Any]], names: Mapping[str, Any]
) -> Iterator[list[Outcome]]:
    if not systems:
        return
    kv.invalidate()
    before = sum(kv.store.stats().evictions.values())
    ceilings = Ceilings()
    for turn, request in enumerate(episode):
        yield measure(kv, request, systems, turn, {**names, **ceilings.of(request.ids)})
    evicted = sum(kv.store.stats().evictions.values()) - before
    if evicted:
        name = f"{episode[0].source}/{episode[0].episode}"
        print(f"{name}: {evicted} chunks did not fit into the cache; give it more with --cache-gib", file=sys.stderr)


def recorded(path: Path | None) -> list[Outcome]:
    """The outcomes that a file holds."""
    if path is None or not path.exists():
        return []
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Outcome(**{**line, "mentioned": tuple(line["mentioned"])}) for line in lines]


def append(path: Path | None, outcomes: Sequence[Outcome]) -> None:
    """Adds lines to a results file."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(r.as_json()) + "\n" for r in outcomes)


# --- command lines ---------------------------------------------------------------------------------------------------


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks of this kind have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemma", action="store_true", help="Gemma 3 270M instead of SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=100, help="of every source")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th episode, from the i-th")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gib", type=float, default=8, help="memory for the rows of all systems together")
    parser.add_argument("--out", type=Path, help="JSON lines, one per request and system; not measured again")
    parser.add_argument("--report", type=Path, nargs="+", help="only report what these files hold")
    parser.add_argument("--plot", type=Path, help="draw the results, as .svg and .png")
    return parser


def results_of(given: argparse.Namespace, sources: Mapping[str, Source]) -> list[Outcome]:
    """The outcomes that a command line asks for: read, or measured over `sources`."""
    if given.report:
        return [r for path in given.report for r in recorded(path)]
    torch.set_num_threads(given.threads)
    embedded = GEMMA3 if given.gemma else SMOLLM2
    kv = KVBoost.from_pretrained(
        ensure(embedded), dtype=getattr(torch, given.dtype), cache_bytes=int(given.cache_gib * 2**30)
    )
    kv.generate(torch.arange(5, 300)[None], max_new_tokens=1, do_sample=False)  # warms up allocator and kernels
    shard, of = map(int, given.shard.split("/"))
    requests = [r for source in sources.values() for r in source(kv.tokenizer, given.requests)]
    systems = {name: SYSTEMS[name] for name in given.systems}
    return run(kv, requests, systems, given.out, (shard, of), embedded.name)


def environment(given: argparse.Namespace, results: Sequence[Outcome]) -> dict[str, Any]:
    """What a line of results must say of its making."""
    return {
        "models": sorted({r.model for r in results}),
        "dtypes": sorted({r.dtype for r in results}),
        "threads": given.threads,
        "seed": SEED,
        "versions": {m.__name__: m.__version__ for m in (kvboost, torch, transformers)},
        "command": " ".join([Path(sys.argv[0]).stem, *sys.argv[1:]]),
    }
