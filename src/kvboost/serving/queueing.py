"""Who is served next: the tenant with the fewest running jobs, of equals the one that was served longest ago."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from kvboost.serving.stream import Ticket


class FairQueue:
    """A bounded queue of tickets. Not thread-safe: its owner locks.

    A tenant that has nothing queued is let in although others fill the queue, up to twice its size.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._by_tenant: OrderedDict[str, deque[Ticket]] = OrderedDict()  # the tenant served longest ago first

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def has_room(self, tenant: str) -> bool:
        """Whether a job of this tenant may be queued."""
        return len(self) < self.size or (tenant not in self._by_tenant and len(self) < 2 * self.size)

    def push(self, ticket: Ticket) -> None:
        """Queues a ticket behind those of its tenant."""
        self._by_tenant.setdefault(ticket.job.tenant, deque()).append(ticket)

    def pop(self, running: Counter[str]) -> Ticket | None:
        """The next ticket, given how many jobs of each tenant run; None if there is none."""
        if not self._by_tenant:
            return None
        tenant = min(self._by_tenant, key=lambda name: running[name])  # the first of equals
        ticket = self._by_tenant[tenant].popleft()
        self._by_tenant.move_to_end(tenant)
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        return ticket

    def remove(self, unwanted: Callable[[Ticket], bool]) -> list[Ticket]:
        """Takes out and returns every unwanted ticket."""
        removed = [t for tickets in self._by_tenant.values() for t in tickets if unwanted(t)]
        if removed:
            gone = set(map(id, removed))
            for tenant, tickets in list(self._by_tenant.items()):
                left = deque(t for t in tickets if id(t) not in gone)
                if left:
                    self._by_tenant[tenant] = left
                else:
                    del self._by_tenant[tenant]
        return removed
