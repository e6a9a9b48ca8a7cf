"""Who is served here: all tenants, in all their tiers, and the queues of these."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from math import inf

from tidegate_engine.core.prefix_cache import common_root_key, root_key
from tidegate_engine.core.queues import TierQueue
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_engine.core.tenants import Tenant, TenantTotals
from tidegate_policies.fairness import Group, VirtualTokenCounters
from tidegate_policies.rules import UNKNOWN_TENANT, TenantRule, TierRule, UnknownAction
from tidegate_policies.snapshot import PolicySnapshot


class TenantTable:
    """All tenants that the policy names or that still have work, and the queues of their tiers.

    Attributes:
        own: Each tenant in its own tier, by name.
        gone: Totals of the tenants of whom nothing else is known any more.
        num_declared: Tenants whose requests the policy in force lets in.
    """

    def __init__(self) -> None:
        self.own: dict[str, Tenant] = {}
        self.gone = TenantTotals()
        self.num_declared = 0
        self.counters = VirtualTokenCounters()
        self.tiers: dict[int, TierQueue] = {}
        self._tier_rules: dict[str, TierRule] = {}
        self._dropped: list[str] = []
        self._sharers: set[str] = set()
        self._num_common_roots = 0

    def __iter__(self) -> Iterator[Tenant]:
        """Yield every tenant, in each of its tiers."""
        return chain.from_iterable(own.in_tiers for own in self.own.values())

    def declared(self, name: str) -> Tenant | None:
        """Return the tenant if the policy in force lets its requests in."""
        tenant = self.own.get(name)
        return tenant if tenant is not None and tenant.is_declared else None

    def in_tier(self, own: Tenant, tier: str | None) -> Tenant | None:
        """Return a declared tenant in the tier that a request asks for; None = it may not.

        Args:
            own: The tenant in its own tier.
            tier: Name of the wanted one; None = its own.
        """
        if tier is None or tier == own.tier.name:
            return own
        if tier not in own.rule.allowed_tiers:
            return None
        rule = self._tier_rules[tier]
        # Tiers of the same value are one, and give nobody a share for each of their names.
        same = (one for one in own.in_tiers if one.tier.value == rule.value)
        return next(same, None) or own.in_lower(rule)

    def tier_of(self, tenant: Tenant) -> TierQueue:
        """Return the queue of a tenant's tier."""
        return self.tiers[tenant.tier.value]

    def enqueue(self, seq: Sequence) -> None:
        """Queue an arrival; a tenant that becomes backlogged by it is lifted."""
        tenant = seq.tenant
        if not tenant.is_backlogged:
            self._join(tenant)
        tenant.queue.push(seq)
        if not tenant.is_held:
            self.tier_of(tenant).note_arrival(seq)
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
        self.counters.suspend(tenant.account, tenant.group)

    def make_room(self, name: str) -> None:
        """Note that a tenant holds less than before: what kept it out may not any more."""
        tenant = self.own.get(name)
        if tenant is not None:
            self.reconsider(tenant)

    def follow(self, tenant: Tenant) -> None:
        """Know whether a tenant is still backlogged, or again though nothing has arrived."""
        account, group = tenant.account, tenant.group
        if tenant.is_backlogged == self.counters.is_backlogged(account, group):
            return
        if not tenant.is_backlogged:
            self.counters.leave(account, group)
        elif tenant.is_held:
            self.counters.suspend(account, group)
        else:
            self.counters.readmit(account, group)

    def reconsider(self, tenant: Tenant) -> None:
        """Give a tenant the place that it has now that one of its requests has left the batch."""
        for one in tenant.in_tiers:
            if one.is_parked:
                one.is_parked = False
                self.counters.readmit(one.account, one.group)
            self.relist(one)

    def settle(self, tenant: Tenant, *, was_running: bool) -> None:
        """Note that a request of `tenant` has ended."""
        # One that only waited changes nothing but for a tenant that waits for its own requests.
        if was_running or tenant.is_parked:
            self.reconsider(tenant)
        if tenant.queue:  # so it is backlogged still
            return
        self.follow(tenant)
        if not (tenant.is_active or tenant.is_named):
            self._forget_idle(tenant.in_tiers[0])

    def note_elsewhere(self, service: Mapping[str, float], active: Iterable[str]) -> None:
        """Count what other engines of the pool gave, and who wants service of them.

        Args:
            service: By account, since the last call, in cost units.
            active: Accounts with work in another engine.
        """
        for account, cost in service.items():
            tenant = self._of_account(account)
            if tenant is not None:
                self.counters.charge(tenant.account, cost, weight=tenant.rule.weight)
        known = [tenant for name in active if (tenant := self._of_account(name)) is not None]
        self.counters.note_elsewhere((tenant.account, tenant.group) for tenant in known)

    def take_dropped(self) -> list[str]:
        """Return whom nothing is known of any more since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def apply_policy(self, snapshot: PolicySnapshot, live: Iterable[Sequence]) -> None:
        """Put `snapshot` in force. Weights count from the next charge on.

        Args:
            snapshot: The policy.
            live: All requests.
        """
        declared = {rule.tenant: rule for rule in _rules(snapshot)}
        self._tier_rules = tiers = {tier.name: tier for tier in snapshot.tiers}
        self.num_declared = len(declared)
        merged: dict[Tenant, Tenant] = {}
        for name, rule in declared.items():
            own = self._declare(name, rule, tiers[rule.tier])
            merged |= self._move_lower(own)
        for own in [t for t in self.own.values() if t.name not in declared]:
            # Its own rule is the last it had; a tier that is still there is as it is now.
            self._put(own, own.rule, tiers.get(own.tier.name, own.tier))
            merged |= self._move_lower(own)
            for one in own.in_tiers:
                one.is_declared = False
        if merged:
            for seq in live:
                seq.tenant = merged.get(seq.tenant, seq.tenant)
        for own in [*self.own.values()]:
            self._forget_idle(own)
        self._share_prefixes(snapshot)
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
                counts = self.counters.is_backlogged(tenant.account, tenant.group)
                if tenant.is_backlogged != counts:
                    raise AssertionError(f"{tenant.name} counts wrongly among the backlogged")

    def _of_account(self, account: str) -> Tenant | None:
        """Return the declared tenant whose service another engine counts so, in its tier."""
        name, _, tier = account.partition(" ")
        own = self.declared(name)
        return None if own is None else self.in_tier(own, tier or None)

    def _declare(self, name: str, rule: TenantRule, tier: TierRule) -> Tenant:
        own = self.own.get(name)
        if own is None:
            own = self.own[name] = Tenant(
                name=name, rule=rule, tier=tier, counters=self.counters, root=root_key(name)
            )
        else:
            self._put(own, rule, tier)
        return own

    def _share_prefixes(self, snapshot: PolicySnapshot) -> None:
        """Give tenants that share their prefixes one root, and the others each its own.

        With the first that shares no more the common root is another one: nobody finds what that
        tenant has left behind, nor it what others have.
        """
        sharers = {rule.tenant for rule in snapshot.tenants if rule.shares_prefixes}
        if self._sharers - sharers:
            self._num_common_roots += 1
        self._sharers = sharers
        common = common_root_key(self._num_common_roots)
        for tenant in self:
            tenant.has_common_root = tenant.name in sharers
            tenant.root = common if tenant.has_common_root else root_key(tenant.name)

    def _move_lower(self, own: Tenant) -> dict[Tenant, Tenant]:
        """Put a tenant's lower tiers under its rule, wherever their values have moved.

        Requests stay in the tier that they asked for, allowed any more or not. Where that isn't
        below the tenant's own, or has the value of another one now, its requests join those there.

        Returns:
            Whose requests are whose now.
        """
        if len(own.in_tiers) == 1:
            return {}
        merged: dict[Tenant, Tenant] = {}
        kept = {own.tier.value: own}
        for one in own.in_tiers[1:]:
            tier = self._tier_rules.get(one.tier.name, one.tier)
            into = own if tier.value >= own.tier.value else kept.get(tier.value)
            if into is None:
                self._put(one, own.rule, tier)
                kept[tier.value] = one
            else:
                self._merge(one, into)
                merged[one] = into
        own.in_tiers[:] = kept.values()
        return merged

    def _merge(self, one: Tenant, into: Tenant) -> None:
        was_backlogged = into.is_backlogged
        if one.is_backlogged:
            self.counters.leave(one.account, one.group)
        self.counters.forget(one.account)
        into.take_over(one)
        if into.is_backlogged and not was_backlogged:
            self._join(into)

    def _join(self, tenant: Tenant) -> None:
        self.counters.join(tenant.account, tenant.group)
        if tenant.is_held:
            self.counters.suspend(tenant.account, tenant.group)

    def _put(self, tenant: Tenant, rule: TenantRule, tier: TierRule) -> None:
        """Put a known tenant under these rules."""
        group, was_held = tenant.group, tenant.is_held
        tenant.obey(rule, tier)
        if tenant.group != group:
            self._regroup(tenant, group)
        if not tenant.is_backlogged:
            return
        if tenant.is_held:
            self.counters.suspend(tenant.account, tenant.group)
        elif was_held:  # lifted like a newcomer: it has had no service, and asked for none
            self.counters.join(tenant.account, tenant.group)

    def _regroup(self, tenant: Tenant, before: Group) -> None:
        if tenant.is_backlogged:
            self.counters.leave(tenant.account, before)
        if tenant.is_active:
            self.counters.move(tenant.account, tenant.group)
            self.follow(tenant)
        else:
            self.counters.forget(tenant.account)

    def _rebuild_tiers(self) -> None:
        """Give every tenant its place under the policy now in force."""
        before = self.tiers
        rules: dict[int, dict[str, TierRule]] = {}
        for rule in chain(self._tier_rules.values(), (tenant.tier for tenant in self)):
            rules.setdefault(rule.value, {})[rule.name] = rule
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
                self.counters.readmit(tenant.account, tenant.group)
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
            tier.first_wait_at = min((t.first_wait_at or 0.0 for t in same), default=inf)
            tier.first_latest_start = min((t.first_latest_start for t in waited), default=inf)
        # What a hold kept was in no tier's count, and has waited all the same.
        tier.first_wait_at = min(tier.first_wait_at, next(iter(tenant.queue)).arrived_at)
        self.relist(tenant)

    def _forget_idle(self, own: Tenant) -> None:
        """Forget a tenant without work, or it in lower tiers, that the policy doesn't name."""
        for one in own.in_tiers[1:]:
            if not (one.is_named or one.is_active):
                own.in_tiers.remove(one)
                self.counters.forget(one.account)
        if own.is_declared or any(one.is_active for one in own.in_tiers):
            return
        del self.own[own.name]
        self._dropped.append(own.name)
        self.gone.add(own.totals)
        self.counters.forget(own.account)


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
