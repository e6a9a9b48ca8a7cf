"""Which arrivals are refused because there is too much work: shed, rather than served too late.

A request is judged by its own target or its tenant's, whichever is earlier, and at its arrival
alone: what was let in is served.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

from tidegate_engine.core.books import Books
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.request import Rejection, RejectionCode, Request
from tidegate_engine.core.tenants import Tenant
from tidegate_engine.core.ttft import TtftForecast

_LASTING = 2.0
"""An overload is expected to go on for so many times as long as it has lasted."""

_CALM_SECONDS = 10.0
"""Whose arrivals are let in, and were for so long, has no overload any more."""

_FORGOTTEN_SECONDS = 60.0
"""Nor has who was not refused for so long, let in or not."""


@dataclass(slots=True, kw_only=True)
class Spell:
    """A time in which a tenant's arrivals are refused, some or all.

    Attributes:
        began_at: When the first was.
        last_at: When the last was.
    """

    began_at: float
    last_at: float


class Overload:
    """Predicts who would be served too late.

    Attributes:
        ttft: What it judges by.
    """

    def __init__(self, books: Books) -> None:
        """Read the scheduler's own state; nothing is changed."""
        self._memory = books.memory
        self._tenants = books.tenants
        self.ttft = TtftForecast(books)
        self._longest_miss: float | None = None
        self._spells: dict[str, Spell] = {}

    def begin_step(self) -> None:
        """Judge anew: what runs and waits has changed."""
        self._longest_miss = None
        self.ttft.begin_step()

    def refuse(
        self, request: Request, tenant: Tenant, *, limits: EngineLimits, now: float
    ) -> Rejection | None:
        """Tell why an arrival is shed, or None."""
        wanted, target = ttft_target(request, tenant), _shed_target(request, tenant)
        sheds = tenant.rule.service.sheds and not self._is_owed(request, tenant)
        came_at = request.came_at(now)
        if sheds and wanted is not None and target is not None:
            predicted = self.ttft.predict(
                tenant,
                len(request.prompt_ids),
                request.max_output_tokens,
                own_ahead=tenant.queue.ahead_of(came_at + wanted),
                limits=limits,
            )
            in_all = now - came_at + predicted
            if in_all > target:
                return _shed(
                    f"the first token is expected after {in_all:.1f} s, the target is {target:g} s",
                    self._wait(tenant, predicted, now),
                )
        if tenant.tier_value < 0 and (excess := self._miss_of_others(limits)) > 0:
            why = "requests of higher tiers are expected to miss their targets"
            return _shed(why, self._wait(tenant, excess, now))
        self._note_calm(tenant, now)
        return None

    def _wait(self, tenant: Tenant, predicted: float, now: float) -> float:
        """Return after how many seconds a retry may succeed.

        What waits now will have been served then; and the overload, of which nobody knows when it
        ends, may be over: one that has lasted for long seldom ends soon. Were all told to come back
        when the queue is down, they would meet those who come for the first time.
        """
        spell = self._spells.get(tenant.name)
        if spell is None or now - spell.last_at > _FORGOTTEN_SECONDS:
            self._spells = {
                name: other
                for name, other in self._spells.items()
                if now - other.last_at <= _FORGOTTEN_SECONDS
            }
            spell = self._spells[tenant.name] = Spell(began_at=now, last_at=now)
        spell.last_at = now
        return predicted + _LASTING * (now - spell.began_at)

    def _note_calm(self, tenant: Tenant, now: float) -> None:
        """Note that an arrival is let in."""
        spell = self._spells.get(tenant.name)
        if spell is not None and now - spell.last_at >= _CALM_SECONDS:
            del self._spells[tenant.name]

    def _is_owed(self, request: Request, tenant: Tenant) -> bool:
        """Tell whether others borrow what would be its own: that is reclaimed, not refused."""
        ledger, pool = self._memory.ledger, self._memory.pool
        blocks = pool.blocks_for(tenant.queued_tokens + len(request.prompt_ids))
        return ledger.has_borrowers and ledger.fits_nominal(tenant.name, blocks)

    def _miss_of_others(self, limits: EngineLimits) -> float:
        """Return by how much tenants of tiers from 0 up are expected to miss their targets.

        What their own limits make them wait, nobody else's leaving helps.
        """
        if self._longest_miss is None:
            misses = [
                self.ttft.predict_of_engine(
                    tenant, 0, 1, own_ahead=tenant.queue.ahead_of(None), limits=limits
                )
                - target
                for tenant in self._may_miss_most()
                if (target := tenant.rule.service.ttft_seconds) is not None
            ]
            self._longest_miss = max(misses, default=0.0)
        return self._longest_miss

    def _may_miss_most(self) -> Iterator[Tenant]:
        """Yield those of tiers from 0 up of whom one has the longest miss of all."""
        for value, tier in self._tenants.tiers.items():
            if value >= 0:
                yield from self._late_and_tight(tier.listed())

    def _late_and_tight(self, waiting: Iterable[Tenant]) -> Iterator[Tenant]:
        """Yield those of one tier after whom nobody comes who has as tight a target.

        Whoever comes later in turn waits longer, so that nobody else can miss by more.
        """
        tightest = inf
        for tenant in sorted(waiting, key=self.ttft.turn_of, reverse=True):
            target = tenant.rule.service.ttft_seconds
            if target is not None and target < tightest:
                tightest = target
                yield tenant


def ttft_target(request: Request, tenant: Tenant) -> float | None:
    """Return the seconds after which the first token of a request is due; None = whenever."""
    own, ruled = request.ttft_seconds, tenant.rule.service.ttft_seconds
    return ruled if own is None else own


def _shed_target(request: Request, tenant: Tenant) -> float | None:
    """Return the seconds within which the first token has to be expected; None = whenever.

    A client may want it earlier than its tenant's policy says; that it would wait for longer
    doesn't switch the policy off.
    """
    targets = (request.ttft_seconds, tenant.rule.service.ttft_seconds)
    return min((target for target in targets if target is not None), default=None)


def _shed(why: str, wait_seconds: float) -> Rejection:
    return Rejection(code=RejectionCode.SHED, message=why, retry_after_seconds=wait_seconds)
