"""The driver, with the static scheduler, whose plans are easy to foresee."""

import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import Expiry, ExpiryCause, SampledToken, StepPlan, StepResult
from tidegate_engine.core.request import FinishReason, RejectionCode
from tidegate_engine.core.static_batching import StaticScheduler
from tidegate_engine.executor.base import Capacity
from tidegate_engine.executor.clock import VirtualClock
from tidegate_engine.replay.driver import Arrival, Replay, ReplayStalledError
from tidegate_engine.replay.log import Outcome
from tidegate_testing.policies import a_snapshot
from tidegate_testing.scheduling import a_request

STEP_SECONDS = 0.5


class SteadyExecutor:
    """Every step takes as long, every token is the same."""

    capacity = Capacity(num_blocks=64, num_host_blocks=0, block_size=4)

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.num_executed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_executed += 1
        self._clock.advance(STEP_SECONDS)
        return StepResult(
            tokens={row.request_id: SampledToken(token_id=7) for row in plan.rows if row.samples}
        )

    def measure(self) -> ExecutorCosts:
        return ExecutorCosts(step_seconds=STEP_SECONDS)


class ScriptedScheduler(StaticScheduler):
    """Answers with plans made beforehand; without any left it plans nothing."""

    def __init__(self, *plans: StepPlan, has_work: bool = True) -> None:
        super().__init__(num_blocks=64, block_size=4, limits=EngineLimits())
        self.apply_policy(a_snapshot(), 1)
        super().plan_step(0.0)
        self._plans = list(plans)
        self._is_stuck = has_work
        self.planned_at: list[float] = []

    @property
    def has_work(self) -> bool:
        return bool(self._plans) or self._is_stuck

    def plan_step(self, now: float) -> StepPlan:
        self.planned_at.append(now)
        return self._plans.pop(0) if self._plans else StepPlan(step=0, revision=1)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def executor(clock: VirtualClock) -> SteadyExecutor:
    return SteadyExecutor(clock)


@pytest.fixture
def replay(clock: VirtualClock, executor: SteadyExecutor) -> Replay:
    scheduler = StaticScheduler(
        num_blocks=64, block_size=4, limits=EngineLimits(max_num_seqs=2, max_waiting=2)
    )
    scheduler.apply_policy(a_snapshot(), 1)
    scheduler.plan_step(0.0)
    return Replay(scheduler=scheduler, executor=executor, clock=clock)


def test_a_request_that_comes_in_a_step_is_submitted_after_it_and_waits_from_its_arrival(
    replay: Replay,
) -> None:
    log = replay.run(
        [
            Arrival(0.0, a_request(request_id="first", output=2)),
            Arrival(0.2, a_request(request_id="second", output=1)),
        ]
    )

    second = log.requests["second"]
    assert log.requests["first"].token_times == [0.5, 1.0]
    assert (second.arrived_at, second.admitted_at, second.token_times) == (0.2, 1.0, [1.5])
    assert second.ttft_seconds == pytest.approx(1.3)


def test_idle_time_passes_up_to_the_next_arrival(replay: Replay) -> None:
    log = replay.run([Arrival(100.0, a_request(request_id="late", output=2))])

    assert log.requests["late"].token_times == [100.5, 101.0]
    assert log.requests["late"].itl_seconds == [0.5]
    assert [step.began_at for step in log.steps] == [100.0, 100.5]
    assert log.busy_until == 101.0


def test_a_finished_request_has_its_tokens_and_its_reason(replay: Replay) -> None:
    replay.submit(a_request(request_id="one", output=3))
    replay.drain()

    trace = replay.log.requests["one"]
    assert trace.token_ids == [7, 7, 7]
    assert (trace.outcome, trace.finish_reason) == (Outcome.LENGTH, FinishReason.LENGTH)
    assert trace.ended_at == 1.5
    assert replay.log.output_tokens == 3


def test_a_refused_request_ends_at_once_with_its_rejection(replay: Replay) -> None:
    log = replay.run(Arrival(0.0, a_request(request_id=f"r{n}")) for n in range(3))

    trace = log.requests["r2"]
    assert trace.rejection is not None
    assert trace.rejection.code is RejectionCode.QUEUE_FULL
    assert (trace.outcome, trace.ended_at, trace.finish_reason) == (Outcome.REJECTED, 0.0, None)


def test_a_cancelled_request_gets_no_further_token(replay: Replay) -> None:
    replay.submit(a_request(request_id="one", output=10))
    replay.step()

    assert replay.cancel("one")
    assert not replay.cancel("one")
    replay.drain()
    assert len(replay.log.requests["one"].token_ids) == 1
    assert replay.log.requests["one"].outcome is Outcome.CANCELLED


def test_no_step_is_planned_from_the_time_limit_on(
    replay: Replay, executor: SteadyExecutor, clock: VirtualClock
) -> None:
    replay.submit(a_request(output=100))

    replay.run_until(1.2)

    assert executor.num_executed == 3
    assert clock.now() == 1.5


def test_with_nothing_to_do_the_time_limit_comes_all_the_same(
    replay: Replay, clock: VirtualClock
) -> None:
    replay.run_until(60.0)

    assert clock.now() == pytest.approx(60.0)


def test_whoever_watches_the_steps_may_submit_between_them(replay: Replay) -> None:
    def submit_once(plan: StepPlan) -> None:
        if plan.step == 1:
            replay.submit(a_request(request_id="second", output=1))

    log = replay.run([Arrival(0.0, a_request(output=1))], at_step=submit_once)

    assert log.requests["second"].arrived_at == 0.5
    assert log.requests["second"].is_finished


def test_the_scheduler_is_woken_when_it_asked_to_be(
    executor: SteadyExecutor, clock: VirtualClock
) -> None:
    scheduler = ScriptedScheduler(StepPlan(step=0, revision=1, wake_at=2.5), has_work=False)
    replay = Replay(scheduler=scheduler, executor=executor, clock=clock)

    replay.run([Arrival(3.0, a_request())])

    assert scheduler.planned_at == [0.0, 2.5, 3.0]


def test_a_plan_without_rows_is_executed_while_copies_are_in_flight(
    executor: SteadyExecutor, clock: VirtualClock
) -> None:
    scheduler = ScriptedScheduler(StepPlan(step=1, revision=1, num_open_fences=1), has_work=False)

    Replay(scheduler=scheduler, executor=executor, clock=clock).run()

    assert executor.num_executed == 1


def test_whoever_is_dropped_while_planning_has_ended(
    executor: SteadyExecutor, clock: VirtualClock
) -> None:
    plan = StepPlan(
        step=1,
        revision=1,
        admitted=("preempted",),
        preempted=("preempted",),
        ended=("full",),
        expired=(
            Expiry("queued", ExpiryCause.QUEUE_TIMEOUT),
            Expiry("slow", ExpiryCause.REQUEST_TIMEOUT),
        ),
        stopped=("stopped",),
    )
    replay = Replay(
        scheduler=ScriptedScheduler(plan, has_work=False), executor=executor, clock=clock
    )
    for name in ("preempted", "full", "queued", "slow", "stopped"):
        replay.submit(a_request(request_id=name))

    requests = replay.run().requests

    assert {name: trace.outcome for name, trace in requests.items()} == {
        "preempted": None,
        "full": Outcome.LENGTH,
        "queued": Outcome.QUEUE_TIMEOUT,
        "slow": Outcome.REQUEST_TIMEOUT,
        "stopped": Outcome.TENANT_STOPPED,
    }
    assert requests["preempted"].preemptions == 1


def test_a_resumed_request_was_admitted_when_it_first_was(
    executor: SteadyExecutor, clock: VirtualClock
) -> None:
    # A copy in flight lets time pass.
    plans = [StepPlan(step=n, revision=1, admitted=("one",), num_open_fences=1) for n in (1, 2)]
    replay = Replay(
        scheduler=ScriptedScheduler(*plans, has_work=False), executor=executor, clock=clock
    )
    replay.submit(a_request(request_id="one"))

    assert replay.run().requests["one"].admitted_at == 0.0


def test_work_that_can_never_run_is_an_error(executor: SteadyExecutor, clock: VirtualClock) -> None:
    replay = Replay(scheduler=ScriptedScheduler(), executor=executor, clock=clock)

    with pytest.raises(ReplayStalledError, match="nothing can run"):
        replay.drain()


def test_work_that_takes_too_many_steps_is_an_error(replay: Replay) -> None:
    replay.submit(a_request(output=10))

    with pytest.raises(ReplayStalledError, match="after 3 steps"):
        replay.drain(at_most_steps=3)


def test_a_scheduler_that_wants_to_be_woken_in_the_past_is_an_error(
    executor: SteadyExecutor,
) -> None:
    clock = VirtualClock(10.0)
    scheduler = ScriptedScheduler(StepPlan(step=0, revision=1, wake_at=9.0))

    with pytest.raises(ReplayStalledError, match="woken at 9 s") as raised:
        Replay(scheduler=scheduler, executor=executor, clock=clock).run()
    assert raised.value.now == 10.0
