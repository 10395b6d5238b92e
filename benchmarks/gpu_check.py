"""Speed, memory and exactness on a CUDA machine in some minutes, with random weights in the shape of Qwen2.5-3B.

    kvboost bench gpu_check [--lengths 2048 6144 16384] [--repeats 3] [--miniature]

One file that needs nothing but this package: no weights, no data. Times are of whole calls with `max_new_tokens=1`, the
device synchronized on both sides of the clock; each is the median over the repeats, after one that is dropped, and each
repeat has documents of its own. *full* is a full prefill of the reordered prompt by transformers; *cold* a prompt that
shares nothing, stored too; *prefix* another question behind the same documents; *moved* the documents in another order
behind a changed head. Errors are relative: largest difference of logits over the largest logit, against a full prefill;
the yardstick is what eager and SDPA differ by in transformers alone. Random weights say nothing of the truth of moved
rows, unless all are repaired. Without CUDA, or with `--miniature`, a tiny model runs on the CPU in seconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import kvboost
from kvboost import KVBoost

SYSTEM_TOKENS, QUESTION_TOKENS, HEAD_TOKENS = 64, 24, 6
NUM_DOCUMENTS = 8
REORDERED = (5, 2, 7, 0, 3, 6, 1, 4)  # no document keeps its neighbour
CONTINUATION_TOKENS = 16
FLOAT32_BOUND = 1e-4
EVERYTHING_REPAIRED = {"recompute_ratio": 1.0, "min_moved_share": 0.0}
SHAPE = {
    "num_hidden_layers": 36,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "vocab_size": 151936,
}
MINIATURE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1024,
}


@dataclass(frozen=True)
class Documents:
    """Pieces of prompts, random token ids [1, n] each."""

    system: torch.Tensor
    documents: list[torch.Tensor]
    question: torch.Tensor
    other_question: torch.Tensor
    head: torch.Tensor

    @classmethod
    def random(cls, num_tokens: int, vocabulary: int, seed: int) -> Documents:
        """Documents for a prompt of about `num_tokens`."""
        generator = torch.Generator().manual_seed(seed)
        size = (num_tokens - SYSTEM_TOKENS - QUESTION_TOKENS) // NUM_DOCUMENTS
        sizes = [SYSTEM_TOKENS, QUESTION_TOKENS, QUESTION_TOKENS, HEAD_TOKENS, *[size] * NUM_DOCUMENTS]
        parts = [torch.randint(3, vocabulary, (1, n), generator=generator) for n in sizes]
        return cls(parts[0], parts[4:], parts[1], parts[2], parts[3])

    def natural(self) -> torch.Tensor:
        return torch.cat([self.system, *self.documents, self.question], 1)

    def asked_otherwise(self) -> torch.Tensor:
        return torch.cat([self.system, *self.documents, self.other_question], 1)

    def reordered(self) -> torch.Tensor:
        return torch.cat([self.head, self.system, *(self.documents[i] for i in REORDERED), self.question], 1)


@dataclass(frozen=True)
class Call:
    """One timed request. Bytes are 0 without CUDA; `extra_bytes` is the peak above what was allocated before."""

    seconds: float
    peak_bytes: int
    extra_bytes: int
    report: Any


def build(shape: dict[str, int], device: str, dtype: torch.dtype) -> KVBoost:
    """An engine over a Qwen2 of random weights, which are larger in a narrow model: its attention is as sharp."""
    config = transformers.Qwen2Config(
        **shape,
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=True,
        initializer_range=0.02 * (SHAPE["hidden_size"] / shape["hidden_size"]) ** 0.5,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    return KVBoost(model.to(device).eval(), cache_bytes=8 << 30, risk_bound=1e9)  # random weights: judged, served


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(kv: KVBoost, ids: torch.Tensor, **settings: Any) -> Call:
    """One request for one token, and the memory that it took."""
    on_cuda = kv.model.device.type == "cuda"
    synchronize()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_cuda else 0
    began = time.perf_counter()
    out = kv.generate(ids, max_new_tokens=1, do_sample=False, **settings)
    synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    return Call(seconds, peak, peak - before, out.report)


def measure(kv: KVBoost, num_tokens: int, repeats: int) -> dict[str, Any]:
    """The row of one prompt length: medians after one round of warming up."""
    rounds: list[dict[str, Call]] = []
    for repeat in range(repeats + 1):
        kv.invalidate()
        parts = Documents.random(num_tokens, kv.model.config.vocab_size, seed=1000 * repeat + num_tokens)
        rounds.append(
            {
                "full": timed(kv, parts.reordered(), disable=True),
                "cold": timed(kv, parts.natural()),
                "prefix": timed(kv, parts.asked_otherwise()),
                "moved": timed(kv, parts.reordered()),
            }
        )
    return row(rounds[1:])


def row(rounds: Sequence[dict[str, Call]]) -> dict[str, Any]:
    """Medians of seconds, largest peaks, and the token counts of the last round."""
    last = rounds[-1]
    seconds = {name: statistics.median(r[name].seconds for r in rounds) for name in last}
    return {
        "tokens": last["moved"].report.prompt_tokens,
        **{f"{name}_s": value for name, value in seconds.items()},
        **{f"{name}_speedup": seconds["full"] / seconds[name] for name in seconds if name != "full"},
        "prefix_exact_tokens": last["prefix"].report.exact_tokens,
        "moved_tokens": last["moved"].report.moved_tokens,
        "moved_repaired_tokens": last["moved"].report.repaired_tokens,
        "moved_fresh_tokens": last["moved"].report.fresh_tokens,
        "fallbacks": sorted({r[n].report.fallback for r in rounds for n in r if n != "full"} - {None}),
        **{
            f"{name}_{kind}": max(getattr(r[name], kind) for r in rounds)
            for name in last
            for kind in ("peak_bytes", "extra_bytes")
        },
    }


def exactness(kv: KVBoost, num_tokens: int) -> dict[str, Any]:
    """Relative errors against a full prefill of the same prompt, and the yardstick."""
    kv.invalidate()
    parts = Documents.random(num_tokens, kv.model.config.vocab_size, seed=7)
    natural, asked, reordered = parts.natural(), parts.asked_otherwise(), parts.reordered()
    errors = {"yardstick": yardstick(kv, natural)}
    errors["no_reuse"], nothing = error(kv, natural)
    errors["exact_prefix"], prefix = error(kv, asked, fidelity="exact")
    errors["all_repaired"], repaired = error(kv, reordered, **EVERYTHING_REPAIRED)
    counts = {
        "tokens": num_tokens,
        "no_reuse_fresh_tokens": nothing.fresh_tokens,
        "exact_prefix_tokens": prefix.exact_tokens,
        "all_repaired_tokens": repaired.repaired_tokens,
    }
    bound = 2 * errors["yardstick"] if kv.model.dtype != torch.float32 else FLOAT32_BOUND
    held = all(errors[name] <= bound for name in errors if name != "yardstick")
    reused = prefix.exact_tokens > 0 and repaired.repaired_tokens == repaired.moved_tokens > 0
    return {**counts, **errors, "bound": bound, "ok": held and reused}


def error(kv: KVBoost, ids: torch.Tensor, **settings: Any) -> tuple[float, Any]:
    """Of the logits behind `ids` [1, T] and of the first generated token's. The request is then stored."""
    following = continuation(kv, ids)
    truth, _ = kv.score(ids.to(kv.model.device), following, disable=True)
    ours, report = kv.score(ids.to(kv.model.device), following, **settings)
    first = [first_logits(kv, ids, disable=True), first_logits(kv, ids, **settings)]
    return max(relative(ours, truth), relative(first[1], first[0])), report


def yardstick(kv: KVBoost, ids: torch.Tensor) -> float:
    """What eager and SDPA differ by in full prefills of `ids` [1, T]."""
    following = continuation(kv, ids)
    truth, _ = kv.score(ids.to(kv.model.device), following, disable=True)
    kv.model.set_attn_implementation("eager")
    try:
        other, _ = kv.score(ids.to(kv.model.device), following, disable=True)
    finally:
        kv.model.set_attn_implementation("sdpa")
    return relative(other, truth)


def continuation(kv: KVBoost, ids: torch.Tensor) -> torch.Tensor:
    """Token ids [1, m] to score behind a prompt: some of its own."""
    return ids[:, -CONTINUATION_TOKENS:].flip(1).to(kv.model.device)


def first_logits(kv: KVBoost, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    out = kv.generate(
        ids, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True, **settings
    )
    return out.output.logits[0].float()


def relative(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return ((ours - truth).abs().max() / truth.abs().max()).item()


def rounded(value: Any) -> Any:
    """Floats of nested results to five digits."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements; every row is printed when it is there, so that little is lost if a longer prompt fails."""
    began = time.perf_counter()
    miniature = arguments.miniature or not torch.cuda.is_available()
    device, dtype = ("cpu", torch.float32) if miniature else ("cuda", torch.bfloat16)
    lengths = arguments.lengths or ([384, 768, 1536] if miniature else [2048, 6144, 16384])
    kv = build(MINIATURE if miniature else SHAPE, device, dtype)
    synchronize()
    result: dict[str, Any] = {
        "benchmark": "gpu_check",
        "miniature": miniature,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "dtype": str(dtype),
        "parameters": sum(p.numel() for p in kv.model.parameters()),
        "versions": {m.__name__: m.__version__ for m in (kvboost, torch, transformers)},
        "load_s": time.perf_counter() - began,
        "moved_refused": kv.support.moved_refused,
        "self_check": kv.support.errors,
    }
    show("loaded", result)
    result["exactness"] = exactness(kv, lengths[0])
    show("exactness", result["exactness"])
    result["rows"], result["skipped"] = [], []
    for num_tokens in lengths:
        if time.perf_counter() - began > arguments.limit_s:
            result["skipped"].append(num_tokens)
            continue
        result["rows"].append(measure(kv, num_tokens, arguments.repeats))
        show(f"{num_tokens} tokens", result["rows"][-1])
    result["seconds"] = time.perf_counter() - began
    result["ok"] = result["exactness"]["ok"] and all(r["moved_tokens"] > 0 for r in result["rows"])
    return rounded(result)


def show(title: str, values: dict[str, Any]) -> None:
    print(title, *(f"{k}={v}" for k, v in rounded(values).items()), sep="\n  ", file=sys.stderr, flush=True)


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the check and ends with one JSON line, which is returned too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--miniature", action="store_true", help="a tiny model on the CPU, in float32")
    parser.add_argument("--lengths", type=int, nargs="+", help="prompt lengths in tokens, 384 or more each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=240, help="no further length is begun after so many seconds")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args(given)
    if min([384, *(arguments.lengths or [])]) < 384:
        parser.error("every length must be at least 384: shorter documents hold no chunk")
    result = run(arguments)
    line = json.dumps(result)
    if arguments.out:
        with arguments.out.open("a") as file:
            file.write(line + "\n")
    print(line)
    return result


if __name__ == "__main__":
    sys.exit(not main()["ok"])
