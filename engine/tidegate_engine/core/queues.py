"""What waits: a queue of requests per tenant, and above them a queue of tenants per tier.

Planning a step must not cost more because more requests wait. Each order therefore gives its head
in logarithmic time at most and is set right lazily: a request that has ended stays in its tenant's
orders, by arrival and by deadline, as a tombstone until it comes to the top, a tenant whose counter
has grown is put back with the new one.
"""

import heapq
from collections import deque
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

from tidegate_engine.core.sequence import Sequence
from tidegate_policies.rules import TierRule

if TYPE_CHECKING:
    from tidegate_engine.core.tenants import Tenant

MAX_TOMBSTONES = 64
"""Entries without a waiting request that a queue may hold beyond as many as it has with one."""


class RequestQueue:
    """The requests of one tenant that were never admitted.

    Those that can still meet their deadline come first, the earliest deadline at the head; then all
    others by arrival. Without deadlines that is by arrival. Arrivals only grow and nobody comes
    back, so that the order of arrival needs no heap.

    Attributes:
        num_tokens: Prompt tokens of all of them.
        num_output_tokens: Output tokens that they ask for at most, all together.
    """

    __slots__ = (
        "_aside",
        "_by_arrival",
        "_by_deadline",
        "_live",
        "num_output_tokens",
        "num_tokens",
    )

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_output_tokens = 0
        self._live: dict[Sequence, None] = {}
        # Beside the dict, which looks for its first entry past all that were deleted before it.
        self._by_arrival: deque[Sequence] = deque()
        self._by_deadline: list[tuple[float, int, Sequence]] = []
        self._aside: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the requests by arrival."""
        return iter(self._live)

    def __contains__(self, seq: object) -> bool:
        return seq in self._live

    def push(self, seq: Sequence) -> None:
        """Queue a request."""
        self._live[seq] = None
        self._by_arrival.append(seq)
        self.num_tokens += seq.num_tokens
        self.num_output_tokens += seq.request.max_output_tokens
        if seq.deadline is not None:
            heapq.heappush(self._by_deadline, (seq.deadline, seq.arrival, seq))

    def remove(self, seq: Sequence) -> None:
        """Take a request out, wherever it stands."""
        del self._live[seq]
        self.num_tokens -= seq.num_tokens
        self.num_output_tokens -= seq.request.max_output_tokens
        # Before the tombstones outnumber the living; constant cost per request.
        most = 2 * len(self._live) + MAX_TOMBSTONES
        if len(self._by_arrival) > most:
            self._by_arrival = deque(self._live)
        if len(self._by_deadline) > most:
            self._by_deadline = [entry for entry in self._by_deadline if entry[2] in self._live]
            heapq.heapify(self._by_deadline)

    def head(self, now: float) -> Sequence | None:
        """Return who is served next, of those that aren't set aside."""
        while self._by_deadline:
            seq = self._by_deadline[0][2]
            if seq in self._live and seq.latest_start >= now:
                return seq
            # What can't be in time any more never can again: it falls back to its arrival.
            heapq.heappop(self._by_deadline)
        while self._by_arrival and self._by_arrival[0] not in self._live:
            self._by_arrival.popleft()
        waiting = (seq for seq in self._by_arrival if seq in self._live)
        return next((seq for seq in waiting if seq not in self._aside), None)

    def order(self, now: float) -> list[Sequence]:
        """Return the requests in the order in which they would be served from now on."""
        in_time = [s for s in self._live if s.deadline is not None and s.latest_start >= now]
        in_time.sort(key=lambda s: (s.deadline or 0.0, s.arrival))
        first = dict.fromkeys(in_time)
        return [*in_time, *(seq for seq in self._live if seq not in first)]

    def ahead_of(self, deadline: float | None) -> tuple[int, int]:
        """Return how many are served before an arrival with this deadline, and their tokens."""
        if deadline is None:
            return len(self._live), self.num_tokens
        ahead = [seq for due, _, seq in self._by_deadline if due <= deadline and seq in self._live]
        return len(ahead), sum(seq.num_tokens for seq in ahead)

    def set_aside(self, seq: Sequence) -> None:
        """Look past the head, until `restore`."""
        self._aside[seq] = None
        if self._by_deadline and self._by_deadline[0][2] is seq:
            heapq.heappop(self._by_deadline)

    def restore(self) -> None:
        """Put everybody who was set aside back into their place."""
        for seq in self._aside:
            if seq.deadline is not None and seq in self._live:
                heapq.heappush(self._by_deadline, (seq.deadline, seq.arrival, seq))
        self._aside = {}

    def check_invariants(self) -> None:
        """Verify that the orders hold everybody once, and not many more.

        Raises:
            AssertionError: It doesn't.
        """
        if self._aside:
            raise AssertionError(f"{len(self._aside)} requests were not restored")
        if [seq for seq in self._by_arrival if seq in self._live] != [*self._live]:
            raise AssertionError("the order of arrival lacks a request, or has one twice")
        for order in (self._by_arrival, self._by_deadline):
            if len(order) > 2 * len(self._live) + MAX_TOMBSTONES:
                raise AssertionError(f"{len(order)} entries for {len(self)} requests")
        if len({id(entry[2]) for entry in self._by_deadline}) != len(self._by_deadline):
            raise AssertionError("a request is queued twice by its deadline")
        num_tokens = sum(seq.num_tokens for seq in self._live)
        num_output_tokens = sum(seq.request.max_output_tokens for seq in self._live)
        if (num_tokens, num_output_tokens) != (self.num_tokens, self.num_output_tokens):
            raise AssertionError(f"{num_tokens} tokens are queued, counted {self.num_tokens}")


class TierQueue:
    """The tenants of one tier with queued requests, and the tier's preempted requests.

    Tiers of the same value are served as one.

    Attributes:
        value: Of the tier.
        reserved_percent: Share of charged service kept for it.
        wait_window_seconds: How long its first arrival may be held; None = as the pool says.
        resumable: Preempted requests, swapped out or not, in order of their preemption.
        num_queued: Requests in the queues of its tenants.
        num_tokens: Prompt tokens of those.
        first_wait_at: When the first came of those that were queued since its queues were last
            empty; None while they are.
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
        self.num_tokens = 0
        self.first_wait_at: float | None = None
        self.first_latest_start = inf
        self._heap: list[tuple[bool, float, str, Tenant]] = []

    @property
    def has_work(self) -> bool:
        """Whether anything waits in the tier."""
        return self.num_queued > 0 or bool(self.resumable)

    def note_arrival(self, seq: Sequence) -> None:
        """Count a request that joins the queue of one of the tenants."""
        first = inf if self.first_wait_at is None else self.first_wait_at
        self.first_wait_at = min(first, seq.arrived_at)
        if seq.deadline is not None:
            self.first_latest_start = min(self.first_latest_start, seq.latest_start)
        self.num_queued += 1
        self.num_tokens += seq.num_tokens

    def note_departure(self, seq: Sequence) -> None:
        """Count a request that left the queues."""
        self.num_queued -= 1
        self.num_tokens -= seq.num_tokens
        if not self.num_queued:
            self.first_wait_at = None
            self.first_latest_start = inf

    def end_wait(self) -> None:
        """Hold nobody any more who is queued now."""
        self.first_wait_at = -inf

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

    def listed(self) -> list["Tenant"]:
        """Return the tenants that stand in the tier's order, in no order."""
        by_name = {entry[3].name: entry[3] for entry in self._heap if entry[3].listed_key}
        return list(by_name.values())

    def _sweep(self) -> None:
        self._heap = [(*t.listed_key, t.name, t) for t in self.listed() if t.listed_key]
        heapq.heapify(self._heap)
