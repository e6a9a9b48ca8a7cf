"""Where requests stand: what they wait for, behind how many of their own, and for how long.

And where one would begin that has yet to come: behind what the prefix cache has of its prompt.
"""

import enum
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from math import ceil
from typing import NamedTuple, Protocol

from tidegate_engine.core.books import Books
from tidegate_engine.core.decisions import Reason
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.request import Request
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_engine.core.tenants import Tenant
from tidegate_engine.core.ttft import TtftForecast

_PREDICTED_AT = 4
"""Places in a line whose waits are predicted: each takes a look at all tenants of the tier."""


class Wait(enum.StrEnum):
    """What a request waits for."""

    SLOT = "slot"
    KV = "kv"
    QUOTA = "quota"
    TIER = "tier"
    TURN = "turn"
    HOLD = "hold"


_WAITS = {
    Reason.NO_SLOT: Wait.SLOT,
    Reason.ITL_TARGET: Wait.SLOT,
    Reason.PARTIAL_PREFILLS: Wait.SLOT,
    Reason.NO_BLOCKS: Wait.KV,
    Reason.WATERMARK: Wait.KV,
    Reason.PREDICTED_PEAK: Wait.KV,
    Reason.NOT_RESUMABLE: Wait.KV,
    Reason.AT_CAP: Wait.QUOTA,
}


class Standing(NamedTuple):
    """Where one live request stands.

    Attributes:
        tier: In which it is served.
        queued_at: When it arrived, on the scheduler's clock.
        position: Among its tenant's waiting requests of the tier, 1 = next; None while it runs.
        waits_for: None while it runs.
        reason: Why it was not admitted when that was last decided.
        first_token_seconds: From now to its first token, as predicted; None when that has come, or
            nothing can be said.
    """

    request_id: str
    tenant: str
    tier: str
    phase: Phase
    queued_at: float
    preemptions: int
    position: int | None = None
    waits_for: Wait | None = None
    reason: Reason | None = None
    first_token_seconds: float | None = None


class Line(NamedTuple):
    """What waits of one tenant.

    Attributes:
        length: Of all of it.
        first: Those who are served first.
    """

    length: int
    first: tuple[Standing, ...]


class StandingBook(Protocol):
    """Tells where requests stand; nothing is changed."""

    def cached_tokens(self, request: Request) -> int:
        """Return how many tokens of its prompt a request that came now would find computed."""
        ...

    def of(self, request_ids: Iterable[str], now: float) -> tuple[Standing, ...]:
        """Return where the live ones of these requests stand."""
        ...

    def line(self, tenant: str, now: float, *, most: int) -> Line:
        """Return where the waiting requests of a tenant stand, `most` of each tier."""
        ...


class Standings:
    """The book on a `Scheduler`."""

    def __init__(
        self,
        books: Books,
        *,
        live: Mapping[str, Sequence],
        ttft: TtftForecast,
        limits: EngineLimits,
    ) -> None:
        """Read the scheduler's own state.

        Args:
            books: What decisions are taken from.
            live: All requests.
            ttft: Predicts waits.
            limits: In force, until `obey`.
        """
        self._pool = books.memory.pool
        self._tenants = books.tenants
        self._running = books.running
        self._live = live
        self._ttft = ttft
        self._limits = limits

    def obey(self, limits: EngineLimits) -> None:
        """Predict under these limits from now on."""
        self._limits = limits

    def cached_tokens(self, request: Request) -> int:
        """Return how many tokens of its prompt a request that came now would find computed.

        Keys are made no further than they are found: a prompt that isn't cached costs one.
        """
        tenant = self._tenants.declared(request.tenant)
        prompt, size = request.prompt_ids, self._pool.block_size
        if tenant is None or not prompt:
            return 0
        keys = tenant.block_keys(size)
        found = self._pool.match(
            keys.upto(prompt, number + 1, start=number)[0] for number in range(len(prompt) // size)
        )
        # The last token is computed in any case.
        return min(len(found) * size, len(prompt) - 1)

    def of(self, request_ids: Iterable[str], now: float) -> tuple[Standing, ...]:
        """Return where the live ones of these requests stand."""
        live = [self._live[name] for name in request_ids if name in self._live]
        in_batch = [seq for seq in live if seq.phase is Phase.RUNNING]
        # They have their places, and their KV is on the way there.
        arriving = [seq for seq in live if seq in self._running.arriving]
        found = [_standing(seq) for seq in in_batch]
        found += [self._waiting(seq, None, None) for seq in arriving]
        rest = dict.fromkeys(live).keys() - {*in_batch, *arriving}
        for tenant in dict.fromkeys(seq.tenant for seq in live):
            line = self._line_of(tenant, now)
            found += self._stand(line, [i for i, seq in enumerate(line) if seq in rest])
        return tuple(found)

    def line(self, tenant: str, now: float, *, most: int) -> Line:
        """Return where the waiting requests of a tenant stand, `most` of each tier."""
        own = self._tenants.own.get(tenant)
        length, first = 0, []
        for one in own.in_tiers if own is not None else ():
            line = self._line_of(one, now)
            length += len(line)
            first += self._stand(line, list(range(min(most, len(line)))))
        return Line(length, tuple(first))

    def _line_of(self, tenant: Tenant, now: float) -> list[Sequence]:
        """Return a tenant's waiting requests of one tier in the order of service."""
        resumable = self._tenants.tier_of(tenant).resumable
        return [*(seq for seq in resumable if seq.tenant is tenant), *tenant.queue.order(now)]

    def _stand(self, line: list[Sequence], places: list[int]) -> list[Standing]:
        """Describe those at some places of a line, ascending."""
        seconds = self._predict_at(line, [i for i in places if not line[i].num_output_tokens])
        return [self._waiting(line[index], index, seconds.get(index)) for index in places]

    def _predict_at(self, line: list[Sequence], places: list[int]) -> dict[int, float]:
        """Predict the waits at some places of a line, ascending; between them where there are many.

        Those at whose places they are have got no token yet.
        """
        if not places:
            return {}
        some = [*places[:: ceil(len(places) / _PREDICTED_AT)], places[-1]]
        known = {index: self._predict(line, index) for index in some}
        seconds = {}
        for index in places:
            after = bisect_left(some, index)
            left, right = some[max(0, after - 1)], some[after]
            share = (index - left) / (right - left) if right > left else 0.0
            seconds[index] = known[left] + share * (known[right] - known[left])
        return seconds

    def _predict(self, line: list[Sequence], index: int) -> float:
        seq = line[index]
        ahead = [other for other in line[:index] if not other.admission]
        return self._ttft.predict(
            seq.tenant,
            len(seq.request.prompt_ids),
            seq.max_output_tokens,
            own_ahead=(len(ahead), sum(other.num_tokens for other in ahead)),
            limits=self._limits,
        )

    def _waiting(self, seq: Sequence, index: int | None, seconds: float | None) -> Standing:
        return _standing(seq)._replace(
            position=None if index is None else index + 1,
            waits_for=self._wait_of(seq),
            reason=seq.held_for,
            first_token_seconds=seconds,
        )

    def _wait_of(self, seq: Sequence) -> Wait:
        tenant = seq.tenant
        if tenant.is_held:
            return Wait.HOLD
        if seq in self._running.arriving or seq.fence:
            return Wait.KV
        if seq.held_for in _WAITS:
            return _WAITS[seq.held_for]
        if tenant.is_parked:
            return Wait.QUOTA
        tiers = self._tenants.tiers.items()
        is_behind = any(tier.has_work for value, tier in tiers if value > tenant.tier_value)
        return Wait.TIER if is_behind else Wait.TURN


def _standing(seq: Sequence) -> Standing:
    return Standing(
        request_id=seq.request_id,
        tenant=seq.tenant.name,
        tier=seq.tenant.tier.name,
        phase=seq.phase,
        queued_at=seq.arrived_at,
        preemptions=seq.preemptions,
    )
