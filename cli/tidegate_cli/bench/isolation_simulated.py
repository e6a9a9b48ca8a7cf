"""The simulated fleet of `tidegate bench isolation`: H100s in virtual time."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace

from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.isolation_figures import End, Experience, Run
from tidegate_cli.bench.isolation_fleet import FleetShape, SimulatedFleet
from tidegate_cli.bench.isolation_load import Planned, Traffic
from tidegate_cli.bench.isolation_plan import Scale, gold_of
from tidegate_cli.bench.isolation_policy import Side, side_of
from tidegate_cli.bench.isolation_side import FCFS
from tidegate_engine.replay.log import Outcome, RequestTrace

_FLOOD = 64
"""Requests there from the start for each second, while capacity is measured: far too many."""

_ENDS = {
    Outcome.STOP: End.DONE,
    Outcome.LENGTH: End.DONE,
    Outcome.REJECTED: End.REFUSED,
    Outcome.CANCELLED: End.LEFT,
    None: End.OPEN,
}

SCALE = Scale(
    gold_ttft_seconds=1.0,
    lead_in_seconds=8.0,
    seconds=20.0,
    misbehaving_seconds=15.0,
    max_running=64,
    quantum_tokens=16,
    queued=10_000,
    huge_prompt_tokens=100_000,
    unread_output_tokens=8_192,
)


class SimulatedGround:
    """Where sides are run: a new fleet for each."""

    def __init__(self, shape: FleetShape, traffic: Traffic) -> None:
        """Run fleets of this shape; `traffic` is what capacity is measured with."""
        self._shape = shape
        self._traffic = traffic

    async def capacity(self, scale: Scale) -> float:
        """Return the requests a second that the fleet can finish.

        One engine has far more of the record's requests than it can do there at once, first come,
        first served: the service that it gives a second, over that of the record's mean request,
        times the engines.
        """
        flood = gold_of(scale, load=1.0)
        side = side_of(FCFS, [flood], itl_seconds=None)
        fleet = SimulatedFleet(replace(self._shape, engines=1), side.policy, renamed=side.renamed)
        begin, end = scale.lead_in_seconds, scale.lead_in_seconds + scale.seconds
        plans = self._traffic.requests_of(flood, rate=_FLOOD, seconds=end)
        fleet.send(replace(one, at_seconds=0.0, patience_seconds=None) for one in plans)
        before = await _run(fleet, begin=begin, end=end)
        given = sum(fleet.service().values()) - sum(before.values())
        if not given:
            raise BenchError(f"an engine served nobody in {end:g} s, so capacity isn't known")
        return self._shape.engines * given / scale.seconds / self._traffic.mean_service

    async def serve(self, side: Side, plans: Sequence[Planned], *, begin: float, end: float) -> Run:
        """Run a side; looked at from `begin` to `end`, when it stops."""
        fleet = SimulatedFleet(self._shape, side.policy, renamed=side.renamed)
        fleet.send(plans)
        before = await _run(fleet, begin=begin, end=end)
        traces = [(one, fleet.trace(one)) for one in plans]
        return Run(
            experiences=[_experience(one, trace) for one, trace in traces],
            windows=[(begin, end)],
            service={
                name: service - before.get(name, 0.0) for name, service in fleet.service().items()
            },
            preemptions=sum(trace.preemptions for _, trace in traces if trace is not None),
        )

    def describe(self) -> dict[str, object]:
        """Return what a number depends on."""
        return {
            **asdict(self._shape),
            "kv_blocks": self._shape.capacity.num_blocks,
            "host_kv_blocks": self._shape.capacity.num_host_blocks,
            "block_size": self._shape.capacity.block_size,
        }


async def _run(fleet: SimulatedFleet, *, begin: float, end: float) -> dict[str, float]:
    """Let time pass; others may have the event loop now and then.

    Returns:
        The service given until `begin`.
    """
    fleet.run(begin)
    before = fleet.service()
    for second in range(int(begin) + 1, int(end) + 1):
        fleet.run(float(second))
        await asyncio.sleep(0)
    fleet.run(end)
    return before


def _experience(request: Planned, trace: RequestTrace | None) -> Experience:
    if trace is None:  # it would have come after the end
        return Experience(request=request, token_times=(), end=End.OPEN, ended_at=None)
    return Experience(
        request=request,
        token_times=trace.token_times,
        end=_ENDS.get(trace.outcome, End.CUT),
        ended_at=trace.ended_at,
    )
