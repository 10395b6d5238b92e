"""Real weights: SmolLM2-135M-Instruct and Gemma 3 270M over the documents that the demo ships."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.demo.stories import load_stories
from kvboost.hf.quant_probe import probe_quantization
from quant import sizes
from scenario import relative_error


def ids(kv: KVBoost, text: str) -> torch.Tensor:
    return torch.tensor([kv.tokenizer(text).input_ids])


def text(order: str, question: int = 0) -> str:
    """The log story's documents in the order of the digits, then a question."""
    story = load_stories()[0]
    documents = "\n\n".join(story.documents[int(i)] for i in order)
    return f"{story.system}\n\n{documents}\n\n{story.questions[question]}\nAnswer:"


def kl(truth: torch.Tensor, ours: torch.Tensor) -> float:
    """Mean KL(truth || ours) in nats over the rows."""
    p, q = truth.log_softmax(-1), ours.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def kv(request: pytest.FixtureRequest) -> KVBoost:
    directory: Path = request.getfixturevalue(f"{request.param}_dir")
    return KVBoost.from_pretrained(directory, dtype=torch.float32)


def test_every_kind_of_reuse_is_supported_and_the_self_check_is_tight(kv: KVBoost) -> None:
    assert kv.support.moved_refused is None
    assert kv.support.warnings == []
    assert max(kv.support.errors.values()) <= 1e-5


def test_moved_documents_are_near_a_full_prefill_and_full_repair_equals_it(kv: KVBoost) -> None:
    kv.invalidate()
    kv.generate(ids(kv, text("01")), max_new_tokens=1, do_sample=False)
    moved = ids(kv, text("10", question=1))
    assert moved.shape[1] > 600, "longer than Gemma's window of 512"
    answer = ids(kv, " The web shop keeps failed orders for fifteen minutes.")
    truth, _ = kv.score(moved, answer, disable=True)
    shifted, report = kv.score(moved, answer, recompute_strategy="none", gate=False)
    assert report.moved_tokens > 0.9 * moved.shape[1]
    assert report.repaired_tokens == 0
    assert kl(truth, shifted) <= 0.1
    judged, report = kv.score(moved, answer)
    assert kl(truth, judged) <= 0.1
    assert report.fallback is not None or 0 < report.risk <= 0.1
    repaired, report = kv.score(moved, answer, recompute_ratio=1.0)
    assert report.repaired_tokens == report.moved_tokens
    assert relative_error(repaired, truth) <= 1e-4


def test_exact_hits_are_within_rounding_of_a_full_prefill(kv: KVBoost) -> None:
    kv.invalidate()
    prompt = ids(kv, text("0"))
    kv.generate(prompt, max_new_tokens=1, do_sample=False)
    answer = ids(kv, " The database had no free connections.")
    truth, _ = kv.score(prompt, answer, disable=True)
    ours, report = kv.score(prompt, answer)
    assert report.exact_tokens == prompt.shape[1] - 1
    assert kl(truth, ours) < 1e-5


def test_packed_documents_are_small_and_answer_like_the_rows_that_were_computed(kv: KVBoost) -> None:
    kv.invalidate()
    found = probe_quantization(kv.model, kv.support, "k8v4")
    assert found.plain_layers == frozenset()
    assert min(min(heads) for heads in found.psnr_db["keys"]) >= 50
    assert min(min(heads) for heads in found.psnr_db["values"]) >= 30
    packer = found.packer(kv.support.require_layout(), 0)
    assert packer is not None
    prompt, answer = ids(kv, text("01")), ids(kv, " The database had no free connections, so orders failed.")
    kv.generate(prompt, max_new_tokens=1, do_sample=False)
    plain, _ = kv.score(prompt, answer)
    with kv.store.get_many([s.record_id for s in kv.plan(prompt) if s.record_id]) as lease:
        records = list(lease.records.values())
    kv.store.delete()
    kv.store.put_many([packer.encode(r) for r in records])
    packed, report = kv.score(prompt, answer)
    assert report.exact_tokens < 8 < report.continued_tokens
    assert 0 < kl(plain, packed) <= 0.005
    size = sizes(records, packer)
    assert size["layers_packed"] <= 0.42 * size["layers_plain"]
    assert size["cache_packed"] <= 0.47 * size["cache_plain"]


@pytest.fixture(scope="module")
def chat(smollm2_dir: Path) -> KVBoost:
    return KVBoost.from_pretrained(smollm2_dir, dtype=torch.float32)


def messages(*turns: str) -> list[dict[str, Any]]:
    roles = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


def test_a_warmed_document_is_reused_wherever_a_chat_brings_it(chat: KVBoost) -> None:
    chat.invalidate()
    document = load_stories()[0].documents[3]
    size = len(chat.tokenizer(document).input_ids)
    report = chat.warm(document)
    assert report.written_tokens >= size
    assert chat.warm(document).written_tokens == 0
    out = chat.generate(messages(f"It is 9:40. Read this.\n\n{document}\n\nWhom do I call?"), max_new_tokens=4)
    assert out.report.moved_tokens >= 0.95 * size
    assert out.report.fallback is None


def test_a_chat_with_a_template_reuses_its_own_history(chat: KVBoost) -> None:
    chat.invalidate()
    first = "Name three colours and one animal for each of them, in one line."
    out = chat.generate(messages(first), max_new_tokens=24, do_sample=False)
    later = chat.generate(messages(first, out.text, "Which animal is the largest?"), max_new_tokens=4, do_sample=False)
    known = len(chat.tokenizer.apply_chat_template(messages(first), tokenize=True, return_dict=False))
    assert later.report.exact_tokens >= known
    assert later.report.moved_tokens == 0
    plain = chat.generate(
        messages(first, out.text, "Which animal is the largest?"), max_new_tokens=4, do_sample=False, disable=True
    )
    assert later.token_ids == plain.token_ids
