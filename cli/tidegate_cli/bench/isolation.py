"""`tidegate bench isolation`: does one tenant notice the others?

Gold alone against gold with others who ask for far more than there is; our policy against first
come, first served and against plain priority; and what a tenant that misbehaves costs the others.
All sides run on the same engines with the product's own scheduler, in turns.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Protocol

from rich.console import Console

from tidegate_cli.bench.batching import load_trace
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.isolation_figures import Run, in_rounds, p99, targets_of
from tidegate_cli.bench.isolation_fleet import FleetShape
from tidegate_cli.bench.isolation_honouring import OVERLOAD, Honouring, HonouringClients
from tidegate_cli.bench.isolation_load import Label, Planned, Traffic
from tidegate_cli.bench.isolation_plan import (
    MISBEHAVIOURS,
    ROGUE,
    Scale,
    beside_rogue,
    misbehave,
    overloaded,
    shedding,
)
from tidegate_cli.bench.isolation_policy import Side, side_of
from tidegate_cli.bench.isolation_report import IsolationFigures, print_figures
from tidegate_cli.bench.isolation_side import TIDEGATE, SideName
from tidegate_cli.bench.isolation_simulated import SCALE, SimulatedGround
from tidegate_cli.bench.isolation_torch import SCALE as TORCH_SCALE
from tidegate_cli.bench.isolation_torch import shortened, torch_ground
from tidegate_cli.bench.plots import plot_isolation, require_plotting
from tidegate_cli.bench.result import BenchResult
from tidegate_cli.traces import summarize_lengths

TRACE = "azure2023_conv"
SIMULATED, TORCH = "simulated", "torch"

ITL_FACTOR = 2.5
"""Gold's target of the time between two tokens, in its p99 alone."""


@dataclass(frozen=True, kw_only=True)
class IsolationSettings:
    """What is measured, and how much of it.

    Attributes:
        fleet: `simulated` or `torch`.
        sides: With which policies gold's neighbours are served.
        traces: Directory with the whole recorded window; None = its first thousand requests, as
            shipped.
        shape: Of the simulated fleet.
        honouring_engines: Simulated engines whose refused clients come back.
        honouring_seconds: How long these are overloaded.
        scale: Of the runs.
        executor: Of the torch fleet; `simulated` is for trying the benchmark itself.
        seed: Draws where in the record each tenant begins, which engine each request is sent to,
            and when clients hang up.
    """

    fleet: str = SIMULATED
    sides: tuple[SideName, ...] = tuple(SideName)
    traces: Path | None = None
    shape: FleetShape = field(default_factory=FleetShape)
    honouring_engines: int = 2
    honouring_seconds: float = 60.0
    scale: Scale = SCALE
    executor: str = "torch"
    seed: int = 1

    @classmethod
    def of_fleet(cls, fleet: str) -> "IsolationSettings":
        """Return the settings of one of the fleets."""
        return cls(fleet=fleet, scale=TORCH_SCALE if fleet == TORCH else SCALE)

    def quick(self) -> "IsolationSettings":
        """Return the same with few engines and short runs."""
        if self.fleet == TORCH:
            scale = replace(
                self.scale,
                gold_ttft_seconds=0.5,
                lead_in_seconds=0.5,
                seconds=3.0,
                rounds=2,
                misbehaving_seconds=1.5,
                queued=500,
            )
            return replace(self, scale=scale)
        scale = replace(
            self.scale, lead_in_seconds=3.0, seconds=7.0, misbehaving_seconds=7.0, queued=1000
        )
        return replace(
            self,
            shape=replace(self.shape, engines=1),
            honouring_engines=1,
            honouring_seconds=20.0,
            scale=scale,
        )


class Ground(Protocol):
    """Where sides are run."""

    async def capacity(self, scale: Scale) -> float:
        """Return the requests a second that the fleet can finish."""
        ...

    async def serve(self, side: Side, plans: Sequence[Planned], *, begin: float, end: float) -> Run:
        """Run a side; looked at from `begin` to `end`, when it stops."""
        ...

    def describe(self) -> dict[str, object]:
        """Return what a number depends on."""
        ...


class IsolationBench:
    """One run."""

    def __init__(
        self,
        settings: IsolationSettings,
        ground: Ground,
        traffic: Traffic,
        tell: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            settings: What is measured.
            ground: On what.
            traffic: Draws the requests.
            tell: Told what is measured.
        """
        self._settings = settings
        self._scale = settings.scale
        self._ground = ground
        self._traffic = traffic
        self._tell = tell

    async def run(self) -> IsolationFigures:
        """Measure everything.

        Raises:
            BenchError: Capacity is not known, or gold got no token when it was alone.
        """
        scale = self._scale
        labels = overloaded(scale)
        gold = labels[0]
        itl_seconds = 0.0
        capacities: list[float] = []
        alone: list[Run] = []
        together: dict[str, list[Run]] = {side: [] for side in self._settings.sides}
        for number in range(scale.rounds):
            self._tell(f"round {number + 1} of {scale.rounds}: measuring the fleet's capacity")
            capacity = await self._ground.capacity(scale)
            capacities.append(capacity)
            self._tell(f"{capacity:.1f} requests/s; gold alone")
            serve = partial(self._serve, number=number, capacity=capacity)
            alone.append(await serve(TIDEGATE, [gold], itl_seconds=None))
            itl_seconds = itl_seconds or ITL_FACTOR * p99(alone[0].itl_seconds(gold))
            if not itl_seconds:
                raise BenchError("gold got no tokens when it was alone")
            for side, runs in together.items():
                self._tell(f"everybody at four times the capacity: {side}")
                runs.append(await serve(SideName(side), labels, itl_seconds=itl_seconds))
        beside = beside_rogue(scale)
        return IsolationFigures(
            capacity=fmean(capacities),
            labels=labels,
            targets=targets_of([*labels, *beside], itl_seconds),
            alone=in_rounds(alone, seconds=scale.round_seconds),
            together={
                side: in_rounds(runs, seconds=scale.round_seconds)
                for side, runs in together.items()
            },
            beside=[label for label in beside if label.tenant != ROGUE],
            misbehaving=await self._misbehave(beside, capacities[-1], itl_seconds),
            honouring=self._honour(capacities[-1]),
        )

    async def _serve(
        self,
        side: SideName,
        labels: Sequence[Label],
        *,
        number: int,
        capacity: float,
        itl_seconds: float | None,
    ) -> Run:
        """Run a side for one round: its part of the record, the same for all sides."""
        end = self._scale.round_seconds
        start = number * end
        plans = self._traffic.plan(labels, capacity=capacity, seconds=start + end)
        return await self._ground.serve(
            side_of(side, labels, itl_seconds=itl_seconds),
            [
                replace(one, at_seconds=one.at_seconds - start)
                for one in plans
                if one.at_seconds >= start
            ],
            begin=self._scale.lead_in_seconds,
            end=end,
        )

    async def _misbehave(
        self, labels: Sequence[Label], capacity: float, itl_seconds: float
    ) -> dict[str, Run]:
        """Return the run in which the rogue behaves, under an empty name, and one for each way."""
        scale = self._scale
        begin, end = scale.lead_in_seconds, scale.lead_in_seconds + scale.misbehaving_seconds
        side = side_of(TIDEGATE, labels, itl_seconds=itl_seconds)
        behaved = self._traffic.plan(labels, capacity=capacity, seconds=end)
        runs = {}
        for way in ("", *MISBEHAVIOURS):
            self._tell(f"a tenant that misbehaves: {way or 'not yet'}")
            more = (
                misbehave(
                    way,
                    traffic=self._traffic,
                    scale=scale,
                    rogue=labels[-1],
                    capacity=capacity,
                    seed=self._settings.seed,
                )
                if way
                else ()
            )
            plans = sorted([*behaved, *more], key=lambda one: (one.at_seconds, one.request_id))
            runs[way] = await self._ground.serve(side, plans, begin=begin, end=end)
        return runs

    def _honour(self, capacity: float) -> Honouring | None:
        """Let refused clients come back; on the simulated fleet alone, as it takes minutes."""
        settings = self._settings
        if settings.fleet != SIMULATED:
            return None
        self._tell("clients that honour Retry-After")
        shape = replace(settings.shape, engines=settings.honouring_engines)
        clients = HonouringClients(shape, shedding(self._scale, load=OVERLOAD), seed=settings.seed)
        return clients.run(
            self._traffic,
            capacity=capacity * shape.engines / settings.shape.engines,
            overload_seconds=settings.honouring_seconds,
        )


@asynccontextmanager
async def _ground(settings: IsolationSettings, traffic: Traffic) -> AsyncIterator[Ground]:
    if settings.fleet == SIMULATED:
        yield SimulatedGround(settings.shape, traffic)
        return
    async with torch_ground(traffic, seed=settings.seed, executor=settings.executor) as ground:
        yield ground


async def run_isolation(
    console: Console,
    *,
    settings: IsolationSettings,
    progress: Callable[[str], None],
    json_file: Path | None,
    plot_directory: Path | None,
) -> None:
    """Measure, print tables, write the JSON file and the plot.

    Raises:
        CommandError: A plot can't be drawn, a trace can't be read, or something can't be measured.
        DevClusterError: Redis or an engine didn't start, or ended.
    """
    if plot_directory is not None:
        require_plotting()
    began = time.monotonic()

    def tell(line: str) -> None:
        progress(f"[{time.monotonic() - began:6.1f} s] {line}")

    recorded = load_trace(TRACE, settings.traces)
    factors: dict[str, float] = {}
    if settings.fleet == TORCH:
        recorded, factors = shortened(recorded, seed=settings.seed)
    traffic = Traffic(recorded, seed=settings.seed)
    async with _ground(settings, traffic) as ground:
        figures = await IsolationBench(settings, ground, traffic, tell).run()
    # The simulated fleet's shape is in what it tells of itself; the torch fleet has none.
    described = {key: value for key, value in asdict(settings).items() if key != "shape"} | {
        **ground.describe(),
        "trace": TRACE,
        "traces": str(settings.traces or "shipped"),
        "tiers": "our own labelling: the record knows none",
        "lengths": {**asdict(summarize_lengths(recorded)), **factors},
    }
    print_figures(console, figures, described)
    if json_file is not None:
        BenchResult(
            bench="isolation",
            settings=described,
            results=figures.results(),
            series=figures.series(),
        ).write(json_file)
    if plot_directory is not None:
        for file in plot_isolation(plot_directory, figures.curves()):
            progress(f"wrote {file}")
