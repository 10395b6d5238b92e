"""Which entry of a full store goes first. Pure Python: names, bytes and seconds, no records.

    importance = decayed use frequency x recompute cost x quality / bytes
    priority   = time of last use + weight x log2(importance)

Time is counted in *turnovers*: bytes that proved worth keeping, over the capacity. An entry proves itself when it is
used for the first time, or comes back after it was evicted. Text that nobody asks for again therefore ages nothing, and
a newcomer, which stands `weight x log2(NEWCOMER)` behind what was used now, gives way to what is proven.

`weight` says how many turnovers one doubling of importance is worth: 0 is LRU, infinity LFU. `kvboost.store.tuning`
chooses it from the traffic. A priority changes only when its entry is used, so a heap orders them (as in LRFU, Lee et
al. 2001) and an operation costs O(log n).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NEWCOMER = 0.25  # uses that an entry has before its first; what is known once is worth a quarter of a use
HALF_LIFE = 10.0  # turnovers after which a use counts half
REMEMBERED = 8.0  # names of evicted entries are remembered for so many capacities of bytes ...
MAX_REMEMBERED = 1 << 17  # ... but never more of them than this
COST_RANGE = 16.0  # the cost per byte counts within a factor of this around the mean: one slow measurement is not all
MIN_QUALITY = 1 / 16
SHRINK_HEAP = 64  # outdated items that a heap may always hold


def importance(frequency: float, cost: float, quality: float, size: float) -> float:
    """What keeping an entry saves per byte. `cost` and `size` in any unit that is the same for all entries."""
    return frequency * cost * quality / size


def priority(importance: float, used_at: float, weight: float) -> float:
    """The entry with the lowest priority goes first; `used_at` in turnovers."""
    return used_at + weight * math.log2(importance)


@dataclass(slots=True)
class Entry:
    """What a ranking knows of one entry."""

    size_bytes: int
    text: bytes  # the name that its use is remembered under after it was evicted
    group: bytes
    frequency: float
    used_at: float  # turnovers
    density: float  # cost per byte over the mean, 1.0 if unknown
    quality: float
    proven: bool
    priority: float = 0.0
    serial: int = 0  # of its item in the heap; an item with another serial is outdated


@dataclass(frozen=True, slots=True)
class _Memory:
    frequency: float
    used_at: float
    size_bytes: int


_Item = tuple[float, int, bytes]  # priority, serial, name


class Ranking:
    """The entries of one store in the order in which they should go. Not thread-safe: the store's lock guards it."""

    def __init__(self, capacity_bytes: int, weight: float = 0.1, *, grouped: bool = False) -> None:
        """With `grouped` the weakest entry of one group is found as fast as the weakest of all."""
        self.capacity_bytes = capacity_bytes
        self._weight = weight
        self._grouped = grouped
        self._entries: dict[bytes, Entry] = {}
        self._heaps: dict[bytes | None, list[_Item]] = {None: []}
        self._remembered: OrderedDict[bytes, _Memory] = OrderedDict()
        self._remembered_bytes = 0
        self._proven_bytes = 0
        self._serial = 0
        self._mean_density = 0.0  # cost in seconds per byte
        self._costs_seen = 0

    def __contains__(self, name: bytes) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: bytes) -> Entry:
        return self._entries[name]

    def entries(self) -> Iterator[Entry]:
        """All entries, longest kept first."""
        return iter(self._entries.values())

    @property
    def now(self) -> float:
        """Turnovers until now."""
        return self._proven_bytes / max(1, self.capacity_bytes)

    @property
    def num_remembered(self) -> int:
        """Names of evicted entries that are remembered."""
        return len(self._remembered)

    @property
    def weight(self) -> float:
        """Turnovers that one doubling of importance is worth. Setting it orders all entries anew."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._weight = weight
        for entry in self._entries.values():
            entry.priority = self._priority(entry)
        self._rebuild()

    def estimate(
        self, size_bytes: int, text: bytes, *, group: bytes = b"", cost_s: float = 0.0, floor: float = -math.inf
    ) -> Entry:
        """The entry that a newcomer would be; changes nothing. `floor` is the least priority that it gets."""
        known = self._remembered.get(text)
        frequency = NEWCOMER if known is None else 1.0 + self._decayed(known.frequency, known.used_at)
        now = self.now + (size_bytes / max(1, self.capacity_bytes) if known is not None else 0.0)
        density = self._relative_density(cost_s, size_bytes)
        entry = Entry(size_bytes, text, group, frequency, now, density, 1.0, known is not None)
        entry.priority = max(floor, self._priority(entry))
        return entry

    def add(self, name: bytes, entry: Entry) -> None:
        """Ranks a newcomer that `estimate` made."""
        self._recall(entry)
        self._entries[name] = entry
        self._push(name, entry)

    def refuse(self, entry: Entry) -> None:
        """Remembers a newcomer that is not kept, so that it is known when it comes back."""
        self._recall(entry)
        self._remember(entry)

    def use(self, name: bytes, floor: float = -math.inf) -> float:
        """Counts a use; returns the new priority, which is at least `floor`."""
        entry = self._entries[name]
        if not entry.proven:
            entry.proven = True
            self._proven_bytes += entry.size_bytes
        entry.frequency = 1.0 + self._decayed(entry.frequency, entry.used_at)
        entry.used_at = self.now
        entry.priority = max(floor, self._priority(entry))
        self._push(name, entry)
        return entry.priority

    def resize(self, name: bytes, size_bytes: int) -> None:
        """The entry's record was replaced by another of that size; its use stays known."""
        entry = self._entries[name]
        entry.density *= entry.size_bytes / max(1, size_bytes)
        entry.size_bytes = size_bytes
        entry.priority = self._priority(entry)
        self._push(name, entry)

    def note_quality(self, name: bytes, quality: float) -> None:
        """Sets the share of the entry's rows that was served without repair, 0 to 1."""
        entry = self._entries[name]
        entry.quality = max(MIN_QUALITY, min(1.0, quality))
        entry.priority = self._priority(entry)
        self._push(name, entry)

    def remove(self, name: bytes, *, remember: bool = False) -> Entry:
        """Takes an entry out; with `remember`, what is known of its use outlives it for a while."""
        entry = self._entries.pop(name)
        if remember:
            self._remember(entry)
        return entry

    def victims(
        self,
        size_bytes: int,
        spared: Callable[[bytes], bool],
        *,
        below: float = math.inf,
        group: bytes | None = None,
    ) -> list[bytes] | None:
        """The weakest entries that free `size_bytes` together; nothing is taken out.

        None if that needs an entry which is spared, or whose priority is above `below`. With `group`, of that one only.
        """
        chosen: list[bytes] = []
        taken: list[_Item] = []
        heap = self._heaps.get(group if self._grouped else None, [])
        while size_bytes > 0 and heap and heap[0][0] <= below:
            item = heapq.heappop(heap)
            name = item[2]
            if self._outdated(item):
                continue
            taken.append(item)
            if not spared(name) and group in (None, self._entries[name].group):
                chosen.append(name)
                size_bytes -= self._entries[name].size_bytes
        for item in taken:
            heapq.heappush(heap, item)
        return chosen if size_bytes <= 0 else None

    def _priority(self, entry: Entry) -> float:
        value = importance(entry.frequency, entry.density, entry.quality, 1.0)  # the density is per byte already
        return priority(value, entry.used_at, self._weight)

    def _decayed(self, frequency: float, used_at: float) -> float:
        return frequency * math.pow(2.0, (used_at - self.now) / HALF_LIFE)

    def _relative_density(self, cost_s: float, size_bytes: int) -> float:
        if cost_s <= 0.0 or size_bytes <= 0:
            return 1.0
        density = cost_s / size_bytes
        self._costs_seen += 1
        self._mean_density += (density - self._mean_density) / min(self._costs_seen, 1000)
        return min(COST_RANGE, max(1 / COST_RANGE, density / self._mean_density))

    def _recall(self, entry: Entry) -> None:
        known = self._remembered.pop(entry.text, None)
        if known is not None:
            self._remembered_bytes -= known.size_bytes
            self._proven_bytes += entry.size_bytes

    def _remember(self, entry: Entry) -> None:
        old = self._remembered.pop(entry.text, None)
        if old is not None:
            self._remembered_bytes -= old.size_bytes
        self._remembered[entry.text] = _Memory(entry.frequency, entry.used_at, entry.size_bytes)
        self._remembered_bytes += entry.size_bytes
        while (
            self._remembered_bytes > REMEMBERED * self.capacity_bytes or len(self._remembered) > MAX_REMEMBERED
        ) and self._remembered:
            self._remembered_bytes -= self._remembered.popitem(last=False)[1].size_bytes

    def _push(self, name: bytes, entry: Entry) -> None:
        self._serial += 1
        entry.serial = self._serial
        item = (entry.priority, entry.serial, name)
        heapq.heappush(self._heaps[None], item)
        if self._grouped:
            heapq.heappush(self._heaps.setdefault(entry.group, []), item)
        if sum(map(len, self._heaps.values())) > 4 * len(self._entries) + SHRINK_HEAP:
            self._rebuild()

    def _outdated(self, item: _Item) -> bool:
        entry = self._entries.get(item[2])
        return entry is None or entry.serial != item[1]

    def _rebuild(self) -> None:
        """Heaps without outdated items. Called when a good part of the items is outdated, so its cost is spread."""
        self._heaps = {None: []}
        for name, entry in self._entries.items():
            item = (entry.priority, entry.serial, name)
            self._heaps[None].append(item)
            if self._grouped:
                self._heaps.setdefault(entry.group, []).append(item)
        for heap in self._heaps.values():
            heapq.heapify(heap)
