"""Who goes first, who has to yield, and whether anybody stands still for nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidegate_engine.core.decisions import Decision, Reason, Verdict
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.core.request import SchedulerStats
from tidegate_policies.preemption import FINISHING_TOKENS, NEARLY_COMPUTED_SHARE
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.scheduler_invariants import Invariant, InvariantError, in_batch, require
from tidegate_testing.scheduler_view import Place, PolicyView, Seen


@dataclass(kw_only=True)
class Planning:
    """One step's planning, and how things stood before it.

    Attributes:
        running: Requests in the batch by tenant.
        in_batch: The requests that held a place in the batch.
        swapping: Requests that swap out with this plan.
        served: Tenants of which somebody was admitted with this plan.
        owing: Those for whom somebody was taken out while they waited.
    """

    plan: StepPlan
    now: float
    running: Mapping[str, int]
    in_batch: frozenset[str]
    swapping: frozenset[str]
    served: frozenset[str]
    owing: dict[str, list[str]] = field(default_factory=dict)


class Fairness:
    """Follows counters and usage between the steps.

    Counters are those of tenants in their own tiers. Those of requests that asked for a lower one
    aren't shown to anybody: with whom they compare, the floor of newcomers isn't known.
    """

    def __init__(self, view: PolicyView) -> None:
        self._view = view
        self._used: dict[str, int] = {}
        self._counters: dict[str, float] = {}
        self._service: dict[str, float] = {}
        self._backlogged: dict[str, tuple[int, bool]] = {}
        self._left_last: dict[tuple[int, bool], float] = {}
        self._lifted: set[str] = set()
        self._mixed: set[tuple[int, bool]] = set()
        self._promised: frozenset[str] = frozenset()

    # -- counters --------------------------------------------------------------------------------

    def adopt(self, snapshot: PolicySnapshot, revision: int, live: Sequence[Seen]) -> None:
        """Put a policy in force; who changes its group begins anew there."""
        names = list(self._view.rules)
        before = {name: (self._view.group(name), self._view.is_held(name)) for name in names}
        self._view.adopt(snapshot, revision)
        moved = [name for name in names if before[name][0] != self._view.group(name)]
        for name in moved:
            self._counters.pop(name, None)
        # Whoever isn't below its tenant's tier any more is in that one, for good.
        raised = [s for s in live if s.lower != self._view.lower_tier(s.tenant, s.lower)]
        for seen in raised:
            seen.lower = None
        if moved or raised:
            self._left_last.clear()
            self._backlogged = self._backlog(live)
        # Who was held, and is no longer, joins like a newcomer.
        self._lifted = {name for name in names if before[name][1] != self._view.is_held(name)}
        self._lifted |= {seen.tenant for seen in raised}

    def check_join(self, tenant: str, counter: float, live: Sequence[Seen]) -> None:
        """Verify the counter of a tenant with whose arrival nobody gains."""
        live = [seen for seen in live if seen.lower is None]
        if tenant in self._backlog(live):
            return
        group = self._view.group(tenant)
        if group in self._mixed:
            return
        others = [
            name
            for name in self._backlogged
            if self._view.group(name) == group and not self._view.is_held(name)
        ]
        if not others:
            floor = self._left_last.get(group, 0.0)
            require(counter >= floor, Invariant.COUNTERS, tenant, counter, "below", floor)
            return
        # A tenant that its own limits keep back doesn't count; one with nothing in the batch does.
        busy = {seen.tenant for seen in live if seen.place is not Place.WAITING}
        known = [self._counters[name] for name in others if name in self._counters]
        if not busy.issuperset(others) and len(known) == len(others):
            floor = min(known)
            require(counter >= floor, Invariant.COUNTERS, tenant, counter, "below", floor)

    def settle(self, stats: SchedulerStats, live: Sequence[Seen]) -> None:
        """Verify that no counter has fallen, and remember how things stand."""
        found = {name: tenant.virtual_counter for name, tenant in stats.tenants.items()}
        for name, counter in found.items():
            before = self._counters.get(name, 0.0)
            require(counter >= before, Invariant.COUNTERS, name, counter, "after", before)
            if name in self._counters and name not in self._lifted:
                weight = self._view.rules[name].weight or 1
                service = stats.accounts[name].service - self._service.get(name, 0.0)
                lift = counter - before - service / weight
                rounding = 1e-6 * (1 + counter)
                is_charged = lift > -rounding and (name not in self._backlogged or lift < rounding)
                require(is_charged, Invariant.CHARGES, name, before, counter, service, weight)
        self._mixed |= {
            (self._view.tier_of(seen).value, self._view.rules[seen.tenant].weight == 0)
            for seen in live
            if seen.lower is not None
        }
        backlogged = self._backlog(live)
        left: dict[tuple[int, bool], list[float | None]] = {}
        for name, group in self._backlogged.items():
            if name not in backlogged:
                left.setdefault(group, []).append(found.get(name))
        for group, counters in left.items():
            known = [counter for counter in counters if counter is not None]
            if len(known) == len(counters):
                self._left_last[group] = min(known)
            else:
                self._left_last.pop(group, None)
        self._counters, self._backlogged, self._lifted = found, backlogged, set[str]()
        self._service = {name: stats.accounts[name].service for name in stats.tenants}
        self._used = {name: tenant.kv_used_blocks for name, tenant in stats.tenants.items()}

    # -- plans -----------------------------------------------------------------------------------

    def begin(self, plan: StepPlan, now: float, live: Sequence[Seen]) -> Planning:
        """Note how things stood before a plan."""
        running: dict[str, int] = {}
        for seen in live:
            running[seen.tenant] = running.get(seen.tenant, 0) + in_batch(seen.place)
        opening = (Verdict.ADMITTED, Verdict.RESUMED)
        return Planning(
            plan=plan,
            now=now,
            running=running,
            in_batch=frozenset(s.request.request_id for s in live if in_batch(s.place)),
            swapping=frozenset(swap.request_id for swap in plan.swap_out),
            served=frozenset(d.tenant for d in plan.decisions if d.verdict in opening),
        )

    def check_victim(
        self, planning: Planning, decision: Decision, live: Mapping[str, Seen]
    ) -> None:
        """Verify that a request may be taken out for the reason given."""
        victim = live[decision.request_id]
        rule = self._view.rules[victim.tenant]
        require(rule.preemption.preemptible, Invariant.PROTECTION, decision, "isn't preemptible")
        beneficiary = live.get(decision.beneficiary)
        if decision.reason is Reason.DISPLACED:
            is_allowed = beneficiary is not None and self._is_above(beneficiary, victim)
            require(is_allowed, Invariant.DISPLACEMENT, decision)
        else:
            self._check_borrows(planning, decision, victim)
        if beneficiary is not None and decision.beneficiary not in planning.in_batch:
            require(not self._is_protected(victim), Invariant.PROTECTION, decision, vars(victim))
            owing = planning.owing.setdefault(decision.beneficiary, [])
            owing.append(decision.request_id)

    def check_lack(self, seen: Seen, planning: Planning) -> None:
        """Verify that a request may end since there is no KV block for it."""
        revision = planning.plan.revision
        # Whatever arrived under the policy in force was promised what it needs.
        require(seen.revision < revision, Invariant.LACK, seen.request.request_id)

    def check_plan(self, planning: Planning, live: Sequence[Seen]) -> None:
        """Verify a plan as a whole."""
        plan = planning.plan
        promised_before = self._promised
        # What is taken for somebody stays kept until the copies have ended.
        self._promised = frozenset(planning.owing)
        if plan.num_open_fences:
            self._promised |= promised_before
        else:
            for beneficiary, victims in planning.owing.items():
                is_in = beneficiary in plan.admitted
                require(is_in, Invariant.SATISFIED, victims, "left for", beneficiary)
        self._check_tiers(planning, live, promised=promised_before)
        is_idle = not (plan.is_executable or plan.ended or plan.expired or plan.stopped)
        if is_idle:
            stuck = [seen.request.request_id for seen in live if self._could_run(seen, planning)]
            require(not stuck, Invariant.CONSERVATION, stuck, "could run", plan)

    # -- inside ----------------------------------------------------------------------------------

    def _backlog(self, live: Sequence[Seen]) -> dict[str, tuple[int, bool]]:
        """Return the tenants that wait for service in their own tiers, and who compares there.

        A request does until its prompt is paid for, and again while it is out of the batch.
        """
        waiting = (
            seen
            for seen in live
            if seen.lower is None
            and (seen.place is not Place.RUNNING or seen.paid < len(seen.request.prompt_ids))
        )
        return {seen.tenant: self._view.group(seen.tenant) for seen in waiting}

    def _is_above(self, high: Seen, low: Seen) -> bool:
        tier = self._view.tier_of(high)
        return tier.preempts_lower and tier.value > self._view.tier_of(low).value

    def _check_borrows(self, planning: Planning, decision: Decision, victim: Seen) -> None:
        """Verify that a victim's tenant held more than its own, or all that it may hold."""
        name = victim.tenant
        quota = self._view.quota(name)
        # Each of its requests may have grown by a block in this plan; admissions take more.
        most = self._used.get(name, 0) + planning.running.get(name, 0)
        is_allowed = most > quota.nominal or most >= quota.cap or name in planning.served
        require(is_allowed, Invariant.OWN_BLOCKS, decision, most, quota)

    def _is_protected(self, victim: Seen) -> bool:
        """Tell whether a request may not be taken out for one that waits."""
        rule = self._view.rules[victim.tenant].preemption
        if victim.preemptions >= rule.max_preemptions:
            return True
        if victim.computed is None:
            return False
        length = len(victim.tokens)
        if not victim.num_outputs or victim.computed < length - 1:
            return victim.computed >= NEARLY_COMPUTED_SHARE * length
        is_finishing = victim.limit - victim.num_outputs <= FINISHING_TOKENS
        return is_finishing or length - victim.admitted_tokens < rule.min_quantum_tokens

    def _check_tiers(
        self, planning: Planning, live: Sequence[Seen], *, promised: frozenset[str]
    ) -> None:
        """Verify that nothing was lent past a higher tier's request that needs no more than that.

        A tenant that holds nothing and has nothing in the batch is at no limit of its own: it waits
        for blocks or a place, and so must all lower ones.
        """
        admitted = {
            decision.request_id
            for decision in planning.plan.decisions
            if decision.reason is Reason.BORROWING and decision.request_id not in promised
        }
        borrowing = [
            self._view.tier_of(seen).value for seen in live if seen.request.request_id in admitted
        ]
        if not borrowing:
            return
        # A tenant for whose request others have left may have no place for a second one.
        awaited = {seen.tenant for seen in live if seen.request.request_id in self._promised}
        for seen in live:
            value = self._view.tier_of(seen).value
            if (
                value > min(borrowing)
                and self._could_run(seen, planning)
                and not seen.was_admitted
                and seen.tenant not in awaited
                and not self._used.get(seen.tenant)
                and not planning.running.get(seen.tenant)
                and seen.tenant not in planning.served
                and self._view.rules[seen.tenant].preemption.preemptible
            ):
                name = seen.request.request_id
                raise InvariantError(Invariant.TIER_ORDER, (name, planning.plan.decisions))

    def _could_run(self, seen: Seen, planning: Planning) -> bool:
        """Tell whether a request would run if it were alone."""
        if seen.fence:
            return False
        if seen.was_admitted or seen.place is Place.RUNNING:
            return True
        if seen.place is not Place.WAITING:
            return False
        # Another of its tier may have come before and have opened the window for it: never later.
        is_held = self._view.is_held(seen.tenant)
        return not is_held and planning.now >= seen.arrived_at + self._view.longest_window()
