"""A request of a higher tier finds the engine full of lower ones."""

from dataclasses import dataclass

import pytest

from tidegate_engine.core.decisions import Decision
from tidegate_engine.core.request import Request
from tidegate_policies.rules import KvEstimate, PreemptionMode, PreemptionRule, WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.simulation import BLOCK_SIZE, Simulation, a_simulation, output_alone
from tidegate_testing.simulation_load import a_load, began_at, steady_cost

STEP_SECONDS = 0.02
BLOCK_SECONDS = 0.002  # a victim of 125 blocks is on its way for 12 steps
QUANTUM = 16

MODES = pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])


def policy(
    mode: PreemptionMode,
    *,
    gold_nominal_percent: int = 0,
    watermarks: WatermarkRule | None = None,
    kv_estimate: KvEstimate = KvEstimate.PREDICTED,
) -> PolicySnapshot:
    """Gold stands above batch, whose blocks are all borrowed."""
    rule = PreemptionRule(mode=mode, min_quantum_tokens=QUANTUM)
    return a_snapshot(
        a_tenant("gold", tier="gold", kv_nominal_percent=gold_nominal_percent),
        a_tenant("batch", tier="batch", preemption=rule),
        tiers={"gold": 10, "batch": 0},
        watermarks=watermarks,
        kv_estimate=kv_estimate,
    )


@dataclass
class Scene:
    """Batch requests in an engine whose steps all take as long, and gold's request.

    Attributes:
        gold_at: When it arrived.
        batch_blocks: What batch held then.
    """

    simulation: Simulation
    policy: PolicySnapshot
    batch: list[Request]
    gold: Request
    num_blocks: int
    gold_at: float = 0.0
    batch_blocks: int = 0

    def play(self) -> None:
        """Let gold arrive once all of batch are past their quantum; run until all have ended."""
        simulation = self.simulation
        simulation.accept(*self.batch)
        while min(len(simulation.output(r.request_id)) for r in self.batch) < QUANTUM:
            simulation.step()
        assert simulation.preempted() == []
        self.gold_at = simulation.clock.now()
        self.batch_blocks = simulation.used_blocks("batch")
        simulation.accept(self.gold)
        simulation.drain()

    @property
    def victims(self) -> list[Decision]:
        """Who was taken out, from the first to the last step."""
        return self.simulation.preempted()

    @property
    def waited_seconds(self) -> float:
        """Time from gold's arrival to the step that computes the first of it."""
        return began_at(self.simulation, self.gold) - self.gold_at

    @property
    def copied_seconds(self) -> float:
        """How long the first copy to the host took; 0 without one."""
        swaps = [swap for plan in self.simulation.plans for swap in plan.swap_out]
        return len(swaps[0].device_blocks) * BLOCK_SECONDS if swaps else 0.0

    def assert_gold_runs_at_once(self, mode: PreemptionMode) -> None:
        """Gold runs within two steps; when blocks are swapped, after the copy at the latest."""
        assert (self.copied_seconds > 0) == (mode is PreemptionMode.SWAP)
        # The step that begins at once is the first of the two.
        assert self.waited_seconds <= self.copied_seconds + STEP_SECONDS + 1e-9

    def assert_outputs_are_as_alone(self) -> None:
        """Everybody got the whole output; gold's and the victims' are those of an empty engine."""
        victims = [victim.request_id for victim in self.victims]
        for request in (self.gold, *self.batch):
            output = self.simulation.output(request.request_id)
            assert len(output) == request.max_output_tokens
            if request is self.gold or request.request_id in victims:
                assert output == output_alone(request, blocks=self.num_blocks, policy=self.policy)


def a_scene(
    snapshot: PolicySnapshot, *, blocks: int, places: int, batch: list[Request], gold: Request
) -> Scene:
    simulation = a_simulation(
        snapshot,
        blocks=blocks,
        host_blocks=blocks,
        max_num_seqs=places,
        max_batched_tokens=4096,
        cost=steady_cost(STEP_SECONDS, swap_block_seconds=BLOCK_SECONDS),
        check_every=10,
    )
    return Scene(simulation, snapshot, batch, gold, blocks)


@MODES
@pytest.mark.parametrize(("prompt", "output"), [(2000, 100), (1000, 1000)])
def test_gold_takes_the_place_of_exactly_one_batch_request_when_all_places_are_taken(
    mode: PreemptionMode, prompt: int, output: int
) -> None:
    scene = a_scene(
        policy(mode),
        blocks=1024,
        places=4,
        batch=a_load("batch", 4, prompt=prompt, output=output),
        gold=a_load("gold", 1, prompt=64, output=32)[0],
    )

    scene.play()

    scene.assert_gold_runs_at_once(mode)
    assert [victim.tenant for victim in scene.victims] == ["batch"]
    scene.assert_outputs_are_as_alone()


@MODES
def test_gold_takes_place_and_blocks_of_exactly_one_batch_request_when_both_are_taken(
    mode: PreemptionMode,
) -> None:
    scene = a_scene(
        policy(mode),
        blocks=640,  # 500 hold the prompts of batch; gold's needs 125
        places=4,
        batch=a_load("batch", 4, prompt=2000, output=200),
        gold=a_load("gold", 1, prompt=2000, output=32)[0],
    )

    scene.play()

    scene.assert_gold_runs_at_once(mode)
    assert [victim.tenant for victim in scene.victims] == ["batch"]
    scene.assert_outputs_are_as_alone()


@MODES
@pytest.mark.parametrize("gold_nominal_percent", [0, 40])
def test_gold_takes_the_blocks_of_one_of_two_long_batch_requests_that_hold_the_pool(
    mode: PreemptionMode, gold_nominal_percent: int
) -> None:
    scene = a_scene(
        policy(mode, gold_nominal_percent=gold_nominal_percent),
        blocks=200,
        places=64,
        batch=a_load("batch", 2, prompt=1264, output=100),
        gold=a_load("gold", 1, prompt=950, output=32)[0],
    )

    scene.play()

    assert scene.batch_blocks == 160
    scene.assert_gold_runs_at_once(mode)
    assert [victim.tenant for victim in scene.victims] == ["batch"]
    scene.assert_outputs_are_as_alone()


@MODES
@pytest.mark.parametrize("gold_nominal_percent", [0, 15])
def test_gold_that_needs_12_blocks_takes_out_at_most_2_of_8_batch_requests_of_10_blocks(
    mode: PreemptionMode, gold_nominal_percent: int
) -> None:
    snapshot = policy(
        mode,
        gold_nominal_percent=gold_nominal_percent,
        watermarks=WatermarkRule(low_percent=97, high_percent=99),
        kv_estimate=KvEstimate.OPTIMISTIC,
    )
    scene = a_scene(
        snapshot,
        blocks=82,
        places=64,
        batch=a_load("batch", 8, prompt=136, output=25),
        gold=a_load("gold", 1, prompt=12 * BLOCK_SIZE - 8, output=8)[0],
    )

    scene.play()

    scene.assert_gold_runs_at_once(mode)
    assert 1 <= len(scene.victims) <= 2
    scene.assert_outputs_are_as_alone()


@pytest.mark.parametrize(("weight", "victim"), [(100, "flood"), (2000, "quiet")])
def test_the_longest_queue_for_its_weight_gives_a_place_where_nobody_borrows(
    weight: int, victim: str
) -> None:
    rule = PreemptionRule(min_quantum_tokens=QUANTUM)
    snapshot = a_snapshot(
        a_tenant("gold", tier="gold"),
        a_tenant("flood", kv_nominal_percent=40, max_running=2, weight=weight, preemption=rule),
        a_tenant("quiet", kv_nominal_percent=40, max_running=2, preemption=rule),
        tiers={"gold": 10, "standard": 0},
    )
    # By cost per block freed quiet's would leave.
    flood = a_load("flood", 12, prompt=100, output=200)
    quiet = a_load("quiet", 3, prompt=800, output=200)
    gold = a_load("gold", 1, prompt=64, output=32)[0]
    scene = a_scene(snapshot, blocks=1024, places=4, batch=[*flood, *quiet], gold=gold)
    running = [*flood[:2], *quiet[:2]]
    simulation = scene.simulation
    simulation.accept(*scene.batch)
    while min(len(simulation.output(request.request_id)) for request in running) < QUANTUM:
        simulation.step()

    simulation.accept(gold)
    simulation.drain()

    assert [decision.tenant for decision in scene.victims] == [victim]
