"""Requests that may only wait, or only take, so long: who is due."""

import heapq

from tidegate_engine.core.plan import Expiry, ExpiryCause
from tidegate_engine.core.sequence import Phase, Sequence

_MAX_TOMBSTONES = 256


class TimeLimits:
    """The time limits of live requests, the next one first.

    A request that has ended leaves a tombstone, which is dropped when it is due or when there are
    too many.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ExpiryCause, Sequence]] = []
        self._most = _MAX_TOMBSTONES

    def watch(self, seq: Sequence) -> None:
        """Note the limits that the policy in force sets for an arrival."""
        service = seq.tenant.rule.service
        for seconds, cause in (
            (service.queue_timeout_seconds, ExpiryCause.QUEUE_TIMEOUT),
            (service.request_timeout_seconds, ExpiryCause.REQUEST_TIMEOUT),
        ):
            if seconds is not None:
                entry = (seq.arrived_at + seconds, seq.arrival, cause, seq)
                heapq.heappush(self._heap, entry)
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if _is_pending(entry[2], entry[3])]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + _MAX_TOMBSTONES

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


def _is_pending(cause: ExpiryCause, seq: Sequence) -> bool:
    if cause is ExpiryCause.QUEUE_TIMEOUT:
        return seq.phase is Phase.WAITING and not seq.admission
    return seq.phase is not Phase.ENDED
