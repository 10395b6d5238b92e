"""How much of the ideal any-position reuse is found, on real text, and that reports always add up."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ideal import ideal_mask
from kvboost import KVBoost, ReuseReport
from kvboost.config import SINK_TOKENS
from scenario import engine

WORDS = 151_700


@pytest.fixture(scope="module")
def model() -> Any:
    """One layer over the whole Qwen2 vocabulary: what is found depends on the tokens alone."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16_384,
        eos_token_id=WORDS - 1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def tokenizer(shared_data: Path) -> Any:
    return AutoTokenizer.from_pretrained(shared_data / "models" / "qwen2_tokenizer")


@pytest.fixture(scope="module")
def documents(shared_data: Path) -> dict[str, list[str]]:
    rows = (shared_data / "buglocal.jsonl").read_text().splitlines()[:400:50]
    code = [json.loads(row)["buggy_source"][:2500] for row in rows]
    passages = [json.loads(row)["text"] for row in (shared_data / "mdqa" / "nq_docs.jsonl").read_text().splitlines()]
    prose = ["\n".join(passages[i : i + 3]) for i in range(0, 200, 25)]
    log = (shared_data / "logs" / "HDFS_2k.log").read_text().splitlines()
    return {"code": code, "prose": prose, "logs": ["\n".join(log[i : i + 12]) for i in range(0, 96, 12)]}


SYSTEM = "You are a careful assistant. Several documents follow; read all of them, then answer in one sentence.\n\n"


def render(texts: list[str], question: str, head: str = "") -> str:
    body = "".join(f"Document [{i}]\n{text}\n\n" for i, text in enumerate(texts, 1))
    return f"{head}{SYSTEM}{body}Question: {question}\nAnswer:"


def one_token_changed(text: str) -> str:
    words = text.split(" ")
    words[len(words) // 2] = "altogether"
    return " ".join(words)


SCENARIOS = {
    "changed head": lambda d: ([render(d[:5], "What is it?")], render(d[:5], "What is it?", "2026-11-29 12:00:07 ")),
    "reordered documents": lambda d: ([render(d[:5], "What?")], render([d[3], d[0], d[4], d[2], d[1]], "Where?")),
    "subset and a new document": lambda d: ([render(d[:5], "What?")], render([d[4], d[6], d[1]], "Who was it?")),
    "next chat turn": lambda d: (
        [render(d[:5], "What?")],
        render(d[:5], "What?") + " It is the second one.\n\nQuestion: Why?\nAnswer:",
    ),
    "one token changed in the middle of a document": lambda d: (
        [render(d[:5], "What?")],
        render([d[0], one_token_changed(d[1]), *d[2:5]], "What?"),
    ),
    "documents of several earlier prompts": lambda d: (
        [render(d[:3], "What?"), render(d[3:6], "What?")],
        render([d[5], d[1], d[3]], "Which?"),
    ),
}


def ids(text: str, tokenizer: Any) -> torch.Tensor:
    return torch.tensor([tokenizer(text).input_ids])


def adds_up(report: ReuseReport) -> bool:
    kinds = report.exact_tokens + report.continued_tokens + report.moved_tokens + report.fresh_tokens
    return kinds == report.prompt_tokens and 0 <= report.repaired_tokens <= report.moved_tokens


@pytest.mark.parametrize("kind", ["code", "prose", "logs"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_at_least_95_percent_of_the_ideal_any_position_reuse_is_found(
    scenario: str, kind: str, model: Any, tokenizer: Any, documents: dict[str, list[str]]
) -> None:
    earlier, text = SCENARIOS[scenario](documents[kind])
    kv = KVBoost(model, tokenizer)
    stored = [ids(t, tokenizer) for t in earlier]
    for prompt in stored:
        kv.generate(prompt, max_new_tokens=1)
    prompt = ids(text, tokenizer)
    report = kv.generate(prompt, max_new_tokens=1).report
    assert adds_up(report)
    ideal = ideal_mask(prompt[0].int().numpy(), [s[0].int().numpy() for s in stored])
    ideal[:SINK_TOKENS] &= np.arange(SINK_TOKENS) < report.exact_tokens
    ideal[-1] = False
    reused = report.exact_tokens + report.continued_tokens + report.moved_tokens
    assert reused >= 0.95 * ideal.sum(), f"{reused} of {ideal.sum()} tokens"


TEXTS = {
    "english": "The gateway retries a failed call three times. It waits for a while, then longer, then it gives up. "
    * 6,
    "chinese": "网关会把失败的调用重试三次。每次等待的时间都比上一次更长，最后它会放弃并报告错误。" * 8,
    "code": "def retry(call, times=3):\n    for attempt in range(times):\n        try:\n            return call()\n"
    * 8,
}
HEADS = ["Read this: ", "Read this:", "Read this:\n", "Read this:\n\n", "请读：", "x", "    "]


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_is_found_behind_whatever_character_it_is_split_off(kind: str, model: Any, tokenizer: Any) -> None:
    kv = KVBoost(model, tokenizer)
    opening = "You are asked to read a text with care and to answer a question about it. Take your time for that. " * 2
    kv.generate(ids(opening + TEXTS[kind], tokenizer), max_new_tokens=1)
    size = len(tokenizer(TEXTS[kind]).input_ids)
    for head in HEADS:
        report = kv.generate(ids(f"{opening} Again. {head}{TEXTS[kind]}\nQ?", tokenizer), max_new_tokens=1).report
        assert report.moved_tokens >= 0.85 * size, head


def test_prompts_that_share_nothing_report_nothing(model: Any, tokenizer: Any) -> None:
    kv = KVBoost(model, tokenizer)
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(0, WORDS, (1, 500), generator=generator)
        report = kv.generate(prompt, max_new_tokens=1).report
        assert report.fresh_tokens == 500


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=2, max_size=5), st.integers(0, 2**16))
def test_kinds_sum_to_the_prompt_on_every_request(requests: list[list[int]], seed: int) -> None:
    from families import build, random_ids

    kv = engine(build("llama"), cache_bytes=1 << 20)
    pieces = [random_ids(20 + 9 * i, seed=seed + i) for i in range(6)]
    rng = random.Random(seed)
    for request in requests:
        prompt = torch.cat([pieces[i] for i in request], 1)
        fidelity = rng.choice(["exact", "balanced", "fast"])
        out = kv.generate(prompt, max_new_tokens=2, fidelity=fidelity)
        assert adds_up(out.report)
        assert sum(len(s.span) for s in out.plan) == prompt.shape[1]
        assert [s.span.start for s in out.plan][1:] == [s.span.stop for s in out.plan][:-1]
        if fidelity == "exact":
            assert out.report.moved_tokens == out.report.continued_tokens == 0
    kv.store.tiers[0].check_integrity()
