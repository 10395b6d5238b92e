"""Chunkers partition every text, keep their sizes, and cut by local content only."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from ideal import ideal_mask, ideal_prefix_reuse, ideal_reuse
from kvboost.chunking import Chunker, Separators, make_chunker, token_offsets
from kvboost.chunking.content import ContentChunker, hash_gap
from kvboost.chunking.explicit import ExplicitChunker
from kvboost.chunking.fixed import FixedChunker
from kvboost.config import Settings
from kvboost.errors import InputError, SettingsError
from kvboost.types import Int32Array, Span

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data directory is not beside the repository")

MAX = Settings().chunk_max_tokens
REACH = 4 * MAX  # an edit changes no chunk that ends further away than this (the worst of 7,800 edits: 3.1 MAX)

SIZES = [(32, 128, 256), (1, 1, 1), (1, 2, 3), (16, 16, 16), (32, 64, 70), (100, 128, 150)]
token_ids = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 3), max_size=600).map(lambda x: np.array(x, np.int32))


def parts(chunker: Chunker, ids: Int32Array) -> list[bytes]:
    return [ids[s.start : s.stop].tobytes() for s in chunker.split(ids)]


def assert_partition(spans: list[Span], n: int) -> None:
    edges = [0, *(s.stop for s in spans)]
    assert [s.start for s in spans] == edges[:-1], "spans overlap or leave a gap"
    assert edges[-1] == n
    assert all(len(s) > 0 for s in spans)


class ToyTokenizer:
    """One token per given text; ids in that order."""

    def __init__(self, *texts: str, special: tuple[str, ...] = (), template: str = ""):
        self._ids = {text: i for i, text in enumerate((*special, *texts))}
        self.all_special_tokens, self.chat_template = list(special), template
        self.bos_token_id = None

    def __len__(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [self._ids[token] for token in tokens]

    def encode(self, *texts: str) -> Int32Array:
        return np.array([self._ids[text] for text in texts], np.int32)


@cache
def qwen() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / "models" / "qwen2_tokenizer")


def records(name: str, count: int) -> list[dict[str, Any]]:
    with (DATA / name).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in islice(lines, count)]


def encoded(text: str) -> Int32Array:
    return np.array(qwen()(text)["input_ids"], np.int32)


def cut_texts(text: str) -> list[str]:
    ids = encoded(text)
    return [qwen().decode(ids[s.start : s.stop]) for s in ContentChunker(Separators.from_tokenizer(qwen())).split(ids)]


# --- every chunker ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@given(ids=token_ids, offsets=st.lists(st.integers(0, 700)))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_every_chunker_partitions_every_text_within_the_largest_size(
    sizes: tuple[int, int, int], ids: Int32Array, offsets: list[int]
) -> None:
    content = ContentChunker(Separators(), *sizes)
    for chunker in (content, FixedChunker(sizes[1]), ExplicitChunker(offsets, content, sizes[2])):
        spans = chunker.split(ids)
        assert_partition(spans, len(ids))
        assert max(map(len, spans), default=0) <= sizes[2]


@pytest.mark.parametrize("n", [0, 1, 31, 32, 191, 192, 32_768])
@pytest.mark.parametrize("kind", ["equal", "random", "two values", "period 50", "counting"])
def test_hash_cuts_leave_chunks_of_the_least_size_in_every_kind_of_text(n: int, kind: str) -> None:
    rng = np.random.default_rng(n)
    ids = {
        "equal": np.full(n, 70_000),
        "random": rng.integers(0, 262_144, n),
        "two values": rng.integers(0, 2, n),
        "period 50": np.arange(n) % 50,
        "counting": np.arange(n) + 2**16,
    }[kind].astype(np.int32)
    spans = ContentChunker(Separators()).split(ids)
    assert_partition(spans, n)
    assert min(map(len, spans), default=n) >= min(n, hash_gap(32, 128, MAX)) >= min(n, 32)
    assert max(map(len, spans), default=0) <= MAX


def test_mean_of_hash_cut_chunks_is_the_average_that_was_asked_for() -> None:
    ids = np.random.default_rng(1).integers(0, 50_000, 100_000).astype(np.int32)
    for avg in (64, 128, 200):
        chunks = ContentChunker(Separators(), 32, avg, 2 * avg).split(ids)
        assert len(ids) / len(chunks) == pytest.approx(avg, rel=0.08)


@given(ids=token_ids)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_equal_texts_get_equal_chunks_from_any_instance_and_integer_type(ids: Int32Array) -> None:
    spans = ContentChunker(Separators()).split(ids)
    assert ContentChunker(Separators()).split(ids.copy()) == spans
    wider: Any = ids.astype(np.int64)
    assert ContentChunker(Separators()).split(wider) == spans


def test_8k_tokens_are_cut_in_well_under_a_tenth_of_a_second() -> None:
    ids = np.random.default_rng(2).integers(0, 150_000, 8192).astype(np.int32)
    chunker, seconds = ContentChunker(Separators()), []
    for _ in range(3):
        began = time.perf_counter()
        chunker.split(ids)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.05  # 1 ms on an idle core


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, kvboost.chunking; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- locality --------------------------------------------------------------------------------------------------------


def edited(ids: Int32Array, at: int, removed: int, inserted: Int32Array) -> Int32Array:
    return np.concatenate([ids[:at], inserted, ids[at + removed :]])


def assert_change_is_local(chunker: Chunker, ids: Int32Array, at: int, removed: int, inserted: Int32Array) -> None:
    known, after = set(parts(chunker, ids)), edited(ids, at, removed, inserted)
    changed = [s for s in chunker.split(after) if after[s.start : s.stop].tobytes() not in known]
    distance = max((max(at - s.start, s.stop - at - len(inserted)) for s in changed), default=0)
    assert distance <= REACH, f"an edit of {removed} -> {len(inserted)} tokens at {at} changed a chunk {distance} away"


edits = st.tuples(st.integers(0, 4095), st.integers(0, 40), st.lists(st.integers(0, 200_000), max_size=40))


@given(seed=st.integers(0, 1000), variety=st.sampled_from([2, 20, 150_000]), edit=edits)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_an_edit_of_random_text_changes_only_chunks_near_it(
    seed: int, variety: int, edit: tuple[int, int, list[int]]
) -> None:
    ids = np.random.default_rng(seed).integers(0, variety, 4096).astype(np.int32)
    assert_change_is_local(ContentChunker(Separators()), ids, edit[0], edit[1], np.array(edit[2], np.int32))


@cache
def real_text(kind: str) -> Int32Array:
    if kind.endswith(".log"):
        text = "\n".join((DATA / "logs" / kind).read_text(encoding="utf-8", errors="replace").splitlines()[:250])
    elif kind == "code":
        text = "\n".join(row["buggy_source"] for row in records("buglocal.jsonl", 40))
    else:
        text = " ".join(row["text"] for row in records("mdqa/nq_docs.jsonl", 60))
    return encoded(text)[:8192]


@needs_data
@pytest.mark.parametrize("separated", [True, False], ids=["separators", "hash only"])
@pytest.mark.parametrize("kind", ["HDFS_2k.log", "Linux_2k.log", "OpenSSH_2k.log", "code", "prose"])
def test_an_edit_of_real_text_changes_only_chunks_near_it(kind: str, separated: bool) -> None:
    ids, rng = real_text(kind), np.random.default_rng(3)
    chunker = ContentChunker(Separators.from_tokenizer(qwen()) if separated else Separators())
    for _ in range(40):
        at, removed, inserted = (int(x) for x in rng.integers(0, (len(ids), 20, 20)))
        new = rng.integers(0, 150_000, inserted).astype(np.int32)
        assert_change_is_local(chunker, ids, at, removed, new)


@needs_data
def test_a_log_window_that_slides_keeps_most_of_its_chunks() -> None:
    ids = real_text("HDFS_2k.log")
    chunker = ContentChunker(Separators())
    for start in (1, 7, 100, 500):
        known, window = set(parts(chunker, ids[:6000])), ids[start : 6000 + start]
        kept = sum(len(part) // 4 for part in parts(chunker, window) if part in known)
        assert kept >= len(window) - start - 2 * REACH


@pytest.mark.parametrize("period", [1, 2, 20, 50, 97, 150])
def test_periodic_text_stays_in_phase_behind_an_insertion(period: int) -> None:
    ids = np.resize(np.random.default_rng(4).integers(0, 1000, period), 8192).astype(np.int32)
    known = set(parts(ContentChunker(Separators()), ids))
    after = parts(ContentChunker(Separators()), edited(ids, 4001, 0, np.array([7, 8, 9], np.int32)))
    changed = sum(len(part) // 4 for part in after if part not in known)
    assert changed <= REACH + MAX  # the last chunk of a period may be of another length


# --- separators ------------------------------------------------------------------------------------------------------


def test_without_a_tokenizer_there_are_no_separators() -> None:
    marks = Separators.from_tokenizer(None).find(np.arange(-5, 300, dtype=np.int32))
    assert all(len(getattr(marks, name)) == 0 for name in ("turns", "markers", "numbers", "blanks", "soft"))


def test_cuts_stand_before_turns_and_markers_and_behind_numbers_and_blank_lines() -> None:
    toy = ToyTokenizer(
        *("a", ".", "Ġb", "Ċ", "ĊĊ", ".ĊĊ", "#", "Ġ[", "7", "](", "Document"),
        special=("<|im_start|>", "<|im_end|>"),
    )
    find = Separators.from_tokenizer(toy).find
    assert find(toy.encode("a", "<|im_end|>", "Ċ", "<|im_start|>", "a")).turns.tolist() == [3]
    assert find(toy.encode("a", "Ċ", "#", "Ġb")).markers.tolist() == [2]
    assert find(toy.encode("a", "#", "Ġb", "Ċ", "a")).markers.tolist() == [], "not at the start of a line"
    numbered = find(toy.encode("a", "Ċ", "Document", "Ġ[", "7", "7", "](", "a"))
    assert (numbered.markers.tolist(), numbered.numbers.tolist()) == ([2], [6])
    assert find(toy.encode("a", ".ĊĊ", "a")).blanks.tolist() == [2]
    assert find(toy.encode("a", "Ċ", "Ċ", "Ċ", "a")).blanks.tolist() == [4], "behind all newlines of a blank line"
    assert find(toy.encode("a", "Ċ", "a", "Ċ", "a")).blanks.tolist() == []
    assert find(toy.encode("a", ".", "Ġb", ".", "a", "Ċ", "a")).soft.tolist() == [2, 6]


@pytest.mark.parametrize(
    ("newline", "space"), [("<0x0A>", "▁"), ("\n", "▁"), ("Ċ", "Ġ"), ("\n", " ")], ids=["bytes", "piece", "bpe", "text"]
)
def test_vocabularies_of_every_spelling_are_understood(newline: str, space: str) -> None:
    toy = ToyTokenizer("a", newline, f"{space}b", "##", ".")
    marks = Separators.from_tokenizer(toy).find(toy.encode("a", newline, newline, "##", f"{space}b", ".", f"{space}b"))
    assert (marks.blanks.tolist(), marks.markers.tolist(), marks.soft.tolist()) == ([3], [3], [3, 6])


@pytest.mark.parametrize(
    ("opens", "closes"),
    [
        ("<|im_start|>", "<|im_end|>"),
        ("<start_of_turn>", "<end_of_turn>"),
        ("<|start_header_id|>", "<|end_header_id|>"),
        ("<|turn>", "<turn|>"),
        ("<|user|>", "<|end|>"),
        ("[INST]", "[/INST]"),
        ("<tool_response>", "</tool_response>"),
        ("<|start|>", "<|channel|>"),
        ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    ],
)
def test_turn_starts_are_told_from_turn_ends_by_name(opens: str, closes: str) -> None:
    toy = ToyTokenizer("a", special=(opens, closes))
    assert Separators.from_tokenizer(toy).find(toy.encode("a", closes, "a", opens, "a")).turns.tolist() == [3]


def test_a_special_token_of_the_chat_template_starts_a_turn_whatever_its_name() -> None:
    for template, turns in (("{{ '<extra_1>' }}", [1]), ("", [])):
        toy = ToyTokenizer("a", special=("<extra_1>",), template=template)
        assert Separators.from_tokenizer(toy).find(toy.encode("a", "<extra_1>", "a")).turns.tolist() == turns


def test_a_vocabulary_of_262k_tokens_is_read_fast_and_only_once() -> None:
    toy = ToyTokenizer(*(f"{'Ġ' * (i % 2)}word{i:x}" for i in range(262_144)))
    began = time.perf_counter()
    first = Separators.from_tokenizer(toy)
    assert time.perf_counter() - began < 2  # 0.4 s on an idle core
    assert Separators.from_tokenizer(toy) is first


@needs_data
def test_a_real_chat_is_cut_at_turns_headings_and_paragraphs() -> None:
    paragraph = "The quick brown fox jumps over the lazy dog, again and again, until the two of them are tired. " * 2
    text = (
        f"<|im_start|>system\nIt is noon on a Tuesday, session 8811.\n\n{paragraph}\n\n{paragraph}<|im_end|>\n"
        f"<|im_start|>user\n# Rules of the house\n{paragraph}\n## More of the rules\n{paragraph}<|im_end|>\n"
    )
    starts = [chunk[:14] for chunk in cut_texts(text)]
    assert starts == ["<|im_start|>sy", "The quick brow", "The quick brow", "<|im_start|>us", "## More of the"]


@needs_data
def test_documents_that_trade_places_and_numbers_keep_their_chunks() -> None:
    docs = records("mdqa/nq_docs.jsonl", 12)

    def prompt(order: list[int]) -> str:
        lines = (f"Document [{i}](Title: {docs[j]['title']}) {docs[j]['text']}\n" for i, j in enumerate(order, 1))
        return "<|im_start|>user\nRead.\n\n" + "".join(lines)

    known = set(cut_texts(prompt(list(range(12)))))
    moved = cut_texts(prompt([5, 11, 0, 3, 8, 2, 10, 7, 1, 9, 4, 6]))
    found = sum(len(chunk) for chunk in moved if chunk in known)
    assert found > 0.9 * sum(map(len, moved))


@needs_data
def test_a_changed_head_leaves_the_chunks_of_the_document_behind_it() -> None:
    document = qwen().decode(real_text("prose")[:2000])
    known = set(cut_texts(f"<|im_start|>user\nIt is 12:01.\n\n{document}"))
    changed = [
        c for c in cut_texts(f"<|im_start|>user\nToday, on a Monday, it is 8 am.\n\n{document}") if c not in known
    ]
    assert len(changed) == 1


# --- explicit boundaries, construction -------------------------------------------------------------------------------


def test_explicit_boundaries_are_kept_and_only_large_pieces_are_cut_further() -> None:
    chunker = ExplicitChunker([500, 10, 10, 0, 9999], FixedChunker(200), max_tokens=300)
    assert chunker.split(np.zeros(600, np.int32)) == [
        Span(0, 10),
        Span(10, 210),
        Span(210, 410),
        Span(410, 500),
        Span(500, 600),
    ]


def test_a_negative_boundary_is_refused() -> None:
    with pytest.raises(InputError, match=">= 0, got -3"):
        ExplicitChunker([-3, 5], FixedChunker())


def test_character_boundaries_move_to_the_next_token_start() -> None:
    mapping = [(0, 5), (5, 6), (6, 11)]
    assert token_offsets([0, 5, 7, 11, 99], mapping) == [0, 1, 3, 3, 3]


def test_settings_choose_the_chunker() -> None:
    made = {
        kind: make_chunker(Settings.model_validate({"chunker": kind}), Separators()) for kind in ("content", "fixed")
    }
    assert isinstance(made["content"], ContentChunker)
    assert isinstance(made["fixed"], FixedChunker)
    assert isinstance(make_chunker(Settings(), Separators(), boundaries=[3]), ExplicitChunker)
    with pytest.raises(SettingsError, match="needs the tokenizer"):
        make_chunker(Settings(chunker="semantic"), Separators())


# --- the ideal that benchmarks compare with --------------------------------------------------------------------------


@given(
    prompt=st.lists(st.integers(0, 2), max_size=40),
    stored=st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=3),
    min_run=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_ideal_reuse_counts_the_tokens_of_all_long_common_runs(
    prompt: list[int], stored: list[list[int]], min_run: int
) -> None:
    covered = [False] * len(prompt)
    for i in range(len(prompt)):
        for j in range(i + min_run, len(prompt) + 1):
            if any(prompt[i:j] == text[k : k + j - i] for text in stored for k in range(len(text))):
                covered[i:j] = [True] * (j - i)
    arrays = [np.array(text, np.int32) for text in stored]
    assert ideal_mask(np.array(prompt, np.int32), arrays, min_run).tolist() == covered
    assert ideal_reuse(np.array(prompt, np.int32), arrays, min_run) == sum(covered)


def test_ideal_prefix_reuse_is_the_longest_common_prefix() -> None:
    prompt = np.array([1, 2, 3, 4], np.int32)
    stored = [np.array(text, np.int32) for text in ([1, 2, 9, 4], [2, 3, 4], [1, 2, 3])]
    assert ideal_prefix_reuse(prompt, stored) == 3
    assert ideal_prefix_reuse(prompt, []) == 0
