"""What waits: a queue of requests per tenant, and above them a queue of tenants per tier.

Planning a step must not cost more because more requests wait. Each heap therefore gives its head in
logarithmic time and is set right lazily: a request that has ended stays in its tenant's heap as a
tombstone until it comes to the top, a tenant whose counter has grown is put back with the new one.
"""

import heapq
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, TypeVar

from tidegate_engine.core.sequence import Sequence
from tidegate_policies.snapshot import TierRule

if TYPE_CHECKING:
    from tidegate_engine.core.tenants import Tenant

MAX_TOMBSTONES = 64
"""Entries without a waiting request that a queue may hold beyond as many as it has with one."""

_Entry = TypeVar("_Entry", bound=tuple[object, ...])


class RequestQueue:
    """The requests of one tenant that were never admitted.

    Those that can still meet their deadline come first, the earliest deadline at the head; then all
    others by arrival. Without deadlines that is by arrival.

    Attributes:
        num_tokens: Prompt tokens of all of them.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._live: dict[Sequence, None] = {}
        self._by_deadline: list[tuple[float, int, Sequence]] = []
        self._by_arrival: list[tuple[int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, seq: object) -> bool:
        return seq in self._live

    def push(self, seq: Sequence) -> None:
        """Queue a request."""
        self._live[seq] = None
        self.num_tokens += seq.num_tokens
        heapq.heappush(self._by_arrival, (seq.arrival, seq))
        if seq.deadline is not None:
            heapq.heappush(self._by_deadline, (seq.deadline, seq.arrival, seq))

    def remove(self, seq: Sequence) -> None:
        """Take a request out, wherever it stands."""
        del self._live[seq]
        self.num_tokens -= seq.num_tokens
        most = 2 * len(self._live) + MAX_TOMBSTONES
        if len(self._by_arrival) > most or len(self._by_deadline) > most:
            self._sweep()

    def in_order(self, now: float) -> Iterator[Sequence]:
        """Yield the requests as they are to be served, without taking them out.

        Requests that are removed meanwhile are left out.
        """
        # What can't be in time any more never can again: it falls back to its arrival.
        while self._by_deadline and not self._is_feasible(self._by_deadline[0][2], now):
            heapq.heappop(self._by_deadline)
        while self._by_arrival and self._by_arrival[0][1] not in self._live:
            heapq.heappop(self._by_arrival)
        urgent: dict[Sequence, None] = {}
        for *_, seq in _ascending(self._by_deadline):
            if self._is_feasible(seq, now):
                urgent[seq] = None
                yield seq
        for _, seq in _ascending(self._by_arrival):
            if seq in self._live and seq not in urgent:
                yield seq

    def check_invariants(self) -> None:
        """Verify that the heaps hold all requests and not many more.

        Raises:
            AssertionError: They don't.
        """
        queued = {seq for _, seq in self._by_arrival}
        if not queued.issuperset(self._live):
            raise AssertionError("a queued request is in no heap")
        entries = max(len(self._by_arrival), len(self._by_deadline))
        if entries > 2 * len(self._live) + MAX_TOMBSTONES:
            raise AssertionError(f"{entries} entries for {len(self._live)} requests")
        num_tokens = sum(seq.num_tokens for seq in self._live)
        if num_tokens != self.num_tokens:
            raise AssertionError(f"{num_tokens} tokens are queued, counted {self.num_tokens}")

    def _is_feasible(self, seq: Sequence, now: float) -> bool:
        return seq in self._live and seq.latest_start >= now

    def _sweep(self) -> None:
        """Drop the tombstones before they outnumber the living; constant cost per request."""
        self._by_arrival = [(seq.arrival, seq) for seq in self._live]
        self._by_deadline = [entry for entry in self._by_deadline if entry[2] in self._live]
        heapq.heapify(self._by_arrival)
        heapq.heapify(self._by_deadline)


class TierQueue:
    """The tenants of one tier with queued requests, and the tier's preempted requests.

    Tiers of the same value are served as one.

    Attributes:
        value: Of the tier.
        reserved_percent: Share of charged service kept for it.
        wait_window_seconds: How long its first arrival may be held; None = as the pool says.
        resumable: Preempted requests, swapped out or not, in order of their preemption.
        num_queued: Requests in the queues of its tenants.
        first_wait_at: When its queues were last empty; None while they are.
        first_latest_start: The least `latest_start` of what has arrived since then, if it had a
            deadline; infinite else.
    """

    def __init__(self, rules: tuple[TierRule, ...]) -> None:
        """Start empty.

        Args:
            rules: Of the tiers of one value, at least one.
        """
        windows = [r.wait_window_seconds for r in rules if r.wait_window_seconds is not None]
        self.value = rules[0].value
        self.reserved_percent = sum(rule.reserved_share_percent for rule in rules)
        self.wait_window_seconds = min(windows, default=None)
        self.resumable: dict[Sequence, None] = {}
        self.num_queued = 0
        self.first_wait_at: float | None = None
        self.first_latest_start = inf
        self._heap: list[tuple[bool, float, str, Tenant]] = []

    @property
    def has_work(self) -> bool:
        """Whether anything waits in the tier."""
        return self.num_queued > 0 or bool(self.resumable)

    def note_arrival(self, seq: Sequence, now: float) -> None:
        """Count a request that joins the queue of one of the tenants."""
        if not self.num_queued:
            self.first_wait_at = now
        if seq.deadline is not None:
            self.first_latest_start = min(self.first_latest_start, seq.latest_start)
        self.num_queued += 1

    def note_departure(self, count: int = 1) -> None:
        """Count requests that left the queues."""
        self.num_queued -= count
        if not self.num_queued:
            self.first_wait_at = None
            self.first_latest_start = inf

    def list_tenant(self, tenant: "Tenant") -> None:
        """Put a tenant in its place, or in its new place after its key has fallen."""
        tenant.listed_key = tenant.key
        heapq.heappush(self._heap, (*tenant.listed_key, tenant.name, tenant))
        if len(self._heap) > MAX_TOMBSTONES + 4 * self.num_queued:
            self._sweep()

    def pop_tenant(self) -> "Tenant | None":
        """Take out the tenant that is served next, or None."""
        while self._heap:
            is_spare, counter, _, tenant = heapq.heappop(self._heap)
            if (is_spare, counter) != tenant.listed_key:
                continue  # it stands elsewhere, or nowhere
            if tenant.key > tenant.listed_key:
                self.list_tenant(tenant)  # its counter has grown since
                continue
            tenant.listed_key = None
            return tenant
        return None

    def _sweep(self) -> None:
        listed = {entry[3].name: entry[3] for entry in self._heap if entry[3].listed_key}
        self._heap = [(*t.listed_key, t.name, t) for t in listed.values() if t.listed_key]
        heapq.heapify(self._heap)


def _ascending(heap: list[_Entry]) -> Iterator[_Entry]:
    """Yield the entries of a heap in order, at logarithmic cost each, and leave it as it is."""
    frontier = [(heap[0], 0)] if heap else []
    while frontier:
        entry, index = heapq.heappop(frontier)
        yield entry
        for child in (2 * index + 1, 2 * index + 2):
            if child < len(heap):
                heapq.heappush(frontier, (heap[child], child))
