"""Requests that may only wait, or only take, so long: who is due."""

import heapq
from collections.abc import Iterable, Iterator

from tidegate_engine.core.plan import Expiry, ExpiryCause
from tidegate_engine.core.sequence import Phase, Sequence

_MAX_TOMBSTONES = 256

_Limit = tuple[float, int, ExpiryCause, Sequence]


class TimeLimits:
    """The time limits of live requests, the next one first.

    A request that has ended leaves a tombstone, which is dropped when it is due or when there are
    too many.
    """

    def __init__(self) -> None:
        self._heap: list[_Limit] = []
        self._most = _MAX_TOMBSTONES

    def watch(self, seq: Sequence) -> None:
        """Note the limits that the policy in force sets for an arrival."""
        for limit in _limits(seq):
            heapq.heappush(self._heap, limit)
        if len(self._heap) > self._most:
            self._put(limit for limit in self._heap if _is_pending(*limit[2:]))

    def obey(self, live: Iterable[Sequence]) -> None:
        """Hold all requests to the limits that the policy in force sets, and to no others."""
        self._put(limit for seq in live for limit in _limits(seq))

    def pop_due(self, now: float) -> list[tuple[Sequence, Expiry]]:
        """Take out the requests whose limit is reached, in order."""
        due: list[tuple[Sequence, Expiry]] = []
        named: set[str] = set()
        while self._heap and self._heap[0][0] <= now:
            *_, cause, seq = heapq.heappop(self._heap)
            if _is_pending(cause, seq) and seq.request_id not in named:
                named.add(seq.request_id)
                due.append((seq, Expiry(seq.request_id, cause)))
        return due

    @property
    def next_at(self) -> float | None:
        """When the next limit is reached; None = there is none."""
        while self._heap and not _is_pending(*self._heap[0][2:]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _put(self, limits: Iterable[_Limit]) -> None:
        """Have these in place of all before."""
        self._heap = list(limits)
        heapq.heapify(self._heap)
        self._most = 2 * len(self._heap) + _MAX_TOMBSTONES


def _limits(seq: Sequence) -> Iterator[_Limit]:
    service = seq.tenant.rule.service
    for seconds, cause in (
        (service.queue_timeout_seconds, ExpiryCause.QUEUE_TIMEOUT),
        (service.request_timeout_seconds, ExpiryCause.REQUEST_TIMEOUT),
    ):
        if seconds is not None:
            yield seq.arrived_at + seconds, seq.arrival, cause, seq


def _is_pending(cause: ExpiryCause, seq: Sequence) -> bool:
    if cause is ExpiryCause.QUEUE_TIMEOUT:
        return seq.phase is Phase.WAITING and not seq.admission
    return seq.phase is not Phase.ENDED
