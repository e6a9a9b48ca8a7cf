"""An engine with a real model behind real sockets, watched from inside at every step."""

import asyncio
import base64
import hashlib
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvloop

from tidegate_cli.bench.errors import BenchError
from tidegate_cli.errors import NotReadyError
from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import StepPlan, StepResult
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.events import EngineStats
from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.fleet.rates import FleetRates
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.parts import Parts, load_parts
from tidegate_engine.server.app import create_app
from tidegate_engine.server.connections import HttpServer, listen
from tidegate_engine.server.service import Service, assemble
from tidegate_engine.settings import Settings
from tidegate_engine.start_errors import StartError
from tidegate_policies.rules import BatchingRule, TenantRule, TierRule
from tidegate_policies.snapshot import PolicySnapshot

POOL = "bench/cancel"
HOST = "127.0.0.1"
_TIER = "standard"
_POLICY_SECONDS = 60.0
_POLL_SECONDS = 0.01


@dataclass(slots=True)
class StepSeen:
    """A step.

    Attributes:
        began_at: Monotonic clock.
        holders: Tenants that hold KV when it begins.
        ended_at: Monotonic clock; infinity while it is in flight.
    """

    began_at: float
    holders: frozenset[str]
    ended_at: float = math.inf


@dataclass
class WatchedExecutor:
    """Computes as another executor does, and notes who holds KV when a step begins.

    Attributes:
        steps: All so far; those of the engine's thread add, others only read.
    """

    inner: Executor
    scheduler: Scheduler
    steps: list[StepSeen] = field(default_factory=list)

    @property
    def capacity(self) -> Capacity:
        """As the other executor's."""
        return self.inner.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        """Note, then compute. It is the engine's thread, so the scheduler may be asked."""
        tenants = self.scheduler.stats().tenants
        holders = frozenset(name for name, one in tenants.items() if one.kv_used_blocks)
        step = StepSeen(time.monotonic(), holders)
        self.steps.append(step)
        try:
            return self.inner.execute(plan)
        finally:
            step.ended_at = time.monotonic()

    def measure(self) -> ExecutorCosts:
        """As the other executor's."""
        return self.inner.measure()


@dataclass(frozen=True)
class Target:
    """A running engine.

    Attributes:
        keys: API keys by tenant.
        model: Its name in the API.
    """

    port: int
    keys: Mapping[str, str]
    model: str
    executor: WatchedExecutor
    service: Service

    def stats(self) -> EngineStats:
        """Count at the next step boundary."""
        return self.service.engine.stats().result()


@contextmanager
def serving(
    tenants: Sequence[str], *, max_num_seqs: int, kv_blocks: int, threads: int
) -> Iterator[Target]:
    """Serve the demo's model from a thread, on a free port, for the length of the block.

    Args:
        tenants: Who may call; all alike.
        max_num_seqs: Most requests in a step.
        kv_blocks: Of the pool.
        threads: CPU threads of a step.

    Raises:
        BenchError: The model can't be loaded.
        NotReadyError: The policy did not come into force.
    """
    keys = {tenant: f"bench-{tenant}" for tenant in tenants}
    try:
        parts = load_parts(_settings(kv_blocks, threads), created=int(time.time()))
    except (ModelLoadError, StartError) as error:
        raise BenchError(f"the engine can't start: {error}") from error
    scheduler = _scheduler(parts, max_num_seqs)
    executor = WatchedExecutor(parts.executor, scheduler)
    with listen(HOST, 0) as listener:
        started: list[tuple[Service, HttpServer]] = []
        is_started = threading.Event()

        async def serve() -> None:
            service = assemble(
                pool=POOL,
                scheduler=scheduler,
                executor=executor,
                model=parts.model,
                rates=FleetRates(None, clock=time.monotonic),
                clock=time.monotonic,
                max_waiting=EngineLimits().max_waiting,
            )
            policy = _policy(keys, max_num_seqs)
            service.board.offer(policy, revision=1, digest=policy.digest)
            server = HttpServer(create_app(service))
            started.append((service, server))
            service.engine.start()
            is_started.set()
            await server.serve([listener])
            await asyncio.to_thread(service.engine.stop)

        thread = threading.Thread(target=lambda: uvloop.run(serve()), name="server")
        thread.start()
        is_started.wait()
        [(service, server)] = started
        try:
            _wait_for_policy(service)
            port = listener.getsockname()[1]
            yield Target(port, keys, parts.model.name, executor, service)
        finally:
            server.should_exit = True
            thread.join()


def _settings(kv_blocks: int, threads: int) -> Settings:
    return Settings(
        pool=POOL,
        # Neither is used: the policy is handed over in this process.
        redis_url="redis://127.0.0.1",
        verify_key=base64.b64encode(bytes(32)).decode(),
        executor="torch",
        kv_blocks=kv_blocks,
        host_kv_blocks=0,
        threads=threads,
    )


def _scheduler(parts: Parts, max_num_seqs: int) -> Scheduler:
    capacity = parts.executor.capacity
    return Scheduler(
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        num_host_blocks=capacity.num_host_blocks,
        costs=parts.costs,
        limits=EngineLimits(max_num_seqs=max_num_seqs),
    )


def _policy(keys: Mapping[str, str], max_num_seqs: int) -> PolicySnapshot:
    return PolicySnapshot.of(
        POOL,
        tiers=[TierRule(name=_TIER, value=0)],
        tenants=[
            TenantRule(
                tenant=tenant,
                policy=f"bench/{tenant}",
                tier=_TIER,
                key_digests=(hashlib.sha256(key.encode()).hexdigest(),),
            )
            for tenant, key in keys.items()
        ],
        batching=BatchingRule(max_num_seqs=max_num_seqs),
    )


def _wait_for_policy(service: Service) -> None:
    deadline = time.monotonic() + _POLICY_SECONDS
    while service.board.in_force is None:
        if time.monotonic() > deadline:
            raise NotReadyError("the policy in force", limit_seconds=_POLICY_SECONDS)
        time.sleep(_POLL_SECONDS)
