"""First arrivals may be held for a moment, so that a batch fills."""

import pytest

from tidegate_engine.core.decisions import Reason
from tidegate_policies.rules import BatchingRule, ServiceRule, StopPolicy, TierRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import Simulation, a_prompt, a_simulation

WINDOW = 0.5
PLACES = 4


def a_policy(
    *, pool_window: float | None = WINDOW, tier_window: float | None = None
) -> PolicySnapshot:
    return a_snapshot(
        a_tenant("acme"),
        a_tenant("gold", tier="gold"),
        a_tenant("prompt", service=ServiceRule(ttft_seconds=0.3)),
        tiers={
            "gold": TierRule(name="gold", value=10, wait_window_seconds=0.0),
            "standard": TierRule(name="standard", value=0, wait_window_seconds=tier_window),
        },
        batching=BatchingRule(max_num_seqs=PLACES, wait_window_seconds=pool_window),
    )


@pytest.fixture
def engine() -> Simulation:
    return a_simulation(a_policy(), blocks=100)


def arrive(engine: Simulation, *names: str, tenant: str = "acme", output: int = 4) -> None:
    for number, name in enumerate(names):
        prompt = a_prompt(number, 20)
        engine.accept(a_request(tenant, prompt=prompt, output=output, request_id=name))


def test_a_first_arrival_is_held_until_the_window_ends(engine: Simulation) -> None:
    arrive(engine, "first")
    plan = engine.step()
    assert not plan.rows
    assert plan.wake_at == WINDOW
    engine.clock.advance(0.3)
    arrive(engine, "second")
    plan = engine.step()  # the window is the first one's
    assert not plan.rows
    assert plan.wake_at == WINDOW
    engine.clock.advance(0.2)
    assert engine.step().admitted == ("first", "second")


@pytest.mark.parametrize("is_alone", [True, False])
def test_what_a_hold_kept_has_waited_since_it_arrived(
    engine: Simulation, *, is_alone: bool
) -> None:
    def hold(stop: StopPolicy) -> None:
        standard = TierRule(name="standard", value=0, wait_window_seconds=WINDOW)
        held = a_tenant("kept", stop=stop)
        batching = BatchingRule(max_num_seqs=PLACES)
        policy = a_snapshot(a_tenant("acme"), held, tiers={"standard": standard}, batching=batching)
        engine.scheduler.apply_policy(policy, 2 if stop is StopPolicy.HOLD else 3)
        engine.step()

    hold(StopPolicy.HOLD)
    arrive(engine, "kept", tenant="kept")
    engine.step()
    engine.clock.advance(0.4)
    if not is_alone:
        arrive(engine, "later")
        engine.step()
    hold(StopPolicy.NONE)
    assert engine.step().wake_at == pytest.approx(WINDOW)
    engine.clock.advance(0.1)
    assert set(engine.step().admitted) == {"kept", *([] if is_alone else ["later"])}


def test_the_window_of_a_replay_passes_by_itself(engine: Simulation) -> None:
    arrive(engine, "first")
    engine.drain()
    assert engine.log.requests["first"].admitted_at == WINDOW


def test_enough_arrivals_for_the_free_places_end_the_window(engine: Simulation) -> None:
    arrive(engine, "a", "b", "c")
    assert not engine.step().admitted
    arrive(engine, "d")
    assert engine.step().admitted == ("a", "b", "c", "d")


def test_a_higher_tiers_request_ends_the_window_of_a_lower_tier(engine: Simulation) -> None:
    arrive(engine, "first")
    assert not engine.step().admitted
    arrive(engine, "gold", tenant="gold")
    assert {"gold", "first"} == {*engine.step().admitted, *engine.step().admitted}
    assert engine.clock.now() < WINDOW


def test_a_first_token_that_would_be_late_ends_the_window(engine: Simulation) -> None:
    arrive(engine, "first")
    assert engine.step().wake_at == WINDOW
    arrive(engine, "prompt", tenant="prompt")
    wake_at = engine.step().wake_at
    assert wake_at is not None
    # Both prompts are read in a step of 10 ms and 0.1 ms a token; another may be under way.
    assert 0.3 - 2 * 0.014 <= wake_at <= 0.3 - 0.014
    engine.drain()
    trace = engine.log.requests["prompt"]
    assert trace.ttft_seconds is not None
    assert trace.ttft_seconds <= 0.3


def test_a_tiers_own_window_goes_before_the_pools() -> None:
    engine = a_simulation(a_policy(pool_window=5.0, tier_window=0.2), blocks=100)
    arrive(engine, "first")
    assert engine.step().wake_at == 0.2
    engine.obey(a_policy(pool_window=5.0, tier_window=0.0))
    assert engine.step().admitted == ("first",)


def test_the_window_begins_when_the_first_came(engine: Simulation) -> None:
    engine.clock.advance(1.0)
    arrive(engine, "now")
    assert engine.step().wake_at == 1.0 + WINDOW
    engine.accept(a_request(prompt=a_prompt(9, 20), request_id="before", arrived_at=0.9))
    assert engine.step().wake_at == 0.9 + WINDOW


def test_without_a_window_nobody_is_held() -> None:
    engine = a_simulation(a_policy(pool_window=None), blocks=100)
    arrive(engine, "first")
    assert engine.step().admitted == ("first",)


def test_a_held_request_is_no_obstacle_to_what_runs(engine: Simulation) -> None:
    arrive(engine, "a", "b", "c", "d", output=60)
    engine.steps(3)
    engine.cancel("c")
    engine.cancel("d")
    arrive(engine, "held")
    plan = engine.step()
    assert [row.request_id for row in plan.rows] == ["a", "b"]
    assert plan.wake_at == pytest.approx(engine.log.requests["held"].arrived_at + WINDOW)
    arrive(engine, "one more")
    assert engine.step().admitted == ("held", "one more")  # as many as there are places


def test_a_new_window_begins_with_the_next_first_arrival(engine: Simulation) -> None:
    arrive(engine, "first")
    engine.drain()
    began = engine.clock.now()
    arrive(engine, "second")
    plan = engine.step()
    assert plan.wake_at == pytest.approx(began + WINDOW)
    assert not any(d.reason is Reason.BORROWING for d in plan.decisions)
