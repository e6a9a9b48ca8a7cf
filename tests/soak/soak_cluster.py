"""Policy changes and requests while everything fails again and again, with real processes.

Two operators, three simulated engines, Redis and the control plane are killed, stopped, cut off
and replaced at random, two failures at a time. Afterwards everything must have come to rest: each
object at its newest generation, each engine at the newest revision, no request lost but those in a
killed engine, no revision gone back:

    make soak-cluster                                  ten minutes
    make soak-cluster ARGS="--minutes 60 --seed 7"     longer, with other failures
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tidegate_devcluster.assets import Assets
from tidegate_testing.failures import Failures, Kubelet
from tidegate_testing.fleet import Fleet
from tidegate_testing.fleet_load import (
    PolicyChanges,
    Requests,
    Revisions,
    a_key_of_each_tenant,
    unsettled,
)

NUM_OPERATORS, NUM_ENGINES = 2, 3
NUM_CLIENTS, NUM_TROUBLES = 4, 2
STEP_SECONDS = 0.02
SETTLE_SECONDS = 120.0
TOLD_LINES = 20


def soak(fleet: Fleet, *, minutes: float, seed: int) -> list[str]:
    """Fail for so many minutes, then wait for rest; returns what is wrong."""
    kubelet = Kubelet(fleet)
    changes = PolicyChanges(fleet, seed=seed)
    requests = Requests(fleet, kubelet)
    revisions = Revisions(fleet)
    failures = Failures(fleet, kubelet, seed=seed, tell=say)
    starting, failing, ending = (threading.Event() for _ in range(3))
    with ThreadPoolExecutor(NUM_CLIENTS + NUM_TROUBLES + 3) as pool:
        works: list[Future[None]] = []

        def begin(work: Callable[..., None], *arguments: object) -> Future[None]:
            works.append(pool.submit(work, *arguments))
            return works[-1]

        try:
            begin(kubelet.run, ending)
            changes.begin()
            wait_for_rest(fleet, changes, works)
            say("everything is in force; failures begin")
            begin(revisions.run, ending)
            changing = begin(changes.run, failing)
            asking = [begin(requests.run, failing, seed + n) for n in range(NUM_CLIENTS)]
            troubles = [begin(failures.run, failing, n) for n in range(NUM_TROUBLES)]
            last = time.monotonic() + minutes * 60
            while time.monotonic() < last and not any(work.done() for work in works):
                starting.wait(1.0)
            failing.set()
            for work in (*troubles, changing, *asking):
                work.result()
            say("no failures any more; waiting for rest")
            wrong = wait_for_rest(fleet, changes, works)
        finally:
            failing.set()
            ending.set()
    say(f"failures: {dict(sorted(failures.done.items()))}")
    say(f"changes: {changes.count:,}; revision {fleet.stored_revision():,}")
    say(
        f"requests: {requests.answered:,} answered, {requests.died:,} died with a killed engine, ",
        end="",
    )
    say(f"{requests.late:,} turned away by one that had just left")
    wrong += [*kubelet.problems, *requests.lost, *revisions.went_back]
    return wrong + [line for member in fleet.members for line in crashes(member.name, member.log)]


def wait_for_rest(fleet: Fleet, changes: PolicyChanges, works: list[Future[None]]) -> list[str]:
    """Return what has not come to rest in time."""
    began = time.monotonic()
    while wrong := unsettled(fleet, changes.wanted):
        for work in works:
            if work.done():
                work.result()
        if time.monotonic() > began + SETTLE_SECONDS:
            return wrong
    say(f"at rest after {time.monotonic() - began:.1f} s")
    return []


def crashes(name: str, log: str) -> list[str]:
    """Return the ends of the tracebacks in a log."""
    blocks = log.split("Traceback (most recent call last):\n")[1:]
    return [f"{name} crashed: {json.dumps(block[:1500])}" for block in blocks]


def say(text: str, end: str = "\n") -> None:
    """Print at once."""
    sys.stdout.write(f"{text}{end}")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run a fleet of its own; 0 when nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of failures and changes")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long failures go on")
    parser.add_argument("--keep-logs", type=Path, help="a folder that stays")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        fleet = Fleet(
            chosen.keep_logs or Path(name),
            Assets.from_environment(),
            num_operators=NUM_OPERATORS,
            num_engines=NUM_ENGINES,
            step_seconds=STEP_SECONDS,
        )
        with fleet:
            a_key_of_each_tenant(fleet)
            wrong = soak(fleet, minutes=chosen.minutes, seed=chosen.seed)
    for line in wrong[:TOLD_LINES]:
        say(f"WRONG: {line}")
    say(f"{len(wrong)} things are wrong" if wrong else "nothing is wrong")
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(main())
