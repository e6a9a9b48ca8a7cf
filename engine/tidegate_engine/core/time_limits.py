"""Requests that may only wait, or only take, so long: who is due."""

import heapq
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from tidegate_engine.core.plan import Expiry, ExpiryCause
from tidegate_engine.core.sequence import Phase, Sequence

_MAX_TOMBSTONES = 256

_Limit = tuple[float, int, ExpiryCause, Sequence]


@dataclass(slots=True)
class _Choices:
    """The requests of one generation.

    Attributes:
        live: Those that haven't ended.
        is_past_queue: Whether one that has ended was admitted before.
    """

    live: dict[Sequence, None] = field(default_factory=dict)
    is_past_queue: bool = False


class TimeLimits:
    """The time limits of live requests, the next one first.

    A request that has ended leaves a tombstone, which is dropped when it is due or when there are
    too many.
    """

    def __init__(self) -> None:
        self._heap: list[_Limit] = []
        self._most = _MAX_TOMBSTONES
        self._generations: dict[str, _Choices] = {}

    def watch(self, seq: Sequence) -> None:
        """Note the limits that the policy in force sets for an arrival."""
        if (name := seq.request.generation_id) is not None:
            self._generations.setdefault(name, _Choices()).live[seq] = None
        for limit in _limits(seq):
            heapq.heappush(self._heap, limit)
        if len(self._heap) > self._most:
            self._put(limit for limit in self._heap if self._is_pending(*limit[2:]))

    def forget(self, seq: Sequence) -> None:
        """Note the end of a request."""
        if (name := seq.request.generation_id) is None:
            return
        choices = self._generations[name]
        choices.is_past_queue |= seq.admission > 0
        del choices.live[seq]
        if not choices.live:
            del self._generations[name]

    def obey(self, live: Iterable[Sequence]) -> None:
        """Hold all requests to the limits that the policy in force sets, and to no others."""
        self._put(limit for seq in live for limit in _limits(seq))

    def pop_due(self, now: float) -> list[tuple[Sequence, Expiry]]:
        """Take out the requests whose limit is reached, in order."""
        due: list[tuple[Sequence, Expiry]] = []
        named: set[str] = set()
        while self._heap and self._heap[0][0] <= now:
            *_, cause, seq = heapq.heappop(self._heap)
            if self._is_pending(cause, seq) and seq.request_id not in named:
                named.add(seq.request_id)
                due.append((seq, Expiry(seq.request_id, cause)))
        return due

    @property
    def next_at(self) -> float | None:
        """When the next limit is reached; None = there is none."""
        while self._heap and not self._is_pending(*self._heap[0][2:]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def check_invariants(self, live: Collection[Sequence]) -> None:
        """Verify that the generations are those of the live requests.

        Raises:
            AssertionError: They aren't.
        """
        known = {seq for choices in self._generations.values() for seq in choices.live}
        if known != {seq for seq in live if seq.request.generation_id is not None}:
            raise AssertionError(f"{len(known)} choices are known of {len(live)} live requests")
        if not all(choices.live for choices in self._generations.values()):
            raise AssertionError("a generation has ended and is known")

    def _is_pending(self, cause: ExpiryCause, seq: Sequence) -> bool:
        if cause is ExpiryCause.QUEUE_TIMEOUT:
            is_waiting = seq.phase is Phase.WAITING and not seq.admission
            return is_waiting and not self._is_past_queue(seq)
        return seq.phase is not Phase.ENDED

    def _is_past_queue(self, seq: Sequence) -> bool:
        """Tell whether another choice of a live request's generation was ever admitted."""
        if (name := seq.request.generation_id) is None:
            return False
        choices = self._generations[name]
        return choices.is_past_queue or any(other.admission for other in choices.live)

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
