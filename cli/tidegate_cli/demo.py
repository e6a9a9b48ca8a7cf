"""The demonstration: real traffic, a changed policy while it runs, and what changed for whom."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tidegate_cli import report
from tidegate_cli.bench.result import BenchResult
from tidegate_cli.errors import ExpectationError, TrafficError
from tidegate_cli.local import LocalSettings, LocalTidegate
from tidegate_cli.memory import resident_megabytes
from tidegate_cli.phases import phase_between, read_terms, read_totals
from tidegate_cli.report import Phase
from tidegate_cli.traces import (
    TraceRequest,
    arena_trace,
    fit_window,
    label_clients,
    loop_window,
    relabel,
    scale_lengths,
    summarize_lengths,
)
from tidegate_cli.traffic import Traffic

DEMANDS = {"gold": 0.2, "silver": 0.4, "batch": 0.4}
"""Parts of the service asked for. At twice what the engines can do, gold asks for a little more
than an equal share, silver and batch for much more."""

ENGINES = LocalSettings(
    kv_blocks=48, max_num_seqs=12, engine_environment={"TIDEGATE_MAX_BATCHED_TOKENS": "48"}
)
"""So little KV memory that long requests now and then push others out, and short steps."""

PROGRAMMED_SECONDS = 30.0
LEAST_RISE_POINTS = 10.0
"""By how much silver's share of its tier has to rise when its weight triples (25 are due)."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """How long and how hard.

    Attributes:
        load: Service asked for, as a multiple of what the engines can do.
        length_factor: Recorded lengths are multiplied by this, to fit the small model.
        warm_up_seconds: Before the capacity is measured.
        lead_in_seconds: Of traffic before the first phase, for queues to grow: weights divide
            what tenants wait for, and nothing else.
        phase_seconds: Before the change, and after it; the same requests come in both.
    """

    load: float = 2.0
    length_factor: float = 0.125
    warm_up_seconds: float = 4.0
    capacity_seconds: float = 10.0
    lead_in_seconds: float = 15.0
    phase_seconds: float = 50.0
    seed: int = 1

    @classmethod
    def quick(cls) -> "DemoSettings":
        """Return settings that show the same with less precision."""
        return cls(
            warm_up_seconds=2.0,
            capacity_seconds=5.0,
            lead_in_seconds=10.0,
            phase_seconds=20.0,
        )


@dataclass(frozen=True, kw_only=True)
class ChangeTimes:
    """How long the change took, from just before `kubectl apply`, in seconds.

    Attributes:
        applied: Until kubectl had returned.
        programmed: Until a watch showed Programmed=True for all changed policies.
        waited: Until `kubectl wait`, started after the apply, had returned.
    """

    applied: float
    programmed: float
    waited: float


class Demo:
    """One run of the demonstration on a running Tidegate."""

    def __init__(self, tidegate: LocalTidegate, settings: DemoSettings, console: Console) -> None:
        self._tidegate = tidegate
        self._settings = settings
        self._console = console
        self._scaled = scale_lengths(arena_trace(), settings.length_factor)

    async def run(self) -> BenchResult:
        """Drive traffic, change the policy, print and return what was measured.

        Raises:
            ExpectationError: What the demonstration has to show did not hold.
        """
        capacity = await self._measure_capacity()
        window = self._window(capacity)
        async with self._traffic() as traffic:
            traffic.start(
                loop_window(
                    window,
                    seconds=self._settings.phase_seconds,
                    lead_in_seconds=self._settings.lead_in_seconds,
                )
            )
            self._say(f"traffic runs; {self._settings.lead_in_seconds:g} s for queues to grow ...")
            await asyncio.sleep(self._settings.lead_in_seconds)
            before = await self._phase("before", traffic)
            times = await self._change()
            after = await self._phase("after", traffic)
            memory = resident_megabytes()
            errors = traffic.errors()
        await self._show(before, after, times)
        self._console.print(report.memory_table(memory))
        unmet = unmet_expectations(before, after)
        if errors:
            unmet.append(f"{len(errors)} requests failed, the first of {errors[0]}")
        if unmet:
            raise ExpectationError(unmet)
        return self._result(before, after, times, memory, capacity=capacity)

    def _traffic(self) -> Traffic:
        return Traffic(
            base_url=self._tidegate.base_url,
            model=self._tidegate.model,
            keys=self._tidegate.keys,
            seed=self._settings.seed,
        )

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True)

    def _window(self, capacity: float) -> tuple[TraceRequest, ...]:
        """Choose as much of the trace as overloads the engines for one phase, and describe it."""
        seconds = self._settings.phase_seconds
        asked = self._settings.load * capacity
        clients = fit_window(self._scaled, service=asked * seconds, seconds=seconds)
        window = relabel(clients, label_clients(clients, DEMANDS))
        self._say(
            f"The engines give {capacity:.0f} cost units/s (1 per prompt token, 2 per output"
            f" token); the traffic asks for {self._settings.load:g} times that.\n"
            "Traffic: Chatbot Arena, recorded (Sheng et al., OSDI 2024); its first"
            f" {len(window)} requests in {seconds:g} s, before the change and again after it.\n"
            f"Lengths are multiplied by {self._settings.length_factor:g}. Its"
            f" {len({one.tenant for one in clients})} clients are labelled gold, silver and batch"
            " by us, so that gold asks for a fifth of the service."
        )
        by_tenant = {
            tenant: summarize_lengths([one for one in window if one.tenant == tenant])
            for tenant in DEMANDS
        }
        self._console.print(report.lengths_table({**by_tenant, "all": summarize_lengths(window)}))
        return window

    async def _measure_capacity(self) -> float:
        """Return the service per second that the engines give when they have all they can take."""
        settings = self._tidegate.settings
        self._say("measuring what the engines can do with this traffic ...")
        plan = relabel(self._scaled, label_clients(self._scaled, DEMANDS))
        async with self._traffic() as traffic:
            for request in plan[: 6 * settings.replicas * settings.max_num_seqs]:
                traffic.send(request)
            await asyncio.sleep(self._settings.warm_up_seconds)
            first = await read_totals(self._tidegate)
            await asyncio.sleep(self._settings.capacity_seconds)
            last = await read_totals(self._tidegate)
            if errors := traffic.errors():
                raise TrafficError(f"{len(errors)} requests failed, the first of {errors[0]}")
        capacity = (last.service - first.service) / (last.at - first.at)
        if capacity <= 0:
            raise TrafficError("the engines served nothing")
        return capacity

    async def _phase(self, name: str, traffic: Traffic) -> Phase:
        seconds = self._settings.phase_seconds
        self._say(f"{name} the change: {seconds:g} s of traffic ...")
        terms = await read_terms(self._tidegate)
        first = await read_totals(self._tidegate)
        await asyncio.sleep(seconds)
        last = await read_totals(self._tidegate)
        return phase_between(name, first, last, calls=traffic.calls, terms=terms)

    async def _change(self) -> ChangeTimes:
        path = self._tidegate.policies / "changes" / "gold-first.yaml"
        self._say(f"kubectl apply -f {path.name} (gold to the tier premium, silver's weight x3)")
        clock = asyncio.get_running_loop().time
        async with self._tidegate.watch("tenantpolicies") as watch:
            began = clock()
            await self._tidegate.kubectl("apply", "-f", str(path))
            applied = clock()
            changed = await self._tidegate.get("-f", str(path))
            names = [f"tenantpolicy/{item['metadata']['name']}" for item in changed["items"]]
            await self._tidegate.kubectl(
                "wait", *names, "--for=condition=Programmed", f"--timeout={PROGRAMMED_SECONDS:g}s"
            )
            waited = clock()
            programmed = [
                await watch.when_true(
                    item["metadata"]["name"],
                    "Programmed",
                    generation=item["metadata"]["generation"],
                    limit_seconds=PROGRAMMED_SECONDS,
                )
                for item in changed["items"]
            ]
        return ChangeTimes(
            applied=applied - began, programmed=max(programmed) - began, waited=waited - began
        )

    async def _show(self, before: Phase, after: Phase, times: ChangeTimes) -> None:
        self._console.print(report.phases_table([before, after]))
        silver = [phase.tier_shares()["silver"][0] for phase in (before, after)]
        gold = [phase.total_shares()["gold"] for phase in (before, after)]
        self._say(
            f"Gold, now in a tier of its own, is served before the others: {gold[0]:.0f} % of all"
            f" service before, {gold[1]:.0f} % after.\nSilver, at three times the weight of batch,"
            f" gets {silver[1]:.0f} % of what gold leaves; before it had {silver[0]:.0f} % of"
            " everything."
        )
        self._say(
            ">= : some of these requests had no first token yet when the phase ended.\n"
            f"From kubectl apply to Programmed=True: {times.programmed:.2f} s"
            f" (kubectl itself took {times.applied:.2f} s; kubectl wait returned after"
            f" {times.waited:.2f} s)."
        )
        self._say("\n$ kubectl get tp,epool -o wide")
        self._say(await self._tidegate.kubectl("get", "tp,epool", "-o", "wide"))

    def _result(
        self,
        before: Phase,
        after: Phase,
        times: ChangeTimes,
        memory: dict[str, float],
        *,
        capacity: float,
    ) -> BenchResult:
        results: dict[str, float] = {
            "apply_to_programmed_s": times.programmed,
            "kubectl_apply_s": times.applied,
            "capacity_cost_units_per_s": capacity,
            "resident_mb": sum(memory.values()),
        }
        for phase in (before, after):
            for one in phase.tenants:
                name = f"{one.tenant}_{phase.name}"
                results[f"{name}_output_tokens"] = one.service.output_tokens
                results[f"{name}_tier_share_percent"] = phase.tier_shares()[one.tenant][0]
                results[f"{name}_total_share_percent"] = phase.total_shares()[one.tenant]
                if one.calls.ttft_p50 is not None:
                    results[f"{name}_ttft_p50_s"] = one.calls.ttft_p50.seconds
        settings = self._settings
        return BenchResult(
            bench="demo",
            settings={
                "load": settings.load,
                "length_factor": settings.length_factor,
                "phase_seconds": settings.phase_seconds,
                "seed": settings.seed,
                "resident_mb": memory,
            },
            results=results,
        )


def unmet_expectations(before: Phase, after: Phase) -> list[str]:
    """Return what the demonstration had to show and didn't; one sentence each."""
    unmet = [
        f"{one.tenant} got no token {phase.name} the change"
        for phase in (before, after)
        for one in phase.tenants
        if one.service.output_tokens <= 0
    ]
    rise = after.tier_shares()["silver"][0] - before.tier_shares()["silver"][0]
    if rise < LEAST_RISE_POINTS:
        unmet.append(
            f"silver's share of its tier rose by {rise:.1f} points with its weight tripled, less"
            f" than {LEAST_RISE_POINTS:g}"
        )
    return unmet


async def run_demo(
    console: Console,
    *,
    settings: DemoSettings,
    progress: Callable[[str], None],
    json_file: Path | None,
) -> None:
    """Start everything, run the demonstration, stop everything.

    Raises:
        CommandError: Something didn't start, or did not hold.
        DevClusterError: The cluster didn't start.
    """
    async with LocalTidegate(ENGINES, progress=progress) as tidegate:
        result = await tidegate.guarded(Demo(tidegate, settings, console).run())
        if json_file is not None:
            result.write(json_file)
