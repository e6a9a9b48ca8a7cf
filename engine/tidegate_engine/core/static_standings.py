"""Where the requests of static batching stand: all in one line, for a place in the next batch."""

from collections.abc import Callable, Iterable
from itertools import islice

from tidegate_engine.core.padded_batch import Member
from tidegate_engine.core.request import Request
from tidegate_engine.core.sequence import Phase
from tidegate_engine.core.standings import Line, Standing, Wait


class StaticStandings:
    """The book on a `StaticScheduler`, which knows no tiers and predicts nothing."""

    def __init__(self, *, waiting: Callable[[], Iterable[Member]], batch: Iterable[Member]) -> None:
        """Read what waits, and what is in the batch."""
        self._waiting = waiting
        self._batch = batch

    def cached_tokens(self, request: Request) -> int:  # noqa: ARG002
        """Return 0: nothing is kept of a prompt for another one."""
        return 0

    def of(self, request_ids: Iterable[str], now: float) -> tuple[Standing, ...]:  # noqa: ARG002
        """Return where the live ones of these requests stand."""
        wanted = frozenset(request_ids)
        running = (member for member in self._batch if not member.has_ended)
        chosen = [_standing(m, Phase.RUNNING) for m in running if m.request_id in wanted]
        tenants = dict.fromkeys(m.tenant for m in self._waiting() if m.request_id in wanted)
        lines = [standing for tenant in tenants for standing in self._line_of(tenant)]
        return (*chosen, *(one for one in lines if one.request_id in wanted))

    def line(self, tenant: str, now: float, *, most: int) -> Line:  # noqa: ARG002
        """Return where the waiting requests of a tenant stand."""
        line = self._line_of(tenant)
        return Line(len(line), tuple(islice(line, most)))

    def _line_of(self, tenant: str) -> list[Standing]:
        own = sorted((m for m in self._waiting() if m.tenant == tenant), key=lambda m: m.arrival)
        return [
            _standing(member, Phase.WAITING)._replace(position=place, waits_for=Wait.SLOT)
            for place, member in enumerate(own, 1)
        ]


def _standing(member: Member, phase: Phase) -> Standing:
    return Standing(
        request_id=member.request_id,
        tenant=member.tenant,
        tier="",
        phase=phase,
        queued_at=member.submitted_at,
        preemptions=0,
    )
