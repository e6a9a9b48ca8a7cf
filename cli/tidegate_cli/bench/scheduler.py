"""`tidegate bench scheduler`: what deciding costs, apart from computing.

The product's scheduler with answers that were made beforehand: every running request decodes,
nobody finishes, and time is a number that grows by a step's. Only the calls into the scheduler are
timed, with the garbage collector as an engine has it: on.
"""

import gc
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

from rich.console import Console

from tidegate_cli import report
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.figures import quantiles
from tidegate_cli.bench.result import BenchResult
from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import SampledToken, StepPlan, StepResult
from tidegate_engine.core.request import Request
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.core.scheduler import Scheduler
from tidegate_policies.rules import ServiceRule, TenantRule, TierRule
from tidegate_policies.snapshot import PolicySnapshot

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 256
_OUTPUT_TOKENS = 4096
_WAITING_PROMPT = (0,) * 64
_WAITING_OUTPUT_TOKENS = 256
_STEP_SECONDS = 0.02
_MOST_STEPS_TO_FILL = 5000
_SAMPLING = SamplingParams(temperature=0.0)
_BURST = 20
"""Steps in a row before the other side has its turn, so that both meet the same noise."""


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """How much is measured.

    Attributes:
        running: Requests that decode in the main measurement.
        many_running: And in the one that has more.
        waiting: Requests queued behind them, of all tenants.
        steps: Steps timed on each side.
        cancels: Waiting requests cancelled one by one.
        policy_rounds: Snapshots put in force.
        seed: Chooses who is cancelled.
    """

    running: int = 256
    many_running: int = 1000
    waiting: int = 100_000
    tenants: int = 1000
    steps: int = 1000
    cancels: int = 1000
    policy_rounds: int = 20
    seed: int = 1

    def quick(self) -> "SchedulerSettings":
        """Return the same with fewer measurements."""
        return replace(self, steps=100, cancels=200, policy_rounds=5)


class StepTimes(NamedTuple):
    """What one step cost the scheduler, in microseconds."""

    plan_us: float
    commit_us: float

    @property
    def total_us(self) -> float:
        """Planning and committing."""
        return self.plan_us + self.commit_us


class SteadyScheduler:
    """A scheduler whose batch only decodes, behind which others wait."""

    def __init__(self, *, running: int, waiting: int, tenants: int) -> None:
        """Fill the batch, then the queues.

        Raises:
            BenchError: The batch didn't fill up, or a request was refused.
        """
        self._running = running
        self._now = 0.0
        self._revision = 1
        blocks_each = -(-(2 * _PROMPT_TOKENS + _OUTPUT_TOKENS) // _BLOCK_SIZE)
        self.scheduler = Scheduler(
            # Half more than all need at their longest: the watermarks have no say here.
            num_blocks=running * blocks_each * 3 // 2,
            block_size=_BLOCK_SIZE,
            limits=EngineLimits(
                max_num_seqs=running, max_batched_tokens=8192, max_waiting=2 * (running + waiting)
            ),
            num_host_blocks=0,
            costs=ExecutorCosts(),
        )
        self.scheduler.apply_policy(policy_of(tenants), 1)
        self.scheduler.plan_step(self._now)
        names = tenant_names(tenants)
        first = [_running_request(n, names[n % tenants]) for n in range(running)]
        self._result = StepResult(
            tokens={request.request_id: SampledToken(token_id=1) for request in first}
        )
        self._submit(first)
        self._fill()
        behind = [
            _request(running + n, names[n % tenants], _WAITING_PROMPT, _WAITING_OUTPUT_TOKENS)
            for n in range(waiting)
        ]
        self._submit(behind)
        self.waiting_ids = [request.request_id for request in behind]

    def step(self) -> StepTimes:
        """Time a step in which everybody decodes.

        Raises:
            BenchError: Somebody didn't.
        """
        plan, times = self._timed_step()
        if not self._is_steady(plan):
            raise BenchError(
                f"step {plan.step} has {len(plan.rows)} rows instead of {self._running} decodes"
            )
        return times

    def cancel_us(self, request_id: str) -> float:
        """Time the cancel of a request."""
        began = perf_counter_ns()
        self.scheduler.cancel(request_id, self._now)
        return (perf_counter_ns() - began) / 1000

    def policy_us(self, snapshot: PolicySnapshot) -> float:
        """Time the step that puts a snapshot in force: leaving it in the mailbox, and planning."""
        self._revision += 1
        began = perf_counter_ns()
        self.scheduler.apply_policy(snapshot, self._revision)
        left_us = (perf_counter_ns() - began) / 1000
        return left_us + self.step().plan_us

    def _timed_step(self) -> tuple[StepPlan, StepTimes]:
        began = perf_counter_ns()
        plan = self.scheduler.plan_step(self._now)
        planned = perf_counter_ns()
        self._now += _STEP_SECONDS
        executed = perf_counter_ns()
        self.scheduler.commit_step(plan, self._result, self._now)
        committed = perf_counter_ns()
        return plan, StepTimes((planned - began) / 1000, (committed - executed) / 1000)

    def _is_steady(self, plan: StepPlan) -> bool:
        return len(plan.rows) == self._running and all(row.is_decode for row in plan.rows)

    def _fill(self) -> None:
        for _ in range(_MOST_STEPS_TO_FILL):
            if self._is_steady(self._timed_step()[0]):
                return
        raise BenchError(f"the batch didn't fill up to {self._running} decodes")

    def _submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            rejection = self.scheduler.submit(request, self._now)
            if rejection is not None:
                raise BenchError(f"{request.request_id} was refused: {rejection.message}")


def tenant_names(tenants: int) -> list[str]:
    """Return the names of so many tenants."""
    return [f"tenant-{number:04d}" for number in range(tenants)]


def policy_of(tenants: int, *, added_weight: int = 0) -> PolicySnapshot:
    """Build a snapshot of one tier, in which each tenant has targets and a weight of its own."""
    service = ServiceRule(ttft_seconds=2.0, itl_seconds=0.05)
    return PolicySnapshot.of(
        "bench/scheduler",
        tiers=[TierRule(name="standard", value=0)],
        tenants=[
            TenantRule(
                tenant=name,
                policy=f"bench/{name}",
                tier="standard",
                weight=100 + number % 7 + added_weight,
                service=service,
            )
            for number, name in enumerate(tenant_names(tenants))
        ],
    )


def measure(settings: SchedulerSettings, progress: Callable[[str], None]) -> BenchResult:
    """Measure everything.

    Raises:
        BenchError: The scheduler's batch was not what is to be measured.
    """
    progress(f"queueing {settings.waiting} requests of {settings.tenants} tenants")
    idle = SteadyScheduler(running=settings.running, waiting=0, tenants=settings.tenants)
    busy = SteadyScheduler(
        running=settings.running, waiting=settings.waiting, tenants=settings.tenants
    )
    many = SteadyScheduler(running=settings.many_running, waiting=0, tenants=settings.tenants)
    progress(f"{settings.steps} steps of each")
    with_queue, without, with_many = _in_turn([busy, idle, many], steps=settings.steps)
    chosen = random.Random(settings.seed).sample(busy.waiting_ids, settings.cancels)
    cancels_us = [busy.cancel_us(request_id) for request_id in chosen]
    policies_us = [
        idle.policy_us(policy_of(settings.tenants, added_weight=1 + number))
        for number in range(settings.policy_rounds)
    ]
    plain_us = median(times.plan_us for times in without)
    totals = {
        "plan_commit_us": [times.total_us for times in with_queue],
        "plan_commit_us_idle_queue": [times.total_us for times in without],
        "plan_commit_us_1000": [times.total_us for times in with_many],
        "cancel_us": cancels_us,
    }
    results = {name: median(values) for name, values in totals.items()}
    ratio = results["plan_commit_us"] / results["plan_commit_us_idle_queue"]
    return BenchResult(
        bench="scheduler",
        settings={
            **vars(settings),
            "block_size": _BLOCK_SIZE,
            "is_gc_enabled": gc.isenabled(),
            "peer": _peer(),
        },
        results={
            "plan_commit_us": results["plan_commit_us"],
            "plan_commit_us_idle_queue": results["plan_commit_us_idle_queue"],
            "waiting_ratio": ratio,
            "plan_commit_us_1000": results["plan_commit_us_1000"],
            "cancel_us": results["cancel_us"],
            "policy_apply_ms": max(0.0, median(policies_us) - plain_us) / 1000,
        },
        series={
            **{f"{name}_p50_p90_p99": quantiles(values) for name, values in totals.items()},
            "plan_us_p50_p90_p99": quantiles(times.plan_us for times in with_queue),
            "commit_us_p50_p90_p99": quantiles(times.commit_us for times in with_queue),
            **totals,
            "policy_step_us": policies_us,
        },
    )


def run_scheduler(
    console: Console,
    *,
    settings: SchedulerSettings,
    progress: Callable[[str], None],
    json_file: Path | None,
) -> None:
    """Measure, print a table, write the JSON file.

    Raises:
        BenchError: The scheduler's batch was not what is to be measured.
    """
    result = measure(settings, progress)
    console.print(report.figures_table("bench scheduler", result.results))
    console.print(
        f"medians of {settings.steps} steps, {settings.cancels} cancels and"
        f" {settings.policy_rounds} policies; seed {settings.seed}; peer: {_peer()}"
    )
    if json_file is not None:
        result.write(json_file)


def _in_turn(schedulers: Sequence[SteadyScheduler], *, steps: int) -> tuple[list[StepTimes], ...]:
    """Time so many steps of each scheduler, a few in a row."""
    times: tuple[list[StepTimes], ...] = tuple([] for _ in schedulers)
    while len(times[0]) < steps:
        for scheduler, of_scheduler in zip(schedulers, times, strict=True):
            of_scheduler += [scheduler.step() for _ in range(_BURST)]
    return times


def _running_request(number: int, tenant: str) -> Request:
    # Lengths differ, so that not all need their next block in the same step; first tokens differ,
    # so that no prompt is found in the prefix cache.
    length = _PROMPT_TOKENS + number * 7 % 64
    return _request(number, tenant, (number, *(0,) * (length - 1)), _OUTPUT_TOKENS)


def _request(number: int, tenant: str, prompt_ids: tuple[int, ...], output: int) -> Request:
    return Request(
        request_id=f"request-{number:06d}",
        tenant=tenant,
        prompt_ids=prompt_ids,
        max_output_tokens=output,
        sampling=_SAMPLING,
    )


def _peer() -> str:
    return "vllm is installed, not compared" if find_spec("vllm") else "none, not compared"
