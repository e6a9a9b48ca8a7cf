"""Every invariant can fail: a fault seeded into the scheduler is found."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tidegate_engine.core import arrival as arrival_module
from tidegate_engine.core.admission import Admission
from tidegate_engine.core.batch import Batch
from tidegate_engine.core.flights import Flight, Flights
from tidegate_engine.core.itl import ItlTargets
from tidegate_engine.core.kv_memory import KvMemory
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.core.precedence import Precedence
from tidegate_engine.core.preemptor import Preemptor, Wish, _Option
from tidegate_engine.core.running import Running
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.core.sequence import Phase as RequestPhase
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.stops import Stops
from tidegate_engine.core.tenant_table import TenantTable
from tidegate_engine.core.tenants import Tenant
from tidegate_engine.core.time_limits import TimeLimits
from tidegate_policies.fairness import Group, PromptPrice, VirtualTokenCounters
from tidegate_policies.preemption import Shield
from tidegate_testing import faults_of_memory
from tidegate_testing.scheduler_invariants import Invariant
from tidegate_testing.scheduler_policies import ANY, KV_ALONE, TENANTS, Trait
from tidegate_testing.seeded_faults import (
    ALL_SWAP,
    OWNERS,
    TWO_TIERS,
    Patch,
    SeededFault,
    fault,
    faults_in,
    violations,
)

# -- batches -----------------------------------------------------------------------------------


@fault(Invariant.TOKEN_BUDGET)
def a_step_computes_too_many_tokens(monkeypatch: Patch) -> None:
    monkeypatch.setattr("tidegate_engine.core.batch.prefill_budget", lambda *_: 1000)


@fault(Invariant.STANDING, *TWO_TIERS)
def lower_decodes_stand_back_for_nobodys_target(monkeypatch: Patch) -> None:
    def highest(_: ItlTargets, decodes: list[Sequence], __: object) -> list[Sequence]:
        top = max((seq.tenant.tier_value for seq in decodes), default=0)
        return [seq for seq in decodes if seq.tenant.tier_value == top]

    monkeypatch.setattr(ItlTargets, "take_turns", highest)


@fault(Invariant.STANDING, *TWO_TIERS)
def lower_prompts_are_read_where_lower_decodes_stand_back(monkeypatch: Patch) -> None:
    alone = Precedence._alone

    def with_lower_prompts(
        precedence: Precedence, shared: Batch, limits: EngineLimits
    ) -> Batch | None:
        step = alone(precedence, shared, limits)
        return step and step._replace(shares={**shared.shares, **step.shares})

    monkeypatch.setattr(Precedence, "_alone", with_lower_prompts)


@fault(Invariant.PLACES)
def the_batch_has_a_place_too_many(monkeypatch: Patch) -> None:
    places_left = Admission._places_left
    monkeypatch.setattr(Admission, "_places_left", lambda self: places_left(self) + 1)


@fault(Invariant.TENANT_PLACES, drawn=[(tenant, "one running") for tenant in TENANTS])
def a_tenant_has_no_limit_of_its_own(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Tenant, "is_full_with", lambda *_: False)


@fault(Invariant.REVISION)
def a_policy_is_in_force_at_once(monkeypatch: Patch) -> None:
    hand_over = Scheduler.apply_policy

    def adopt(scheduler: Scheduler, *args: Any) -> None:
        hand_over(scheduler, *args)
        scheduler._adopt_policy(0.0)

    monkeypatch.setattr(Scheduler, "apply_policy", adopt)


@fault(Invariant.ENDED)
def rows_of_the_last_plan_are_kept(monkeypatch: Patch) -> None:
    plan_step = Scheduler.plan_step
    last: dict[Scheduler, StepPlan] = {}

    def plan_with_leftovers(scheduler: Scheduler, now: float) -> StepPlan:
        plan = plan_step(scheduler, now)
        if plan.rows and scheduler in last:
            live = {row.request_id for row in plan.rows}
            kept = [row for row in last[scheduler].rows if row.request_id not in live]
            plan = replace(plan, rows=(*plan.rows, *kept))
        last[scheduler] = plan
        return plan

    monkeypatch.setattr(Scheduler, "plan_step", plan_with_leftovers)


@fault(Invariant.ROWS)
def the_last_output_of_a_victim_is_lost(monkeypatch: Patch) -> None:
    take_out = Preemptor._take_out

    def take_out_and_forget(self: Preemptor, seq: Sequence, *args: Any, **kwargs: Any) -> None:
        take_out(self, seq, *args, **kwargs)
        if seq.num_output_tokens:
            seq.token_ids.pop()
            seq.num_tokens -= 1

    monkeypatch.setattr(Preemptor, "_take_out", take_out_and_forget)


@fault(Invariant.OUTPUT, *ALL_SWAP)
def a_swap_mixes_blocks_up(monkeypatch: Patch) -> None:
    begin = Flights.begin

    def begin_reversed(
        flights: Flights, seq: Sequence, blocks: list[int], *, is_out: bool, **kwargs: Any
    ) -> Flight:
        return begin(flights, seq, blocks[::-1] if is_out else blocks, is_out=is_out, **kwargs)

    monkeypatch.setattr(Flights, "begin", begin_reversed)


@fault(Invariant.WRITES)
def blocks_are_known_before_they_are_computed(monkeypatch: Patch) -> None:
    begin = KvMemory.begin

    def begin_and_register(memory: KvMemory, seq: Sequence) -> int:
        found = begin(memory, seq)
        seq.computed_tokens, computed = seq.num_tokens, seq.computed_tokens
        memory.register(seq)
        seq.computed_tokens = computed
        return found

    monkeypatch.setattr(KvMemory, "begin", begin_and_register)


@fault(Invariant.FINISH)
def a_request_gets_a_token_too_many(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        "tidegate_engine.core.arrival._output_limit",
        lambda request, *_, **__: request.max_output_tokens + 1,
    )


# -- books -------------------------------------------------------------------------------------


@fault(Invariant.MOVES)
def who_runs_is_not_counted(monkeypatch: Patch) -> None:
    add = Running.add

    def add_uncounted(running: Running, seq: Sequence) -> None:
        add(running, seq)
        seq.tenant.running -= 1

    monkeypatch.setattr(Running, "add", add_uncounted)


@fault(Invariant.SUMS)
def a_cancel_is_not_counted(monkeypatch: Patch) -> None:
    cancel = Scheduler.cancel

    def cancel_uncounted(scheduler: Scheduler, request_id: str, now: float) -> RequestPhase | None:
        seq = scheduler._live.get(request_id)
        if seq is not None:
            seq.tenant.totals.cancelled -= 1
        return cancel(scheduler, request_id, now)

    monkeypatch.setattr(Scheduler, "cancel", cancel_uncounted)


@fault(Invariant.CHARGES)
def service_is_charged_twice(monkeypatch: Patch) -> None:
    charge = VirtualTokenCounters.charge

    def charge_twice(self: VirtualTokenCounters, *args: Any, **kwargs: Any) -> None:
        charge(self, *args, **kwargs)
        charge(self, *args, **kwargs)

    monkeypatch.setattr(VirtualTokenCounters, "charge", charge_twice)


@fault(Invariant.CHARGES)
def a_recompute_is_charged(monkeypatch: Patch) -> None:
    take_out = Preemptor._take_out

    def take_out_unpaid(self: Preemptor, seq: Sequence, *args: Any, **kwargs: Any) -> None:
        take_out(self, seq, *args, **kwargs)
        seq.charged_tokens = 0

    monkeypatch.setattr(Preemptor, "_take_out", take_out_unpaid)


@fault(Invariant.COUNTERS)
def a_counter_falls_when_its_tenant_joins(monkeypatch: Patch) -> None:
    join = VirtualTokenCounters.join

    def join_anew(counters: VirtualTokenCounters, tenant: str, group: Group) -> None:
        join(counters, tenant, group)
        counters._counter[tenant] = 0.0

    monkeypatch.setattr(VirtualTokenCounters, "join", join_anew)


@fault(Invariant.COUNTERS)
def a_newcomer_is_not_lifted(monkeypatch: Patch) -> None:
    monkeypatch.setattr(VirtualTokenCounters, "join", VirtualTokenCounters.readmit)


@fault(Invariant.COUNTERS)
def who_gets_all_it_asks_for_banks_the_rest(monkeypatch: Patch) -> None:
    join = TenantTable._join

    def join_if_idle(self: TenantTable, tenant: Tenant) -> None:
        if tenant.is_active:
            self.counters.readmit(tenant.account, tenant.group)
        else:
            join(self, tenant)

    monkeypatch.setattr(TenantTable, "_join", join_if_idle)


@fault(Invariant.CHARGES)
def attention_is_free(monkeypatch: Patch) -> None:
    monkeypatch.setattr(PromptPrice, "of", lambda _, _start, num_tokens: float(num_tokens))


# -- order -------------------------------------------------------------------------------------


@fault(Invariant.TIER_ORDER)
def lower_tiers_borrow_past_a_blocked_head(monkeypatch: Patch) -> None:
    always = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(Admission, "_may_borrow", always, raising=False)


def _take_from_anybody(self: Preemptor, _: Wish) -> Iterator[_Option]:
    for seq in self._running:
        if self._shield(seq) is Shield.NONE:
            yield _Option(seq, self._candidate(seq), frees_slot=True, frees_blocks=True)


@fault(Invariant.DISPLACEMENT)
def the_own_tier_is_displaced(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Preemptor, "_options_for", _take_from_anybody)
    monkeypatch.setattr(Admission, "_may_displace", lambda *_: True)


@fault(Invariant.OWN_BLOCKS, *OWNERS)
def owners_yield_under_pressure(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Preemptor, "_borrowers", lambda self: list(self._running))


@fault(Invariant.PROTECTION)
def nobody_is_protected(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Sequence, "shield", lambda *_, **__: Shield.NONE)


@fault(Invariant.SATISFIED, *TWO_TIERS)
def any_victim_is_enough(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Preemptor, "_is_enough", lambda _, __, victims: bool(victims))


@fault(Invariant.CONSERVATION, drawn=ANY)
def a_parked_tenant_is_never_looked_at_again(monkeypatch: Patch) -> None:
    monkeypatch.setattr(TenantTable, "reconsider", lambda *_: None)


@fault(Invariant.CONSERVATION)
def reservations_leak(monkeypatch: Patch) -> None:
    monkeypatch.setattr(KvMemory, "unreserve", lambda *_: None)


@fault(Invariant.LACK)
def nobody_yields_to_who_grows(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Preemptor, "relieve", lambda *_: None)
    monkeypatch.setattr(Preemptor, "make_room_to_grow", lambda *_: None)


# -- arrivals and ends -------------------------------------------------------------------------


@fault(Invariant.REFUSALS)
def a_prompt_that_never_fits_is_queued(monkeypatch: Patch) -> None:
    monkeypatch.setattr(arrival_module, "refuse_prompt", lambda *_, **__: None)


@fault(Invariant.TIME_LIMITS, drawn=[(tenant, "done in 1 s") for tenant in TENANTS])
def nobody_watches_the_time(monkeypatch: Patch) -> None:
    monkeypatch.setattr(TimeLimits, "pop_due", lambda *_: [])


@fault(Invariant.STOPPED, drawn=[(tenant, "cancelled") for tenant in TENANTS])
def a_cancelled_tenant_goes_on(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Stops, "obey", lambda *_, **__: [])


@fault(Invariant.CANCEL)
def a_cancel_is_answered_wrongly(monkeypatch: Patch) -> None:
    cancel = Scheduler.cancel

    def cancel_waiting(scheduler: Scheduler, request_id: str, now: float) -> RequestPhase:
        cancel(scheduler, request_id, now)
        return RequestPhase.WAITING

    monkeypatch.setattr(Scheduler, "cancel", cancel_waiting)


@fault(Invariant.END)
def a_victim_is_taken_out_again_and_again(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Scheduler, "has_work", True)


FAULTS = {**faults_in(vars(faults_of_memory)), **faults_in(globals())}


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_found(name: str, monkeypatch: Patch) -> None:
    fault = FAULTS[name]
    fault.seed(monkeypatch)
    assert fault.breaks in violations(fault)


@pytest.mark.parametrize("drawn", [KV_ALONE, ANY], ids=["kv-alone", "any"])
def test_nothing_is_found_without_a_fault(drawn: list[Trait]) -> None:
    def no_fault(_: Patch) -> None:
        pass

    sound = SeededFault(
        seed=no_fault, breaks=Invariant.BOOKS, traits=(), drawn=drawn, checks_books=True
    )
    assert list(violations(sound, num_seeds=25)) == []


def test_every_invariant_has_a_fault_that_breaks_it() -> None:
    assert {fault.breaks for fault in FAULTS.values()} == {*Invariant}
