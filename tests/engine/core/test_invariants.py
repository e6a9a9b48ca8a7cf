"""Any interleaving of arrivals, steps, cancels and policy changes keeps the books right."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate_engine.core.request import FinishReason, Request
from tidegate_policies.snapshot import (
    UNKNOWN_TENANT,
    BatchingRule,
    PolicySnapshot,
    UnknownAction,
    UnknownTenantsRule,
    WatermarkRule,
)
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request, a_run

TENANTS = ["a", "b", "c"]
TIERS = {"high": 10, "standard": 0, "low": -10}
BLOCKS, BLOCK_SIZE, TOKEN_BUDGET = 12, 4, 24


@st.composite
def policies(draw: st.DrawFn) -> PolicySnapshot:
    """Draw who is declared, tiers, weights, nominal of at most 60 %, watermarks, batch limits."""
    declared = draw(st.lists(st.sampled_from(TENANTS), unique=True))
    admits_unknown = draw(st.booleans())
    tenants = [
        a_tenant(
            name,
            tier=draw(st.sampled_from(sorted(TIERS))),
            weight=draw(st.integers(0, 5)),
            kv_nominal_percent=draw(st.sampled_from([0, 0, 10, 20])),
        )
        for name in declared or TENANTS[:1]
    ]
    low = draw(st.integers(60, 90))
    return a_snapshot(
        *tenants,
        tiers=TIERS,
        unknown_tenants=UnknownTenantsRule(
            action=UnknownAction.ADMIT if admits_unknown else UnknownAction.REJECT,
            tier="low",
            max_running=draw(st.sampled_from([None, 1])),
        ),
        watermarks=WatermarkRule(low_percent=low, high_percent=draw(st.integers(low + 1, 99))),
        batching=BatchingRule(
            max_num_seqs=draw(st.integers(1, 5)),
            max_batched_tokens=draw(st.integers(1, TOKEN_BUDGET)),
        ),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Every step of `Run` verifies blocks, ledger and queues; the end verifies the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.run = a_run(
            a_snapshot(*map(a_tenant, TENANTS)),
            blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            max_batched_tokens=TOKEN_BUDGET,
        )
        self.requests: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.revision = 1
        self.arrivals = 0

    @rule(
        tenant=st.sampled_from([*TENANTS, UNKNOWN_TENANT]),
        prompt=st.lists(st.integers(1, 50), min_size=1, max_size=20),
        output=st.integers(1, 20),
    )
    def arrive(self, tenant: str, prompt: list[int], output: int) -> None:
        self.arrivals += 1
        request = a_request(
            tenant, prompt=tuple(prompt), output=output, request_id=f"r{self.arrivals:03}"
        )
        if self.run.scheduler.submit(request, 0.0) is None:
            self.requests[request.request_id] = request

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        had_work = self.run.scheduler.has_work
        for _ in range(count):
            plan = self.run.step()
            assert bool(plan.rows or plan.ended) == had_work, "work, but an idle step"
            assert sum(len(row.token_ids) for row in plan.rows) <= TOKEN_BUDGET
            had_work = self.run.scheduler.has_work

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if self.run.scheduler.cancel(request_id, 0.0):
            self.cancelled.add(request_id)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def see_a_stop_string(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if self.run.scheduler.finish(request_id, 0.0):
            self.run.finished[request_id] = FinishReason.STOP

    @rule()
    def break_a_step(self) -> None:
        plan = self.run.scheduler.plan_step(0.0)
        self.run.finished |= dict.fromkeys(plan.ended, FinishReason.LENGTH)
        if plan.rows:
            self.cancelled |= set(self.run.scheduler.abandon_step(plan, 0.0))

    @rule(policy=policies())
    def change_policy(self, policy: PolicySnapshot) -> None:
        self.revision += 1
        self.run.scheduler.apply_policy(policy, self.revision)

    @invariant()
    def books_agree(self) -> None:
        self.run.scheduler.check_invariants()

    def teardown(self) -> None:
        """Everything ends, nothing is left over, and every output is what it would be alone."""
        self.run.drain(at_most=2000)
        assert self.run.scheduler.stats().kv_used_blocks == 0
        assert set(self.run.finished) | self.cancelled == set(self.requests)
        for request_id, request in self.requests.items():
            produced = self.run.outputs.get(request_id, [])
            assert produced == output_alone(request)[: len(produced)]


def output_alone(request: Request) -> list[int]:
    run = a_run(a_snapshot(a_tenant(request.tenant + "-alone")), blocks=64, block_size=BLOCK_SIZE)
    run.submit(replace(request, tenant=request.tenant + "-alone"))
    run.drain()
    return run.outputs[request.request_id]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
