"""More is asked of KV memory than there is."""

from dataclasses import dataclass

import pytest

from tidegate_engine.core.request import FinishReason, Rejection, RejectionCode, Request
from tidegate_policies.rules import KvEstimate, PreemptionMode, PreemptionRule
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import BLOCK_SIZE, Simulation, a_simulation, output_alone
from tidegate_testing.simulation_load import a_load, requests_of, steady_cost

STEPS_TO_PROGRESS = 50

ESTIMATES = pytest.mark.parametrize("estimate", list(KvEstimate))
MODES = pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])


def an_engine(
    mode: PreemptionMode,
    estimate: KvEstimate,
    *,
    blocks: int,
    max_preemptions: int = 3,
    check_every: int = 1,
) -> Simulation:
    rule = PreemptionRule(mode=mode, max_preemptions=max_preemptions)
    return a_simulation(
        a_snapshot(a_tenant(preemption=rule), kv_estimate=estimate),
        blocks=blocks,
        host_blocks=2 * blocks,
        cost=steady_cost(0.02, swap_block_seconds=0.0005),
        check_every=check_every,
    )


@dataclass
class Crowd:
    """Six requests of one tenant that would need 246 blocks together, where there are 100.

    Attributes:
        max_preemptions: Allowed of each.
        computed: Tokens computed for them, those that were computed again included.
        recomputed: Of these, tokens that had been computed before.
    """

    simulation: Simulation
    requests: list[Request]
    max_preemptions: int
    computed: int
    recomputed: int

    def assert_all_got_through(self) -> None:
        """All have their whole output, without many detours, and the engine never stood still."""
        for request in self.requests:
            trace = self.simulation.log.requests[request.request_id]
            assert trace.finish_reason is FinishReason.LENGTH
            assert len(trace.token_ids) == request.max_output_tokens
            assert trace.preemptions <= self.max_preemptions
        standing = 0
        for plan in self.simulation.plans:
            standing = 0 if any(row.samples for row in plan.rows) else standing + 1
            assert standing < STEPS_TO_PROGRESS


def a_crowd(
    mode: PreemptionMode,
    estimate: KvEstimate,
    *,
    history: int,
    history_output: int = 300,
    max_preemptions: int = 3,
) -> Crowd:
    """Let so many requests of so much output end, then send the six, and let them end, too."""
    simulation = an_engine(
        mode, estimate, blocks=100, max_preemptions=max_preemptions, check_every=5
    )
    simulation.accept(*a_load("acme", history, prompt=16, output=history_output, name="past"))
    simulation.drain()
    past_steps = len(simulation.plans)
    past_recomputed = simulation.scheduler.stats().tenants["acme"].recomputed_tokens

    requests = a_load("acme", 6, prompt=256, output=400)
    simulation.accept(*requests)
    simulation.drain()

    rows = [row for plan in simulation.plans[past_steps:] for row in plan.rows]
    recomputed = simulation.scheduler.stats().tenants["acme"].recomputed_tokens
    return Crowd(
        simulation,
        requests,
        max_preemptions,
        computed=sum(len(row.token_ids) for row in rows),
        recomputed=recomputed - past_recomputed,
    )


@MODES
def test_requests_that_outgrow_their_prediction_get_through_with_little_recomputed(
    mode: PreemptionMode,
) -> None:
    crowd = a_crowd(mode, KvEstimate.PREDICTED, history=50)

    crowd.assert_all_got_through()
    allowed = 0.0 if mode is PreemptionMode.SWAP else 0.15
    assert crowd.recomputed <= allowed * crowd.computed


@MODES
def test_requests_four_times_as_long_as_all_before_them_take_each_other_out_and_get_through(
    mode: PreemptionMode,
) -> None:
    crowd = a_crowd(mode, KvEstimate.PREDICTED, history=50, history_output=100)

    crowd.assert_all_got_through()
    assert crowd.simulation.preempted()
    allowed = 0.0 if mode is PreemptionMode.SWAP else 0.3
    assert crowd.recomputed <= allowed * crowd.computed


@MODES
def test_without_any_history_the_longest_outputs_are_expected_and_nobody_is_taken_out(
    mode: PreemptionMode,
) -> None:
    crowd = a_crowd(mode, KvEstimate.PREDICTED, history=0)

    crowd.assert_all_got_through()
    assert crowd.simulation.preempted() == []


@MODES
@pytest.mark.parametrize("max_preemptions", [1, 3])
def test_an_optimist_pays_for_more_company_with_preemptions_and_gets_through(
    mode: PreemptionMode, max_preemptions: int
) -> None:
    crowd = a_crowd(mode, KvEstimate.OPTIMISTIC, history=0, max_preemptions=max_preemptions)

    crowd.assert_all_got_through()
    assert len(crowd.simulation.preempted()) > 2
    if mode is PreemptionMode.SWAP:
        assert crowd.recomputed == 0
    else:
        assert 0 < crowd.recomputed <= 0.5 * crowd.computed


@MODES
@ESTIMATES
@pytest.mark.parametrize("final_blocks", [(20, 21), (10, 10, 10, 11), (2, 39), (6, 7, 8, 9, 11)])
def test_all_finish_when_together_they_need_one_block_more_than_there_is(
    mode: PreemptionMode, estimate: KvEstimate, final_blocks: tuple[int, ...]
) -> None:
    blocks = 40
    assert sum(final_blocks) == blocks + 1
    simulation = an_engine(mode, estimate, blocks=blocks)
    # Half of each is prompt; the last output token is never cached.
    sizes = [(8 * final, 8 * final + 1) for final in final_blocks]
    requests = requests_of("acme", sizes)

    simulation.accept(*requests)
    simulation.drain()

    for request in requests:
        output = simulation.output(request.request_id)
        assert len(output) == request.max_output_tokens
        assert output == output_alone(request, blocks=blocks, policy=a_snapshot())


@MODES
@ESTIMATES
def test_a_request_alone_whose_output_exceeds_the_pool_ends_with_length_and_the_engine_lives(
    mode: PreemptionMode, estimate: KvEstimate
) -> None:
    blocks, prompt = 40, 100
    simulation = an_engine(mode, estimate, blocks=blocks)
    endless, behind = requests_of("acme", [(prompt, 100_000), (64, 10)])

    simulation.accept(endless)
    simulation.drain()

    trace = simulation.log.requests[endless.request_id]
    assert trace.finish_reason is FinishReason.LENGTH
    # The whole pool is used, and the token sampled last is cached nowhere.
    assert len(trace.token_ids) == blocks * BLOCK_SIZE - prompt + 1
    assert trace.preemptions == 0

    simulation.accept(behind)
    simulation.drain()

    assert len(simulation.output(behind.request_id)) == 10
    assert simulation.used_blocks("acme") == 0


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize(
    ("borrowing_limit_percent", "cap_blocks"), [(None, 40), (50, 20)], ids=["pool", "tenant"]
)
def test_a_prompt_that_can_never_fit_is_refused_at_once_and_the_one_behind_it_runs(
    borrowing_limit_percent: int | None, cap_blocks: int, *, is_busy: bool
) -> None:
    simulation = a_simulation(
        a_snapshot(a_tenant(kv_borrowing_limit_percent=borrowing_limit_percent)), blocks=40
    )
    if is_busy:
        simulation.accept(a_request(prompt=16, output=50, request_id="before"))
        simulation.step()
    too_long = a_request(prompt=cap_blocks * BLOCK_SIZE, output=1)

    refusal = simulation.submit(too_long)

    assert isinstance(refusal, Rejection)
    assert refusal.code is RejectionCode.PROMPT_TOO_LONG
    assert str(cap_blocks * BLOCK_SIZE - 1) in refusal.message
    assert refusal.retry_after_seconds is None
    behind = a_request(prompt=64, output=5, request_id="behind")
    simulation.accept(behind)
    assert "behind" in [row.request_id for row in simulation.step().rows]
    simulation.drain()
    assert len(simulation.output("behind")) == 5
    assert simulation.output(too_long.request_id) == []


def test_a_prompt_that_just_fits_the_pool_gets_its_token() -> None:
    simulation = a_simulation(a_snapshot(), blocks=40)
    request = a_request(prompt=40 * BLOCK_SIZE - 1, output=100)

    simulation.accept(request)
    simulation.drain()

    # One that fills the pool's last place, and one that is cached nowhere.
    assert len(simulation.output(request.request_id)) == 2
