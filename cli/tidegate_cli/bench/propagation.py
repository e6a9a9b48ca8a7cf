"""`tidegate bench propagation`: from a change in the API to every engine, and what that costs.

Real API server, Redis and operator; of the engines everything that policies pass through, many of
them in one process. Times begin before the request to the API server, in this process, and end when
the last engine obeys, by that engine's reading of the machine's monotonic clock.
"""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console

from tidegate_cli import report
from tidegate_cli.bench.propagation_lab import FIRST_WEIGHT, Change, Lab, at_once
from tidegate_cli.bench.propagation_part import Part
from tidegate_cli.bench.result import BenchResult
from tidegate_cli.errors import NotReadyError
from tidegate_cli.guard import guarded
from tidegate_cli.percentiles import percentile
from tidegate_operator.compiler import compile_pool
from tidegate_operator.garbage import spare_garbage_collection

_CHANGE_SECONDS = 60.0
_STATUSES_PER_SECOND = 10.0
"""Far fewer than the operator writes: so long is waited for the statuses of all policies."""

_QUIET_SECONDS = 2.0
_AFTERMATH_SECONDS = 6.0
"""The operator's framework keeps a task for each object that has changed, for 5 s."""

_COMPILES = 5


@dataclass(frozen=True, kw_only=True)
class PropagationSettings:
    """How much is measured.

    Attributes:
        policies: TenantPolicies of the pool, each with an API key in a Secret of its own; a burst
            changes each of them once.
        engines: Ready pods of the pool, and simulated engines.
        changes: Changes one by one, each after the one before is Programmed.
        idle_seconds: How long writes and processor time are counted while nothing changes.
        parts: Are measured; whatever else there is, is left out.
        seed: Chooses the changed policies.
    """

    policies: int = 1000
    engines: int = 100
    changes: int = 100
    idle_seconds: float = 60.0
    parts: tuple[Part, ...] = tuple(Part)
    seed: int = 1

    def quick(self) -> "PropagationSettings":
        """Return the same in small and short."""
        return replace(
            self,
            policies=min(self.policies, 50),
            engines=min(self.engines, 10),
            changes=min(self.changes, 10),
            idle_seconds=5.0,
        )

    @property
    def policy_names(self) -> tuple[str, ...]:
        """Names of the policies."""
        return tuple(f"tenant-{number:05d}" for number in range(self.policies))

    @property
    def num_objects(self) -> int:
        """Objects that the operator knows: policies, Secrets, pods, a pool, a tier, a namespace."""
        return 2 * self.policies + self.engines + 3

    @property
    def pods(self) -> tuple[str, ...]:
        """Names of the engines."""
        return tuple(f"engine-{number:03d}" for number in range(self.engines))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OneByOne:
    """Milliseconds of every change, and the mean compile."""

    in_force: list[float]
    programmed: list[float]
    compile_ms: float

    @property
    def results(self) -> dict[str, float]:
        """The figures by key."""
        return {
            "p50_ms": percentile(self.in_force, 50) or 0.0,
            "p99_ms": percentile(self.in_force, 99) or 0.0,
            "programmed_p50_ms": percentile(self.programmed, 50) or 0.0,
            "programmed_p99_ms": percentile(self.programmed, 99) or 0.0,
            "compile_ms": self.compile_ms,
        }


class PropagationBench:
    """One run on running parts."""

    def __init__(
        self, lab: Lab, settings: PropagationSettings, *, progress: Callable[[str], None]
    ) -> None:
        self._lab = lab
        self._settings = settings
        self._tell = progress
        self._rng = random.Random(settings.seed)
        self._patience = _CHANGE_SECONDS + settings.policies / _STATUSES_PER_SECOND

    async def run(self) -> BenchResult:
        """Measure the parts that the settings name.

        Raises:
            NotReadyError: A change didn't come into force, or become Programmed, in time.
        """
        settings, lab = self._settings, self._lab
        await self._everything_in_force()
        results: dict[str, float] = {"objects": float(settings.num_objects)}
        series: dict[str, list[float]] = {}
        if Part.CHANGES in settings.parts:
            one_by_one = await self._one_by_one()
            self._tell(f"{settings.changes} changes one by one: done")
            results |= one_by_one.results
            series["apply_to_in_force_ms"] = one_by_one.in_force
            series["apply_to_programmed_ms"] = one_by_one.programmed
        if Part.BURST in settings.parts:
            series["burst_ms"] = burst = await self._burst()
            self._tell(f"a burst of {settings.policies} changes: done")
            results["burst_p99_ms"] = percentile(burst, 99) or 0.0
        await self._quiet()
        if Part.REST in settings.parts:
            results |= await self._at_rest()
        results["operator_rss_mb"] = lab.operator_peak_megabytes()
        results["compile_from_scratch_ms"] = await self._compile_from_scratch()
        if Part.RESTART in settings.parts:
            results["restart_s"] = await self._restart()
        return BenchResult(
            bench="propagation",
            settings={
                "policies": settings.policies,
                "engines": settings.engines,
                "changes": settings.changes,
                "idle_seconds": settings.idle_seconds,
                "parts": [str(part) for part in settings.parts],
                "seed": settings.seed,
            },
            results=results,
            series=series,
        )

    async def _everything_in_force(self) -> None:
        created = [Change(policy, FIRST_WEIGHT, 1) for policy in self._settings.policy_names]
        for change in created:
            await self._in_force(change)
        self._tell("every engine obeys every policy")
        for change in created:
            await self._programmed(change)
        self._tell("every policy is Programmed")

    async def _in_force(self, change: Change) -> float:
        return await self._lab.crowd.in_force.when(
            change.tenant, change.weight, limit_seconds=self._patience
        )

    async def _programmed(self, change: Change) -> float:
        return await self._lab.policies.when_true(
            change.policy,
            "Programmed",
            generation=change.generation,
            limit_seconds=self._patience,
        )

    async def _one_by_one(self) -> _OneByOne:
        in_force, programmed = [], []
        count, seconds = await self._lab.compiles()
        for _ in range(self._settings.changes):
            began = time.monotonic()
            change = await self._lab.objects.change(self._any_policy())
            in_force.append((await self._in_force(change) - began) * 1000)
            programmed.append((await self._programmed(change) - began) * 1000)
        count_after, seconds_after = await self._lab.compiles()
        return _OneByOne(
            in_force=in_force,
            programmed=programmed,
            compile_ms=(seconds_after - seconds) / (count_after - count) * 1000,
        )

    async def _burst(self) -> list[float]:
        """Change all policies at once; times count from the API server's last answer."""
        changes = await at_once(map(self._lab.objects.change, self._settings.policy_names))
        answered = time.monotonic()
        return [max(0.0, await self._in_force(one) - answered) * 1000 for one in changes]

    async def _at_rest(self) -> dict[str, float]:
        seconds = self._settings.idle_seconds
        await asyncio.sleep(_AFTERMATH_SECONDS)
        self._tell(f"counting writes and processor time while nothing changes, {seconds:g} s")
        writes, cpu_seconds = await self._lab.objects.num_writes(), self._lab.operator_cpu_seconds()
        began = time.monotonic()
        await asyncio.sleep(seconds)
        cpu_seconds, seconds = (
            self._lab.operator_cpu_seconds() - cpu_seconds,
            time.monotonic() - began,
        )
        writes = await self._lab.objects.num_writes() - writes
        return {
            "idle_writes_per_min": writes * 60 / seconds,
            "idle_cpu_percent": 100 * cpu_seconds / seconds,
        }

    async def _compile_from_scratch(self) -> float:
        """Compile what the API server holds, here, as an operator does that has just started."""
        view = await self._lab.objects.view()
        (pool,) = view.pools.values()
        spare_garbage_collection()
        times = []
        for _ in range(_COMPILES):
            began = time.perf_counter()
            compile_pool(replace(view), pool)
            times.append((time.perf_counter() - began) * 1000)
        return median(times)

    async def _quiet(self) -> None:
        """Wait until no status was written for a while."""
        deadline = time.monotonic() + self._patience
        seen = -1
        while seen != self._lab.num_changes:
            if time.monotonic() > deadline:
                raise NotReadyError("no more writes to status", limit_seconds=self._patience)
            seen = self._lab.num_changes
            await asyncio.sleep(_QUIET_SECONDS)

    async def _restart(self) -> float:
        """Kill the operator, change a policy meanwhile, and time until all is settled again.

        That is when the change is Programmed, and the last status written that the start led to.
        """
        await self._lab.operator.stop(kill=True)
        change = await self._lab.objects.change(self._any_policy())
        self._tell("starting the operator anew")
        began = time.monotonic()
        await self._lab.operator.start()
        await self._programmed(change)
        await self._quiet()
        return self._lab.changed_at - began

    def _any_policy(self) -> str:
        return self._rng.choice(self._settings.policy_names)


async def run_propagation(
    console: Console,
    *,
    settings: PropagationSettings,
    progress: Callable[[str], None],
    json_file: Path | None,
) -> None:
    """Start everything, measure, print a table, write the JSON file, stop everything.

    Raises:
        CommandError: A change didn't come into force, or become Programmed, in time.
        DevClusterError: Something didn't start, or ended.
    """
    async with Lab.running(settings.policy_names, settings.pods, progress) as lab:
        bench = PropagationBench(lab, settings, progress=progress)
        result = await guarded(bench.run(), lab.raise_if_ended)
    console.print(report.figures_table("bench propagation", result.results))
    if json_file is not None:
        result.write(json_file)
