"""Any order of arrivals, steps, cancels, policies, failures and copies keeps all invariants."""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tidegate_engine.core.plan import StepPlan
from tidegate_testing.scheduler_driver import RandomDriver
from tidegate_testing.scheduler_machine import QuietMachine, SchedulerMachine
from tidegate_testing.scheduler_policies import ANY

HAPPENED = (
    "rows",
    "copies",
    "swap_out",
    "swap_in",
    "preempted displaced",
    "preempted reclaimed",
    "preempted pressure",
    "resumed borrowing",
    "admitted within_nominal",
)
"""What has to happen, or the search has gone astray."""


@pytest.mark.parametrize(
    ("machine", "examples", "steps", "rules", "must_happen"),
    [
        pytest.param(SchedulerMachine, 180, 50, 7000, HAPPENED, id="any-policy"),
        # Few runs, however long, needn't meet everything.
        pytest.param(SchedulerMachine, 55, 150, 6000, (), id="any-policy-for-long"),
        pytest.param(QuietMachine, 180, 50, 7000, HAPPENED, id="kv-alone"),
    ],
)
def test_no_order_of_events_breaks_an_invariant(
    machine: type[SchedulerMachine],
    examples: int,
    steps: int,
    rules: int,
    must_happen: tuple[str, ...],
) -> None:
    watched = machine.counting_anew()
    run_state_machine_as_test(
        watched,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert watched.rules_run.total() >= rules
    assert [name for name in must_happen if not watched.happened[name]] == []


def plans_of(seed: int, *, repeats_policy: bool) -> list[StepPlan]:
    driver = RandomDriver(seed, given=(), drawn=ANY, checks_books=True)
    driver.world.repeats_policy = repeats_policy
    driver.run(60)
    return driver.world.plans


@pytest.mark.parametrize("seed", range(10))
def test_the_same_policy_again_changes_no_plan(seed: int) -> None:
    assert plans_of(seed, repeats_policy=True) == plans_of(seed, repeats_policy=False)
