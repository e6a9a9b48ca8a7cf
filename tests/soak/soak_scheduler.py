"""The scheduler's state machine for a million rules and more, in rounds of one seed each.

Rounds are told as they end. A violation is shrunk and shown, with the seed that finds it again:

    make soak-scheduler                                     a million rules
    make soak-scheduler ARGS="--seed 40"                    from another seed on
    make soak-scheduler ARGS="--rules 20000 --minutes 5"    fewer, or no longer
"""

import argparse
import sys
import time
from itertools import count

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.errors import HypothesisException
from hypothesis.stateful import run_state_machine_as_test

from tidegate_testing.scheduler_driver import RandomDriver
from tidegate_testing.scheduler_invariants import InvariantError
from tidegate_testing.scheduler_machine import QuietMachine, SchedulerMachine
from tidegate_testing.scheduler_policies import ANY, KV_ALONE, Trait

EXAMPLES, STEPS = 50, 60
RUNS, EVENTS = 40, 80


def run_round(number: int) -> int:
    """Run one round: in turns under any policy and where KV alone decides, searched and driven.

    Returns:
        How many rules were carried out.

    Raises:
        InvariantError: An invariant is broken.
    """
    is_driven, is_quiet = divmod(number % 4, 2)
    if is_driven:
        return drive(number, KV_ALONE if is_quiet else ANY)
    return search(number, QuietMachine if is_quiet else SchedulerMachine)


def drive(number: int, traits: list[Trait]) -> int:
    """Let random events happen, many of those that matter."""
    for run in range(RUNS):
        driver = RandomDriver(number * RUNS + run, given=(), drawn=traits, checks_books=True)
        driver.run(EVENTS)
    return RUNS * EVENTS


def search(number: int, machine: type[SchedulerMachine]) -> int:
    """Let hypothesis choose the events; it shrinks what it finds."""
    machine = machine.counting_anew()
    run_state_machine_as_test(
        seed(number)(machine),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.rules_run.total()


def main(arguments: list[str] | None = None) -> int:
    """Run rounds until enough rules have been carried out, or the time is up.

    Returns:
        0 when no invariant was broken and there were enough rules.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--rules", type=int, default=1_000_000, help="enough, over all rounds")
    parser.add_argument("--minutes", type=float, default=180.0, help="most time")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    done = 0
    for number in count(chosen.seed):
        try:
            done += run_round(number)
        except (InvariantError, HypothesisException) as error:
            notes = "\n".join(getattr(error, "__notes__", ()))
            say(f"{notes}\n{error}\nfound again by: make soak-scheduler ARGS='--seed {number}'")
            return 1
        minutes = (time.monotonic() - began) / 60
        say(f"seed {number}: {done:,} of {chosen.rules:,} rules in {minutes:.1f} minutes")
        if done >= chosen.rules:
            return 0
        if minutes >= chosen.minutes:
            say(f"the time is up; go on with: make soak-scheduler ARGS='--seed {number + 1}'")
            return 2
    return 0


def say(text: str) -> None:
    """Print at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
