"""The scheduler's book on each tenant: its rule in force, its queue, its counters."""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

from tidegate_engine.core.kv_memory import KvMemory
from tidegate_engine.core.request import TenantStats
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_policies.fairness import Group, VirtualTokenCounters
from tidegate_policies.snapshot import (
    UNKNOWN_TENANT,
    PolicySnapshot,
    TenantRule,
    UnknownAction,
)

MAX_TOMBSTONES = 64
"""Ended requests that a queue may hold beyond as many as it has waiting ones."""


@dataclass(slots=True)
class TenantTotals:
    """What has grown since the scheduler's start; the fields are those of `TenantStats`."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    service: float = 0.0
    preempted: int = 0
    cancelled: int = 0
    finished: int = 0


@dataclass(eq=False, slots=True, kw_only=True)
class Tenant:
    """One tenant in this engine.

    Attributes:
        tier_value: Value of its tier in force.
        is_declared: False once the policy in force doesn't name it any more; its requests finish
            under the last rule.
        max_running: Most of its requests in the batch; None = no limit of its own.
        queue: Heap of (arrival, sequence); ended ones stay until they come to the top.
        waiting: Live requests in `queue`.
        running: Requests in the batch.
    """

    rule: TenantRule
    tier_value: int
    is_declared: bool = True
    max_running: int | None = None
    queue: list[tuple[int, Sequence]] = field(default_factory=list)
    waiting: int = 0
    running: int = 0
    totals: TenantTotals = field(default_factory=TenantTotals)

    @property
    def name(self) -> str:
        """Identity in engines and metrics."""
        return self.rule.tenant

    @property
    def is_active(self) -> bool:
        """Whether it has a request queued or running."""
        return self.waiting > 0 or self.running > 0

    @property
    def group(self) -> Group:
        """With whom its counter is compared."""
        return self.tier_value, self.rule.weight == 0

    @property
    def is_full(self) -> bool:
        """Whether its own limit keeps further requests out of the batch."""
        return self.max_running is not None and self.running >= self.max_running

    def push(self, seq: Sequence) -> None:
        """Queue a request by its arrival."""
        heapq.heappush(self.queue, (seq.arrival, seq))
        self.waiting += 1

    def head(self) -> Sequence | None:
        """Return the oldest waiting request."""
        while self.queue and self.queue[0][1].phase is not Phase.WAITING:
            heapq.heappop(self.queue)
        return self.queue[0][1] if self.queue else None

    def forget_waiting(self) -> None:
        """Take out a waiting request that has just ended, wherever it is in the queue."""
        self.waiting -= 1
        self._sweep()

    def pop(self) -> Sequence:
        """Take the oldest waiting request out; there must be one."""
        seq = heapq.heappop(self.queue)[1]
        self.waiting -= 1
        self._sweep()
        return seq

    def _sweep(self) -> None:
        """Drop the ended requests from the queue before they outnumber the living.

        They come to the top only in a tenant that is served.
        """
        if len(self.queue) > 2 * self.waiting + MAX_TOMBSTONES:
            self.queue = [entry for entry in self.queue if entry[1].phase is Phase.WAITING]
            heapq.heapify(self.queue)


class TenantTable:
    """All tenants that the policy names or that still have work, with their fairness."""

    def __init__(self) -> None:
        self.counters = VirtualTokenCounters()
        self._tenants: dict[str, Tenant] = {}

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def __getitem__(self, name: str) -> Tenant:
        return self._tenants[name]

    def names(self) -> Iterable[str]:
        """Return all tenants' names."""
        return self._tenants

    def declared(self, name: str) -> Tenant | None:
        """Return the tenant if the policy in force lets its requests in."""
        tenant = self._tenants.get(name)
        return tenant if tenant is not None and tenant.is_declared else None

    def in_order(self) -> list[Tenant]:
        """Return the tenants with waiting requests, the one to serve first at the head.

        Strict by tier; inside a tier by virtual counter, those of weight 0 last; ties by name.
        """
        return sorted((t for t in self if t.waiting), key=self._served_first)

    def _served_first(self, tenant: Tenant) -> tuple[int, bool, float, str]:
        tier_value, is_spare = tenant.group
        return -tier_value, is_spare, self.counters.value(tenant.name), tenant.name

    def charge(self, tenant: Tenant, cost: float) -> None:
        """Charge service to `tenant` at the weight in force."""
        self.counters.charge(tenant.name, cost, weight=tenant.rule.weight)
        tenant.totals.service += cost

    def activate(self, tenant: Tenant) -> None:
        """Lift the counter of a tenant about to get its first live request."""
        if not tenant.is_active:
            self.counters.join(tenant.name, tenant.group, backlogged=self._peers(tenant))

    def settle(self, tenant: Tenant) -> None:
        """Note that a request of `tenant` has ended."""
        if tenant.is_active:
            return
        self.counters.leave(tenant.name, tenant.group)
        if not tenant.is_declared:
            self._drop(tenant)

    def stats(self, memory: KvMemory) -> dict[str, TenantStats]:
        """Return every tenant's numbers, by name."""
        return {
            tenant.name: TenantStats(
                running=tenant.running,
                waiting=tenant.waiting,
                kv_used_blocks=memory.used_blocks(tenant.name),
                virtual_counter=self.counters.value(tenant.name),
                **asdict(tenant.totals),
            )
            for tenant in self
        }

    def apply_policy(self, snapshot: PolicySnapshot) -> None:
        """Put `snapshot` in force. Weights count from the next charge on."""
        declared = {rule.tenant: rule for rule in _rules(snapshot)}
        for name, rule in declared.items():
            self._declare(name, rule, tier_value=snapshot.tier_values[rule.tier])
        if UNKNOWN_TENANT in declared:
            self._tenants[UNKNOWN_TENANT].max_running = snapshot.unknown_tenants.max_running
        for tenant in [t for t in self if t.name not in declared]:
            tenant.is_declared = False
            if not tenant.is_active:
                self._drop(tenant)

    def _declare(self, name: str, rule: TenantRule, *, tier_value: int) -> None:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._tenants[name] = Tenant(rule=rule, tier_value=tier_value)
            return
        group = tenant.group
        tenant.rule, tenant.tier_value, tenant.is_declared = rule, tier_value, True
        if tenant.group != group:
            if tenant.is_active:
                self.counters.leave(name, group)
            self.counters.move(name, tenant.group, backlogged=self._peers(tenant))

    def _drop(self, tenant: Tenant) -> None:
        del self._tenants[tenant.name]
        self.counters.forget(tenant.name)

    def _peers(self, tenant: Tenant) -> Iterable[str]:
        """Return who competes with `tenant`; not those whom their own limit keeps out."""
        return [t.name for t in self if t.is_active and t.group == tenant.group and not t.is_full]


def _rules(snapshot: PolicySnapshot) -> Iterator[TenantRule]:
    """Yield the rule of every tenant whose requests are let in, the unknown ones included."""
    yield from snapshot.tenants
    unknown = snapshot.unknown_tenants
    if unknown.action is UnknownAction.ADMIT:
        yield TenantRule(tenant=UNKNOWN_TENANT, policy="", tier=unknown.tier, weight=unknown.weight)
