"""The parts of one engine, wired together."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from tidegate_engine.bridge import EngineBridge, engine_stats
from tidegate_engine.core.standings import StandingBook
from tidegate_engine.core.step_scheduler import StepScheduler
from tidegate_engine.events import EngineStats, Refused
from tidegate_engine.executor.base import Executor
from tidegate_engine.fleet.rates import FleetRates
from tidegate_engine.loop import EngineLoop, EngineStoppedError
from tidegate_engine.metrics import EngineMetrics
from tidegate_engine.policy_board import PolicyBoard
from tidegate_engine.server.decision_ring import DecisionRing
from tidegate_engine.server.errors import EngineFailedError
from tidegate_engine.server.generation import MAX_UNREAD_EVENTS
from tidegate_engine.server.generations import Generations
from tidegate_engine.server.identity import Identities
from tidegate_engine.server.rate_gate import RateGate
from tidegate_engine.server.request_trace import RequestTrace, RequestTraces
from tidegate_engine.server.served_model import ServedModel
from tidegate_engine.server.shared_call import SharedCall
from tidegate_engine.service_levels import ServiceLevels

T = TypeVar("T")

COUNT_PATIENCE_SECONDS = 2.0
"""How long who counts waits for the step in flight; then the last count has to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the API serves with.

    Attributes:
        count: What is in the engine, at the next step boundary or as of the last count.
        max_waiting: Most requests queued in the engine.
        max_unread_events: Tokens of one generation that its client may leave unread.
        traces: Follows requests for who wants their traces; None = nobody does.
        stopped: Set when the engine's thread has ended.
        clock: The engine's clock.
        wall_clock: Seconds since the epoch; for people only.
    """

    engine: EngineLoop
    count: SharedCall[EngineStats]
    generations: Generations
    identities: Identities
    rate_gate: RateGate
    board: PolicyBoard
    decisions: DecisionRing
    metrics: EngineMetrics
    levels: ServiceLevels
    model: ServedModel
    max_waiting: int
    max_unread_events: int
    traces: RequestTraces | None
    stopped: asyncio.Event
    clock: Callable[[], float]
    wall_clock: Callable[[], float]

    def note_refusal(self, request_id: str, *, tenant: str, reason: str) -> None:
        """Keep that a request was refused before it came to the engine, and count it."""
        in_force = self.board.in_force
        refused = Refused(request_id, tenant, reason, self.clock())
        self.decisions.note_refusal(refused, revision=in_force.revision if in_force else 0)
        self.metrics.count_refusal(tenant, reason)
        self.levels.note_refusal(tenant, reason)

    async def look(self, at: Callable[[StandingBook, float], T]) -> T:
        """Ask where requests stand, at the next step boundary.

        Raises:
            EngineFailedError: There will be none.
        """
        try:
            return await asyncio.wrap_future(self.engine.look(at))
        except EngineStoppedError as error:
            raise EngineFailedError(f"{error}") from error

    def date_of(self, at: float) -> str:
        """Return a reading of the engine's clock as a date that people can read, in UTC."""
        seconds = self.wall_clock() - self.clock() + at
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def assemble(  # noqa: PLR0913 - parts by name
    *,
    pool: str,
    scheduler: StepScheduler,
    executor: Executor,
    model: ServedModel,
    rates: FleetRates,
    clock: Callable[[], float],
    max_waiting: int,
    max_unread_events: int = MAX_UNREAD_EVENTS,
    export_trace: Callable[[RequestTrace], None] | None = None,
) -> Service:
    """Wire an engine to the running event loop; its thread isn't started yet.

    Args:
        pool: `namespace/name`, the label of the metrics.
        scheduler: Owned by the engine from here on.
        executor: Owned by the engine from here on.
        model: What `executor` runs.
        rates: This engine's part in the pool's rate limits.
        clock: Monotonic, in seconds.
        max_waiting: Most requests queued in the engine, as `scheduler` has it.
        max_unread_events: Tokens of one generation that its client may leave unread.
        export_trace: Gets every request that has ended; None = requests aren't traced.
    """
    bridge = EngineBridge(asyncio.get_running_loop())
    engine = EngineLoop(scheduler=scheduler, executor=executor, listener=bridge, clock=clock)
    metrics = EngineMetrics(pool, model=model.name, capacity=executor.capacity)
    levels = ServiceLevels(
        clock, on_no_token=lambda tenant: metrics.latencies(tenant).never_began()
    )
    decisions = DecisionRing()
    service = Service(
        engine=engine,
        count=SharedCall(partial(engine_stats, engine, patience_seconds=COUNT_PATIENCE_SECONDS)),
        generations=Generations(engine=engine, metrics=metrics, levels=levels),
        identities=Identities(),
        rate_gate=RateGate(rates),
        board=PolicyBoard(engine.apply_policy),
        decisions=decisions,
        metrics=metrics,
        levels=levels,
        model=model,
        max_waiting=max_waiting,
        max_unread_events=max_unread_events,
        traces=None if export_trace is None else RequestTraces(export_trace, clock=clock),
        stopped=asyncio.Event(),
        clock=clock,
        wall_clock=time.time,
    )
    if service.traces is not None:
        # Before others end what a step has completed.
        bridge.on_step.append(service.traces.take_step)
    bridge.on_step += [
        metrics.observe_step,
        decisions.take_step,
        levels.take_step,
        service.generations.take_step,
    ]
    bridge.on_policy += [metrics.observe_policy, service.board.applied]
    bridge.on_stop += [service.generations.engine_stopped, service.stopped.set]
    service.board.on_change += [
        metrics.use_policy,
        levels.use_policy,
        service.identities.use_policy,
        service.rate_gate.use_policy,
    ]
    return service
