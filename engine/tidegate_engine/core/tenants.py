"""The scheduler's book on each tenant: its rule in force, its queue, its counters."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from tidegate_engine.core.prefix_cache import root_key
from tidegate_engine.core.queues import RequestQueue, TierQueue
from tidegate_engine.core.request import PreemptionKey
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_policies.fairness import (
    OUTPUT_TOKEN_COST,
    PROMPT_TOKEN_COST,
    Group,
    VirtualTokenCounters,
)
from tidegate_policies.snapshot import (
    UNKNOWN_TENANT,
    PolicySnapshot,
    StopPolicy,
    TenantRule,
    TierRule,
    UnknownAction,
)


@dataclass(slots=True)
class TenantTotals:
    """What has grown since the scheduler's start; the fields are those of `TenantStats`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    cancelled: int = 0
    expired: int = 0
    finished: int = 0
    preemptions: Counter[PreemptionKey] = field(default_factory=Counter)

    def add(self, other: "TenantTotals") -> None:
        """Add what another tenant's totals are."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def service(self) -> float:
        """Charged service, in cost units."""
        return PROMPT_TOKEN_COST * self.prompt_tokens + OUTPUT_TOKEN_COST * self.output_tokens


@dataclass(eq=False, slots=True, kw_only=True)
class Tenant:
    """One tenant in this engine.

    Attributes:
        name: Identity in engines and metrics.
        rule: In force for it.
        tier: Rule of its tier in force.
        counters: Where its service is counted.
        root: What its keys in the prefix cache are chained to.
        is_declared: False once the policy in force doesn't name it any more; its requests finish
            under the last rule.
        queue: Its requests that were never admitted.
        running: Requests in the batch.
        preempted: Requests whose context has to be computed again.
        swapped: Requests whose KV is on the host, or on its way to or from there.
        arriving: Of those, the ones on their way in.
        admitted_prompt_tokens: Prompt tokens of its running requests that are not charged yet.
        committed_blocks: Worst case of its running requests that may not be preempted.
        listed_key: Its place in the queue of its tier; None = it isn't in there.
        is_parked: Whether it waits for one of its own requests to end.
        output_price: What an output token adds to its virtual counter.
    """

    name: str
    rule: TenantRule
    tier: TierRule
    counters: VirtualTokenCounters
    root: bytes
    is_declared: bool = True
    queue: RequestQueue = field(default_factory=RequestQueue)
    running: int = 0
    preempted: int = 0
    swapped: int = 0
    arriving: int = 0
    admitted_prompt_tokens: int = 0
    committed_blocks: int = 0
    listed_key: tuple[bool, float] | None = None
    is_parked: bool = False
    output_price: float = field(init=False)
    totals: TenantTotals = field(default_factory=TenantTotals)

    def __post_init__(self) -> None:
        self.obey(self.rule, self.tier)

    def obey(self, rule: TenantRule, tier: TierRule) -> None:
        """Be under these rules from now on."""
        self.rule, self.tier, self.is_declared = rule, tier, True
        self.output_price = OUTPUT_TOKEN_COST / (rule.weight or 1)

    @property
    def tier_value(self) -> int:
        """Value of its tier in force."""
        return self.tier.value

    @property
    def waiting(self) -> int:
        """Requests that are neither in the batch nor swapped out."""
        return len(self.queue) + self.preempted

    @property
    def is_preemptible(self) -> bool:
        """Whether its requests may be let in without their worst case being its own.

        Those of a tenant that isn't declared any more may: it has no nominal for them to fit in.
        """
        return self.rule.preemption.preemptible or not self.is_declared

    @property
    def is_active(self) -> bool:
        """Whether it has a request anywhere."""
        return bool(self.running or self.queue or self.preempted or self.swapped)

    @property
    def group(self) -> Group:
        """With whom its counter is compared."""
        return self.tier.value, self.rule.weight == 0

    @property
    def key(self) -> tuple[bool, float]:
        """Its place in the order of its tier: weight 0 last, then by virtual token counter.

        What was admitted counts before it is computed: or all that one step admits would go to
        the same tenant.
        """
        owed = self.admitted_prompt_tokens * PROMPT_TOKEN_COST / (self.rule.weight or 1)
        return self.rule.weight == 0, self.counters.value(self.name) + owed

    def is_full_with(self, promised: int) -> bool:
        """Tell whether its own limit keeps further requests out of the batch.

        Args:
            promised: Places that are kept for its requests.
        """
        limit = self.rule.max_running
        return limit is not None and self.running + self.arriving + promised >= limit

    @property
    def wants_service(self) -> bool:
        """Whether it stands in the queue of its tier, unless it is there already."""
        return bool(self.queue) and not self.is_parked and not self.is_held

    @property
    def is_held(self) -> bool:
        """Whether its requests queue and none is let in."""
        return self.rule.stop is StopPolicy.HOLD


class TenantTable:
    """All tenants that the policy names or that still have work, and the queues of their tiers.

    Attributes:
        gone: Totals of the tenants of whom nothing else is known any more.
        num_declared: Tenants whose requests the policy in force lets in.
    """

    def __init__(self) -> None:
        self.gone = TenantTotals()
        self.num_declared = 0
        self.counters = VirtualTokenCounters()
        self.tiers: dict[int, TierQueue] = {}
        self._tenants: dict[str, Tenant] = {}
        self._dropped: list[str] = []

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def declared(self, name: str) -> Tenant | None:
        """Return the tenant if the policy in force lets its requests in."""
        tenant = self._tenants.get(name)
        return tenant if tenant is not None and tenant.is_declared else None

    def tier_of(self, tenant: Tenant) -> TierQueue:
        """Return the queue of a tenant's tier."""
        return self.tiers[tenant.tier.value]

    def enqueue(self, seq: Sequence, now: float) -> None:
        """Queue an arrival; a tenant that becomes active by it is lifted."""
        tenant = seq.tenant
        if not tenant.is_active:
            self.counters.join(tenant.name, tenant.group)
            if tenant.is_held:
                self.counters.suspend(tenant.name, tenant.group)
        tenant.queue.push(seq)
        if not tenant.is_held:
            self.tier_of(tenant).note_arrival(seq, now)
        self.reconsider(tenant)

    def dequeue(self, seq: Sequence) -> None:
        """Take a request that was never admitted out of its queue."""
        tenant = seq.tenant
        tenant.queue.remove(seq)
        if not tenant.is_held:
            self.tier_of(tenant).note_departure(seq)
        if not tenant.queue:
            tenant.listed_key = None

    def forget_preempted(self, seq: Sequence) -> None:
        """Take a preempted request off the books, swapped out or not."""
        if seq.phase is Phase.WAITING:
            seq.tenant.preempted -= 1
        else:
            seq.tenant.swapped -= 1
        self.tier_of(seq.tenant).resumable.pop(seq, None)

    def relist(self, tenant: Tenant) -> None:
        """Give a tenant its place in its tier if it wants service and has none, or a worse one."""
        if not tenant.wants_service:
            return
        if tenant.listed_key is None or tenant.key < tenant.listed_key:
            self.tier_of(tenant).list_tenant(tenant)

    def park(self, tenant: Tenant) -> None:
        """Leave a tenant out of the order until one of its own requests has ended."""
        tenant.is_parked = True
        self.counters.suspend(tenant.name, tenant.group)

    def make_room(self, name: str) -> None:
        """Note that a tenant holds less than before: what kept it out may not any more."""
        tenant = self._tenants.get(name)
        if tenant is not None:
            self.reconsider(tenant)

    def reconsider(self, tenant: Tenant) -> None:
        """Give a tenant the place that it has now that one of its requests has left the batch."""
        if tenant.is_parked:
            tenant.is_parked = False
            self.counters.readmit(tenant.name, tenant.group)
        self.relist(tenant)

    def settle(self, tenant: Tenant, *, was_running: bool) -> None:
        """Note that a request of `tenant` has ended."""
        # One that only waited changes nothing but for a tenant that waits for its own requests.
        if was_running or tenant.is_parked:
            self.reconsider(tenant)
        if tenant.is_active:
            return
        self.counters.leave(tenant.name, tenant.group)
        if not tenant.is_declared:
            self._drop(tenant)

    def note_elsewhere(self, service: Mapping[str, float], active: Iterable[str]) -> None:
        """Count what other engines of the pool gave, and who wants service of them.

        Args:
            service: By tenant, since the last call, in cost units.
            active: Tenants with work in another engine.
        """
        for name, cost in service.items():
            tenant = self.declared(name)
            if tenant is not None:
                self.counters.charge(name, cost, weight=tenant.rule.weight)
        known = [tenant for name in active if (tenant := self.declared(name)) is not None]
        self.counters.note_elsewhere((tenant.name, tenant.group) for tenant in known)

    def take_dropped(self) -> list[str]:
        """Return whom nothing is known of any more since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def apply_policy(self, snapshot: PolicySnapshot) -> None:
        """Put `snapshot` in force. Weights count from the next charge on."""
        declared = {rule.tenant: rule for rule in _rules(snapshot)}
        tiers = {tier.name: tier for tier in snapshot.tiers}
        self.num_declared = len(declared)
        for name, rule in declared.items():
            self._declare(name, rule, tiers[rule.tier])
        for tenant in [t for t in self if t.name not in declared]:
            # Its own rule is the last it had; a tier that is still there is as it is now.
            self._put(tenant, tenant.rule, tiers.get(tenant.tier.name, tenant.tier))
            tenant.is_declared = False
            if not tenant.is_active:
                self._drop(tenant)
        self._rebuild_tiers()

    def check_invariants(self) -> None:
        """Verify queues and tiers.

        Raises:
            AssertionError: They disagree.
        """
        for value, tier in self.tiers.items():
            members = [t for t in self if t.tier.value == value]
            queued = sum(len(t.queue) for t in members if not t.is_held)
            if queued != tier.num_queued or (tier.first_wait_at is None) != (queued == 0):
                raise AssertionError(f"tier {value} counts {tier.num_queued} of {queued} requests")
            for tenant in members:
                tenant.queue.check_invariants()
                if tenant.wants_service != (tenant.listed_key is not None):
                    raise AssertionError(f"{tenant.name} stands wrongly in the order of its tier")

    def _declare(self, name: str, rule: TenantRule, tier: TierRule) -> None:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._tenants[name] = Tenant(
                name=name, rule=rule, tier=tier, counters=self.counters, root=root_key(name)
            )
            return
        self._put(tenant, rule, tier)

    def _put(self, tenant: Tenant, rule: TenantRule, tier: TierRule) -> None:
        """Put a known tenant under these rules."""
        group, was_held = tenant.group, tenant.is_held
        tenant.obey(rule, tier)
        if tenant.group != group:
            self._regroup(tenant, group)
        if not tenant.is_active:
            return
        if tenant.is_held:
            self.counters.suspend(tenant.name, tenant.group)
        elif was_held:  # lifted like a newcomer: it has had no service, and asked for none
            self.counters.join(tenant.name, tenant.group)

    def _regroup(self, tenant: Tenant, before: Group) -> None:
        if tenant.is_active:
            self.counters.leave(tenant.name, before)
            self.counters.move(tenant.name, tenant.group)
        else:
            self.counters.forget(tenant.name)

    def _rebuild_tiers(self) -> None:
        """Give every tenant its place under the policy now in force."""
        before = self.tiers
        rules: dict[int, dict[str, TierRule]] = {}
        for tenant in self:
            rules.setdefault(tenant.tier.value, {})[tenant.tier.name] = tenant.tier
        self.tiers = {value: TierQueue(tuple(rules[value].values())) for value in sorted(rules)}
        for tier in before.values():
            for seq in tier.resumable:
                self.tier_of(seq.tenant).resumable[seq] = None
        for tenant in self:
            self._place(tenant, before)

    def _place(self, tenant: Tenant, before: Mapping[int, TierQueue]) -> None:
        """Put a tenant and its queue into a tier that has just been made."""
        if tenant.is_parked:
            tenant.is_parked = False
            if not tenant.is_held:
                self.counters.readmit(tenant.name, tenant.group)
        tenant.listed_key = None
        if not tenant.queue or tenant.is_held:
            return
        tier = self.tier_of(tenant)
        tier.num_queued += len(tenant.queue)
        tier.num_tokens += tenant.queue.num_tokens
        if tier.first_wait_at is None:
            # Where the tenants of a tier come from several, the longest wait counts for all.
            waited = [t for t in before.values() if t.first_wait_at is not None]
            same = [t for t in waited if t.value == tier.value] or waited
            # Nobody is in before if all were held: what a hold kept waits no longer.
            tier.first_wait_at = min((t.first_wait_at or 0.0 for t in same), default=-inf)
            tier.first_latest_start = min((t.first_latest_start for t in waited), default=inf)
        self.relist(tenant)

    def _drop(self, tenant: Tenant) -> None:
        del self._tenants[tenant.name]
        self._dropped.append(tenant.name)
        self.gone.add(tenant.totals)
        self.counters.forget(tenant.name)


def _rules(snapshot: PolicySnapshot) -> Iterable[TenantRule]:
    """Yield the rule of every tenant whose requests are let in, the unknown ones included."""
    yield from snapshot.tenants
    unknown = snapshot.unknown_tenants
    if unknown.action is UnknownAction.ADMIT:
        yield TenantRule(
            tenant=UNKNOWN_TENANT,
            policy="",
            tier=unknown.tier,
            weight=unknown.weight,
            max_running=unknown.max_running,
        )
