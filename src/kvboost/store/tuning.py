"""Chooses the weight of a ranking from the traffic: how much frequency counts against recency.

The best weight differs by traffic: coding sessions want LRU, popular documents nearly LFU, and any fixed one loses a
good part of the hits on one or the other. So a sample of the names is played through small *shadow* stores that hold no
records, one per weight. What is used is the weight that hits most, once its lead is more than chance: hits come in
bursts (a whole history at once, or nothing), so a lead is measured in standard errors of its windows.
"""

from __future__ import annotations

import math
import zlib

from kvboost.store.policy import Ranking

WEIGHTS = (0.001, 0.01, 0.1, 0.5, 2.5)  # the first is LRU for all that is used, but unused newcomers still go first
START = 3  # index of the weight before anything is known: most traffic gains by it, and the rest soon shows its loss
SAMPLE_ENTRIES = 512  # that a shadow holds; all of them in a store with fewer
WINDOW = 0.1  # capacities of sampled bytes asked for between two decisions
KEPT = 0.99  # of what the windows have shown, from one to the next
RISE = 2.0  # standard errors that a larger weight must lead by: where traffic drifts, what won last is often wrong next
FALL = 1.0  # and a smaller one


class Shadow:
    """A store of names only: what is asked for is there, or else computed and, if it is worth it, kept."""

    def __init__(self, ranking: Ranking) -> None:
        self.ranking = ranking
        self.hit_bytes = 0.0
        self._used_bytes = 0

    def excess_bytes(self, size_bytes: int) -> int:
        """What would have to go for a newcomer of that size."""
        return self._used_bytes + size_bytes - self.ranking.capacity_bytes

    def ask(self, name: bytes, size_bytes: int) -> None:
        """Counts a hit, or takes the name in."""
        ranking = self.ranking
        if name in ranking:
            self.hit_bytes += size_bytes
            ranking.use(name)
            return
        entry = ranking.estimate(size_bytes, name)
        victims: list[bytes] | None = None
        if size_bytes <= ranking.capacity_bytes:
            victims = ranking.victims(self.excess_bytes(size_bytes), lambda name: False, below=entry.priority)
        if victims is None:
            ranking.refuse(entry)
            return
        for victim in victims:
            self._used_bytes -= ranking.remove(victim, remember=True).size_bytes
        ranking.add(name, entry)
        self._used_bytes += size_bytes


class Tuner:
    """Follows what a store is asked for, and gives its ranking the weight that would have hit most."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._index = START
        self._ranking.weight = WEIGHTS[START]
        self._shadows: list[Shadow] = []
        self._threshold = 0  # a name is in the sample if its checksum is below
        self._window_bytes = 0.0
        self._asked_bytes = 0
        self._hits = [0.0] * len(WEIGHTS)
        self._squares = [[0.0] * len(WEIGHTS) for _ in WEIGHTS]  # of the differences in each window

    def start(self) -> None:
        """The store is full: fills the shadows with a sample of what it holds. Only the first call does something."""
        if self._shadows or not len(self._ranking):
            return
        share = min(1.0, SAMPLE_ENTRIES / len(self._ranking))
        self._threshold = int(share * 2**32)
        capacity = max(1, int(share * self._ranking.capacity_bytes))
        self._window_bytes = WINDOW * capacity
        self._shadows = [Shadow(Ranking(capacity, w)) for w in WEIGHTS]
        for entry in self._ranking.entries():
            for _ in range(2 if entry.proven else 1):
                self._play(entry.text, entry.size_bytes)
        for shadow in self._shadows:
            shadow.hit_bytes = 0.0

    def ask(self, text: bytes, size_bytes: int) -> None:
        """A chunk was asked for, whether it was there or not."""
        if not self._shadows or not self._play(text, size_bytes):
            return
        self._asked_bytes += size_bytes
        if self._asked_bytes >= self._window_bytes:
            self._decide()

    def _play(self, text: bytes, size_bytes: int) -> bool:
        """Asks all shadows for a name if it is in the sample; returns whether it is."""
        if zlib.crc32(text) >= self._threshold:
            return False
        for shadow in self._shadows:
            shadow.ask(text, size_bytes)
        return True

    def _decide(self) -> None:
        self._asked_bytes = 0
        hits = [shadow.hit_bytes for shadow in self._shadows]
        for i, mine in enumerate(hits):
            self._shadows[i].hit_bytes = 0.0
            self._hits[i] = KEPT * self._hits[i] + mine
            self._squares[i] = [KEPT * s + (mine - other) ** 2 for s, other in zip(self._squares[i], hits, strict=True)]
        best = max(range(len(WEIGHTS)), key=self._lead)
        if self._lead(best) > 0:
            self._index = best
            self._ranking.weight = WEIGHTS[best]

    def _lead(self, index: int) -> float:
        """Hit bytes over those of the weight in use, less what chance may have given."""
        errors = RISE if index > self._index else FALL
        lead = self._hits[index] - self._hits[self._index]
        return lead - errors * math.sqrt(self._squares[index][self._index])
