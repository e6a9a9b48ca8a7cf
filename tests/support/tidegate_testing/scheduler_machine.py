"""A scheduler with a simulated executor under any order of events, watched from outside."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tidegate_engine.core.block_pool import OutOfBlocksError
from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.core.request import Request
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.executor.base import ExecutorError
from tidegate_engine.executor.clock import VirtualClock
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.scheduler_books import PAIR_COST
from tidegate_testing.scheduler_invariants import Invariant, InvariantError
from tidegate_testing.scheduler_policies import ANY, KV_ALONE, PolicyDraft, Trait, requests
from tidegate_testing.scheduler_view import Seen, a_simulated_device
from tidegate_testing.scheduler_witness import Witness

BLOCK_SIZE = 4
MAX_DRAIN_STEPS = 4000
DECODE_SECONDS = (0.0005, 0.02)
"""Of a decode: next to nothing of a step, or so much that lower tiers stand back."""

_GARBAGE = (-7,) * BLOCK_SIZE
_FEW = st.integers(0, 4)
_WAITED = st.sampled_from([0.0, 0.0, 0.02, 0.25])


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What one scheduler has to work with.

    Attributes:
        swap_block_seconds: Of a block's copy; a step takes 10 ms and more.
        decode_seconds: Of each of its decodes.
    """

    num_blocks: int
    num_host_blocks: int
    swap_block_seconds: float
    decode_seconds: float
    limits: EngineLimits


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Draw a small engine."""
    return Sizes(
        num_blocks=draw(st.sampled_from([12, 16, 24, 40])),
        num_host_blocks=draw(st.sampled_from([0, 5, 40, 40])),
        swap_block_seconds=draw(st.sampled_from([0.0, 0.0005, 0.02])),
        decode_seconds=draw(st.sampled_from(DECODE_SECONDS)),
        limits=EngineLimits(
            max_num_seqs=draw(st.sampled_from([2, 4, 8, 8])),
            max_batched_tokens=draw(st.sampled_from([6, 16, 40])),
            prefill_chunk_min=draw(st.sampled_from([1, 4])),
        ),
    )


@contextmanager
def soundly() -> Iterator[None]:
    """Take an error of scheduler or executor for the violation that it is."""
    try:
        yield
    except (ExecutorError, LookupError, OutOfBlocksError, ValueError) as error:
        raise InvariantError(Invariant.SOUND_PLANS, error) from error


@dataclass(kw_only=True)
class World:
    """One scheduler, its executor, and the witness of what passes between them.

    Attributes:
        repeats_policy: Whether the newest policy is handed over again before every plan.
        policy: The newest one.
        plans: All of them, but for their revisions.
        happened: What plans contained, by name.
    """

    sizes: Sizes
    checks_books: bool = True
    clock: VirtualClock = field(default_factory=VirtualClock)
    revision: int = 0
    arrivals: int = 0
    repeats_policy: bool = False
    policy: PolicySnapshot | None = None
    plans: list[StepPlan] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        size = self.sizes
        takes = ExecutorCosts(
            decode_seconds=size.decode_seconds, swap_block_seconds=size.swap_block_seconds
        )
        pair_seconds = PAIR_COST * takes.prefill_token_seconds
        self.scheduler = Scheduler(
            num_blocks=size.num_blocks,
            block_size=BLOCK_SIZE,
            num_host_blocks=size.num_host_blocks,
            limits=size.limits,
            costs=replace(takes, prefill_pair_seconds=pair_seconds),
        )
        self.executor = a_simulated_device(
            num_blocks=size.num_blocks,
            block_size=BLOCK_SIZE,
            num_host_blocks=size.num_host_blocks,
            costs=takes,
            clock=self.clock,
        )
        self.witness = Witness(
            self.scheduler,
            num_blocks=size.num_blocks,
            block_size=BLOCK_SIZE,
            limits=size.limits,
        )

    def submit(self, request: Request, *, waited: float = 0.0) -> None:
        """Let a request arrive, under an id of its own, that came so many seconds ago."""
        self.arrivals += 1
        now = self.clock.now()
        named = replace(request, request_id=f"r{self.arrivals:03}", arrived_at=now - waited)
        rejection = self.scheduler.submit(named, now)
        self.witness.submitted(named, rejection, now)
        self.check_books()

    def cancel(self, seen: Seen) -> None:
        """Cancel a request that may have ended already."""
        request_id = seen.request.request_id
        with soundly():
            phase = self.scheduler.cancel(request_id, self.clock.now())
        self.witness.cancelled(request_id, phase)
        self.check_books()

    def finish(self, seen: Seen) -> None:
        """End a request as a stop string does."""
        request_id = seen.request.request_id
        with soundly():
            was_alive = self.scheduler.finish(request_id, self.clock.now())
        self.witness.finished(request_id, was_alive=was_alive)
        self.check_books()

    def change_policy(self, policy: PolicySnapshot) -> None:
        """Hand a policy over."""
        self.revision += 1
        self.policy = policy
        self.scheduler.apply_policy(policy, self.revision)
        self.witness.policy_handed(policy, self.revision)

    def plan(self) -> StepPlan:
        """Plan a step; whoever plans has to execute or abandon what is executable."""
        now = self.clock.now()
        if self.repeats_policy and self.policy is not None:
            self.change_policy(self.policy)
        with soundly():
            plan = self.scheduler.plan_step(now)
        self.witness.planned(plan, now)
        if not plan.is_executable:
            self.check_books()
        self.note(plan)
        self.plans.append(replace(plan, revision=0))
        return plan

    def execute(self, plan: StepPlan) -> None:
        """Execute and commit what there is to be executed."""
        if not plan.is_executable:
            return
        with soundly():
            result = self.executor.execute(plan)
            outputs = self.scheduler.commit_step(plan, result, self.clock.now())
        self.witness.committed(plan, result, outputs)
        self.check_books()

    def abandon(self, plan: StepPlan) -> None:
        """Let a step fail half-way: nothing of what it was to write can be relied on."""
        for row in plan.rows:
            for block in row.block_ids[row.start // BLOCK_SIZE :]:
                self.executor._kv.put(block, _GARBAGE)
        for swap in plan.swap_in:
            for block in swap.device_blocks:
                self.executor._kv.put(block, _GARBAGE)
        with soundly():
            dropped = self.scheduler.abandon_step(plan, self.clock.now())
        self.witness.abandoned(plan, dropped)
        self.check_books()

    def step(self) -> StepPlan:
        """Plan a step and carry it out."""
        plan = self.plan()
        self.execute(plan)
        return plan

    def drain(self) -> None:
        """Step until nothing is left; requests that a policy holds are cancelled."""
        tenants = self.scheduler.stats().tenants.values()
        self.happened["deferred"] += sum(tenant.deferred_decodes for tenant in tenants)
        for _ in range(MAX_DRAIN_STEPS):
            if not self.scheduler.has_work:
                self.witness.ended()
                return
            plan = self.step()
            if plan.is_executable or plan.ended or plan.expired or plan.stopped:
                continue
            for seen in self.witness.live:
                if self.witness.view.is_held(seen.tenant):
                    self.cancel(seen)
            if plan.wake_at is not None:
                self.clock.advance_to(plan.wake_at)
        raise InvariantError(Invariant.END, self.scheduler.stats())

    def note(self, plan: StepPlan) -> None:
        """Count what a plan contains."""
        self.happened.update(f"{d.verdict} {d.reason}" for d in plan.decisions)
        for name in ("swap_out", "swap_in", "copies", "rows", "expired", "stopped", "ended"):
            self.happened[name] += len(getattr(plan, name))

    def check_books(self) -> None:
        """Let the scheduler verify itself."""
        if self.checks_books:
            try:
                self.scheduler.check_invariants()
            except AssertionError as error:
                raise InvariantError(Invariant.BOOKS, error) from error


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, steps, cancels, ends, policies, failures, and time that passes.

    Attributes:
        rules_run: Rules carried out by all machines of this process, by name.
        happened: What their plans contained, by name.
    """

    happened: ClassVar[Counter[str]] = Counter()
    rules_run: ClassVar[Counter[str]] = Counter()
    traits: ClassVar[list[Trait]] = ANY
    checks_books: ClassVar[bool] = True
    world: World
    draft: PolicyDraft

    @classmethod
    def counting_anew(cls) -> "type[SchedulerMachine]":
        """Return a machine like this with counters and a seed of its own."""
        counters = {"rules_run": Counter[str](), "happened": Counter[str]()}
        return cast("type[SchedulerMachine]", type(cls.__name__, (cls,), counters))

    @initialize(size=sizes(), data=st.data())
    def begin(self, size: Sizes, data: st.DataObject) -> None:
        self.world = World(sizes=size, checks_books=self.checks_books)
        self.draft = PolicyDraft()
        self.change_policy(data, many=True, in_mid_step=False, steps=1)

    @rule(data=st.data(), many=st.booleans(), in_mid_step=st.booleans(), steps=_FEW)
    def change_policy(
        self, data: st.DataObject, *, many: bool, in_mid_step: bool, steps: int
    ) -> None:
        changes = data.draw(st.lists(st.sampled_from(self.traits), max_size=12 if many else 2))
        policy = self.draft.toggle(changes)
        if in_mid_step:
            plan = self.world.plan()
            self.world.change_policy(policy)
            self.world.execute(plan)
        else:
            self.world.change_policy(policy)
        self.go_on("policy", steps)

    @rule(
        request=requests(),
        copies=st.sampled_from([1, 2, 4, 6]),
        together=st.booleans(),
        waited=_WAITED,
        steps=_FEW,
    )
    def arrive(
        self, request: Request, copies: int, *, together: bool, waited: float, steps: int
    ) -> None:
        generation_id = f"g{self.world.arrivals}" if together else None
        for _ in range(copies):
            self.world.submit(replace(request, generation_id=generation_id), waited=waited)
        self.go_on("arrive", steps)

    @rule(request=requests(), other=requests(), steps=_FEW)
    def two_arrive(self, request: Request, other: Request, steps: int) -> None:
        self.world.submit(request)
        self.world.submit(other)
        self.go_on("arrive", steps)

    @rule(steps=st.integers(1, 10))
    def step(self, steps: int) -> None:
        self.go_on("step", steps)

    @precondition(lambda self: self.world.witness.requests)
    @rule(index=st.integers(0, 63), steps=_FEW)
    def cancel(self, index: int, steps: int) -> None:
        every = list(self.world.witness.requests.values())
        self.world.cancel(every[-1 - index % len(every)])
        self.go_on("cancel", steps)

    @precondition(lambda self: self.world.witness.live)
    @rule(index=st.integers(0, 15), steps=_FEW)
    def see_a_stop_string(self, index: int, steps: int) -> None:
        live = self.world.witness.live
        self.world.finish(live[index % len(live)])
        self.go_on("finish", steps)

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.1, 0.6]), steps=_FEW)
    def pass_time(self, seconds: float, steps: int) -> None:
        self.world.clock.advance(seconds)
        self.go_on("clock", steps)

    @precondition(lambda self: self.world.scheduler.has_work)
    @rule(steps=_FEW)
    def complete_copies(self, steps: int) -> None:
        self.world.clock.advance(100.0 * self.world.sizes.swap_block_seconds)
        self.go_on("copies", 1 + steps)

    @precondition(lambda self: self.world.scheduler.has_work)
    @rule(steps=_FEW)
    def break_a_step(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()
        plan = self.world.plan()
        if plan.rows:
            self.world.abandon(plan)
        else:
            self.world.execute(plan)
        self.go_on("failure", 0)

    @precondition(lambda self: self.world.witness.live)
    @rule(index=st.integers(0, 15), steps=_FEW)
    def cancel_in_mid_step(self, index: int, steps: int) -> None:
        plan = self.world.plan()
        if live := self.world.witness.live:
            self.world.cancel(live[index % len(live)])
        self.world.execute(plan)
        self.go_on("cancel", steps)

    def go_on(self, name: str, steps: int) -> None:
        """Step a few times, and count a rule."""
        for _ in range(steps):
            self.world.step()
        self.rules_run[name] += 1

    def teardown(self) -> None:
        """Everything ends, and nothing is left over; after a violation that says nothing more."""
        if hasattr(self, "world") and sys.exc_info()[1] is None:
            self.world.drain()
            self.happened.update(self.world.happened)


class QuietMachine(SchedulerMachine):
    """The same where KV alone decides."""

    traits = KV_ALONE
