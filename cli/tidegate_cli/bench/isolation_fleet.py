"""A fleet of simulated engines in virtual time: the product's scheduler in each of them.

Each engine has a clock of its own, and all are run a second at a time. After each second they tell
each other whom they served, as real ones do through Redis.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from tidegate_cli.bench.isolation_load import Planned
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.request import Rejection, Request
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.executor.base import Capacity
from tidegate_engine.executor.clock import VirtualClock
from tidegate_engine.executor.hardware import GPUS, MODELS, fitting_capacity
from tidegate_engine.executor.simulated import SimulatedExecutor
from tidegate_engine.executor.step_cost import Roofline
from tidegate_engine.fleet.services import EXCHANGE_SECONDS
from tidegate_engine.replay.driver import Replay
from tidegate_engine.replay.log import RequestTrace
from tidegate_engine.server.generation import MAX_UNREAD_EVENTS
from tidegate_policies.snapshot import PolicySnapshot

_SAMPLING = SamplingParams(temperature=0.0)
_LEAST_WAIT_SECONDS = 1e-6


@dataclass(frozen=True, kw_only=True)
class FleetShape:
    """The hardware and the bounds that every side of a comparison gets alike.

    Attributes:
        engines: How many, each a GPU with the whole model.
        host_gigabytes: Memory of each engine for swapped-out KV.
    """

    engines: int = 8
    gpu: str = "H100-80G"
    model: str = "Llama-3.1-8B"
    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    prefill_chunk_max: int = 1024
    host_gigabytes: float = 32.0

    @cached_property
    def capacity(self) -> Capacity:
        """KV memory of an engine."""
        return fitting_capacity(
            GPUS[self.gpu], MODELS[self.model], host_bytes=self.host_gigabytes * 1e9
        )


class _Kind(IntEnum):
    ARRIVES, LOSES_PATIENCE, LEAVES = range(3)


class _Event(NamedTuple):
    at: float
    number: int
    kind: _Kind
    request: Planned


Refused = Callable[[Planned, Rejection, float], None]
"""Told of a request that an engine refused, why, and when."""


class SimulatedEngine:
    """One engine and the clients that were sent to it."""

    def __init__(
        self,
        shape: FleetShape,
        policy: PolicySnapshot,
        renamed: Mapping[str, str],
        refused: Refused,
    ) -> None:
        """Start with a policy in force.

        Args:
            shape: Its hardware.
            policy: Obeyed from the first step on.
            renamed: The policy's tenant for each of the requests'.
            refused: Told of refusals.
        """
        gpu, model, capacity = GPUS[shape.gpu], MODELS[shape.model], shape.capacity
        clock = VirtualClock()
        cost = Roofline(gpu=gpu, model=model, block_size=capacity.block_size)
        scheduler = Scheduler(
            num_blocks=capacity.num_blocks,
            num_host_blocks=capacity.num_host_blocks,
            block_size=capacity.block_size,
            limits=EngineLimits(
                max_num_seqs=shape.max_num_seqs,
                max_batched_tokens=shape.max_batched_tokens,
                prefill_chunk_max=shape.prefill_chunk_max,
            ),
            costs=cost.costs,
        )
        scheduler.apply_policy(policy, 1)
        scheduler.plan_step(0.0)
        executor = SimulatedExecutor(
            capacity=capacity, vocab_size=model.vocab_size, cost=cost, clock=clock
        )
        self.scheduler = scheduler
        self._clock = clock
        self._replay = Replay(scheduler=scheduler, executor=executor, clock=clock)
        self._renamed = renamed
        self._refused = refused
        self._events: list[_Event] = []
        self._num_events = 0
        self._unread: dict[str, RequestTrace] = {}

    @property
    def traces(self) -> Mapping[str, RequestTrace]:
        """What became of every request that has come, by id."""
        return self._replay.log.requests

    def expect(self, request: Planned) -> None:
        """Have a request come at its time."""
        self._push(request.at_seconds, _Kind.ARRIVES, request)
        if request.leaves_after_seconds is not None:
            self._push(request.at_seconds + request.leaves_after_seconds, _Kind.LEAVES, request)
        if request.patience_seconds is not None:
            at_seconds = request.at_seconds + request.patience_seconds
            self._push(at_seconds, _Kind.LOSES_PATIENCE, request)

    def run(self, until: float) -> None:
        """Let time pass; a step that has begun ends."""
        clock = self._clock
        while (now := clock.now()) < until:
            while self._events and self._events[0].at <= now:
                self._happen(heapq.heappop(self._events), now)
            plan = self._replay.step()
            if plan.is_executable:
                self._cut_off_who_never_reads()
                continue
            moments = [until, *(event.at for event in self._events[:1])]
            if plan.wake_at is not None:
                moments.append(plan.wake_at)
            clock.advance(max(min(moments) - clock.now(), _LEAST_WAIT_SECONDS))

    def _push(self, at: float, kind: _Kind, request: Planned) -> None:
        self._num_events += 1
        heapq.heappush(self._events, _Event(at, self._num_events, kind, request))

    def _happen(self, event: _Event, now: float) -> None:
        planned = event.request
        if event.kind is _Kind.ARRIVES:
            rejection = self._replay.submit(self._request(planned))
            if rejection is not None:
                self._refused(planned, rejection, now)
            elif not planned.is_read:
                self._unread[planned.request_id] = self.traces[planned.request_id]
            return
        has_begun = bool(self.traces[planned.request_id].token_times)
        if event.kind is _Kind.LEAVES or not has_begun:
            self._replay.cancel(planned.request_id)

    def _cut_off_who_never_reads(self) -> None:
        """Cancel as the server does, once its buffer for a client is full."""
        for request_id, trace in list(self._unread.items()):
            if trace.outcome is not None:
                del self._unread[request_id]
            elif len(trace.token_times) >= MAX_UNREAD_EVENTS:
                self._replay.cancel(request_id)

    def _request(self, planned: Planned) -> Request:
        # Each begins with a token of its own: the trace doesn't say what prompts share.
        own = len(self.traces)
        return Request(
            request_id=planned.request_id,
            tenant=self._renamed[planned.tenant],
            prompt_ids=(own, *(0,) * (planned.prompt_tokens - 1)),
            max_output_tokens=planned.output_tokens,
            sampling=_SAMPLING,
            arrived_at=planned.at_seconds,
        )


class SimulatedFleet:
    """Engines behind a front door that spreads requests."""

    def __init__(
        self,
        shape: FleetShape,
        policy: PolicySnapshot,
        *,
        renamed: Mapping[str, str],
        refused: Refused = lambda *_: None,
    ) -> None:
        """Start all engines under one policy.

        Args:
            shape: Their hardware.
            policy: Which all obey.
            renamed: The policy's tenant for each of the requests'.
            refused: Told of refusals; it may send again, for a second later at the earliest.
        """
        self.engines = [
            SimulatedEngine(shape, policy, renamed, refused) for _ in range(shape.engines)
        ]
        self._told: list[dict[str, float]] = [{} for _ in self.engines]
        self._now = 0.0

    def send(self, requests: Iterable[Planned]) -> None:
        """Have requests come at their times."""
        for one in requests:
            self.engines[one.door % len(self.engines)].expect(one)

    def run(self, until: float) -> None:
        """Let time pass in all engines."""
        while self._now < until:
            self._now = min(until, self._now + EXCHANGE_SECONDS)
            for engine in self.engines:
                engine.run(self._now)
            self._exchange()

    def service(self) -> dict[str, float]:
        """Return the service that each of the policy's tenants has got, in cost units."""
        total: dict[str, float] = {}
        for engine in self.engines:
            for name, stats in engine.scheduler.stats().tenants.items():
                total[name] = total.get(name, 0.0) + stats.service
        return total

    def trace(self, request: Planned) -> RequestTrace | None:
        """Return what became of a request; None = it hasn't come."""
        return self.engines[request.door % len(self.engines)].traces.get(request.request_id)

    def _exchange(self) -> None:
        """Tell each engine what the others gave, and who competes there."""
        accounts = [engine.scheduler.stats().accounts for engine in self.engines]
        given = [
            {name: one.service - told.get(name, 0.0) for name, one in own.items()}
            for own, told in zip(accounts, self._told, strict=True)
        ]
        self._told = [{name: one.service for name, one in own.items()} for own in accounts]
        total: dict[str, float] = {}
        competing: Counter[str] = Counter()
        for own, gifts in zip(accounts, given, strict=True):
            for name, gift in gifts.items():
                total[name] = total.get(name, 0.0) + gift
            competing.update(name for name, one in own.items() if one.competes)
        for engine, own, gifts in zip(self.engines, accounts, given, strict=True):
            engine.scheduler.note_elsewhere(
                {name: total[name] - gift for name, gift in gifts.items()},
                [name for name, one in own.items() if competing[name] > one.competes],
            )
