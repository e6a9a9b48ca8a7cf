"""Any order of arrivals, steps, cancels, policies, failures and copies keeps all invariants."""

from collections import Counter

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
    "deferred",
    "preempted displaced",
    "preempted reclaimed",
    "preempted pressure",
    "resumed borrowing",
    "admitted within_nominal",
)
"""What has to happen, or the search has gone astray."""

OFTEN = (
    "rows",
    "copies",
    "preempted displaced",
    "resumed borrowing",
    "admitted within_nominal",
)
"""Of that, what happens dozens of times in few runs, too.

What is drawn varies even without randomness: hypothesis draws constants, too, that it finds in the
source of the modules that happen to be imported. The rest is up to the driver, which doesn't.
"""


@pytest.mark.parametrize(
    ("machine", "examples", "steps", "must_happen"),
    [
        pytest.param(SchedulerMachine, 180, 50, OFTEN, id="any-policy"),
        pytest.param(SchedulerMachine, 55, 150, OFTEN, id="any-policy-for-long"),
        pytest.param(QuietMachine, 180, 50, HAPPENED, id="kv-alone"),
    ],
)
def test_no_order_of_events_breaks_an_invariant(
    machine: type[SchedulerMachine],
    examples: int,
    steps: int,
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
    # Those that are cut short, for example where what is drawn repeats what was, are fewer.
    assert watched.rules_run.total() >= examples * steps / 2
    assert [name for name in must_happen if not watched.happened[name]] == []


def test_long_runs_meet_everything_and_break_no_invariant() -> None:
    happened = Counter[str]()
    for seed in range(24):
        driver = RandomDriver(seed, given=(), drawn=ANY, checks_books=False)
        driver.run(150)
        happened += driver.world.happened
    watched = (*HAPPENED, "held itl_target")
    assert [name for name in watched if happened[name] < 3] == []


def plans_of(seed: int, *, repeats_policy: bool) -> list[StepPlan]:
    driver = RandomDriver(seed, given=(), drawn=ANY, checks_books=True)
    driver.world.repeats_policy = repeats_policy
    driver.run(60)
    return driver.world.plans


@pytest.mark.parametrize("seed", range(10))
def test_the_same_policy_again_changes_no_plan(seed: int) -> None:
    assert plans_of(seed, repeats_policy=True) == plans_of(seed, repeats_policy=False)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(604561, id="whom a victim makes way for had its prefix in common with it"),
        pytest.param(804250, id="a copy in flight is the last of a tenant that is gone"),
    ],
)
def test_a_run_that_once_broke_an_invariant_does_no_more(seed: int) -> None:
    RandomDriver(seed, given=(), drawn=ANY, checks_books=True).run(80)
