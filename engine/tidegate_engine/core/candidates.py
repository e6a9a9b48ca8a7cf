"""The order in which the waiting requests of a tier are looked at in one step."""

from collections import Counter
from collections.abc import Iterable

from tidegate_engine.core.decisions import Reason
from tidegate_engine.core.kv_gate import OPEN
from tidegate_engine.core.queues import TierQueue
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.tenant_table import TenantTable
from tidegate_engine.core.tenants import Tenant

MAX_BACKFILL = 8
"""Requests looked at behind a blocked head, and let past it before it may wait no longer."""


class Candidates:
    """The waiting requests of one tier in the order of service, for one step."""

    def __init__(
        self,
        tier: TierQueue,
        tenants: TenantTable,
        now: float,
        *,
        resumable: Iterable[Sequence],
        is_held: bool,
    ) -> None:
        """Begin with the preempted requests, those of the least served tenant first.

        Args:
            tier: Whose.
            tenants: Where tenants get their places back.
            resumable: The preempted requests that may be looked at.
            now: On the scheduler's clock.
            is_held: Whether the requests that were never admitted wait for a batch to fill.
        """
        self._tier = tier
        self._tenants = tenants
        self._now = now
        self._is_held = is_held
        self._resumable = iter(
            sorted(resumable, key=lambda s: (s.tenant.key, s.tenant.name, s.arrival))
        )
        self._tenant: Tenant | None = None
        self._seq: Sequence | None = None
        self._aside: list[Tenant] = []
        self._at_cap: Counter[Tenant] = Counter()
        self._looked_through: dict[Tenant, None] = {}

    def next(self) -> Sequence | None:
        """Return the next request, or None."""
        for seq in self._resumable:
            return seq
        if self._is_held:
            return None
        while (tenant := self._pop_tenant()) is not None:
            self._looked_through[tenant] = None
            self._seq = tenant.queue.head(self._now)
            if self._seq is not None:
                self._tenant = tenant
                return self._seq
            if self._at_cap[tenant] == len(tenant.queue):
                self._tenants.park(tenant)
        return None

    def settle(self, reason: Reason) -> None:
        """Give the tenant of the last request its place, now that it is decided about that.

        A tenant whose request is blocked comes after all others in this step. One that its own
        limit keeps out comes not at all until one of its own requests has ended, or another has
        arrived; but what is smaller than the request in question may fit.
        """
        tenant, self._tenant = self._tenant, None
        if tenant is None or self._seq is None:
            return
        if reason in OPEN:
            self._tenants.relist(tenant)
            return
        tenant.queue.set_aside(self._seq)
        if reason is not Reason.AT_CAP:
            self._aside.append(tenant)
            return
        self._at_cap[tenant] += 1
        if tenant.is_full_with(0) or self._at_cap[tenant] > MAX_BACKFILL:
            self._tenants.park(tenant)
        elif self._seq.skips < MAX_BACKFILL:  # else what the tenant gives back is for that one
            self._tenants.relist(tenant)

    def close(self) -> None:
        """Give all requests and tenants that were looked at their places back."""
        for tenant in self._looked_through:
            tenant.queue.restore()
            self._tenants.relist(tenant)

    def _pop_tenant(self) -> Tenant | None:
        tenant = self._tier.pop_tenant()
        if tenant is None and self._aside:
            for blocked in self._aside:
                self._tenants.relist(blocked)
            self._aside = []
            tenant = self._tier.pop_tenant()
        return tenant
