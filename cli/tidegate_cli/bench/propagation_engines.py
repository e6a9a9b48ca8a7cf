"""Many engines in one process, as far as policies notice: what `bench propagation` measures with.

Each is the product's own policy source, board and reporter, with connections and a state file of
its own, so that it speaks the protocol as every engine does. Only the scheduler is left out: an
engine without requests is always between two steps, so its newest policy is in force at once.
"""

import asyncio
import gc
import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import uvloop
from pydantic import TypeAdapter

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.events import EngineStats, PolicyApplied
from tidegate_engine.executor.base import Capacity
from tidegate_engine.fleet.rates import FleetRates
from tidegate_engine.main import redis_client
from tidegate_engine.metrics import EngineMetrics
from tidegate_engine.policy_board import PolicyBoard, PolicyInForce
from tidegate_engine.policy_source import PolicySource, ed25519_verifier
from tidegate_engine.reports import Reporter, TenantBooks
from tidegate_engine.service_levels import ServiceLevels
from tidegate_engine.settings import Settings
from tidegate_engine.state_file import StateFile
from tidegate_engine.tasks import cancel_all
from tidegate_policies.snapshot import PolicySnapshot

Tell = Callable[[float, Mapping[str, int]], None]
"""Takes a reading of the monotonic clock, and weights by tenant that are in force since then."""

_CAPACITY = Capacity(num_blocks=1024, num_host_blocks=0, block_size=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesSettings:
    """What a process of engines is told, as JSON in its one argument.

    Attributes:
        pool: `namespace/name`.
        pods: Names of the engines.
        verify_key: The operator's public key.
        state_dir: For the state files of all.
        observer: Unix socket; told in lines of JSON. When it closes, the process ends.
    """

    pool: str
    pods: tuple[str, ...]
    redis_url: str
    verify_key: str
    state_dir: Path
    observer: Path

    def of_engine(self, pod: str) -> Settings:
        """Return the settings that one of the engines would run with."""
        return Settings(
            pool=self.pool,
            pod_name=pod,
            redis_url=self.redis_url,
            verify_key=self.verify_key,
            state_dir=self.state_dir / pod,
            executor="simulated",
        )


class IdleEngine:
    """The engine of someone who asks for nothing: its counts are those of an empty scheduler."""

    def __init__(self) -> None:
        scheduler = Scheduler(
            num_blocks=_CAPACITY.num_blocks,
            block_size=_CAPACITY.block_size,
            limits=EngineLimits(),
        )
        self._stats = EngineStats(
            scheduler=scheduler.stats(),
            cancelled={},
            tokens_after_cancel=0,
            step_costs=ExecutorCosts(),
        )

    @property
    def last_stats(self) -> EngineStats:
        """The counts."""
        return self._stats

    def stats(self) -> "Future[EngineStats]":
        """Return the counts as the answer of a step boundary that is now."""
        answer: Future[EngineStats] = Future()
        answer.set_result(self._stats)
        return answer


class WeightsInForce:
    """Tells which weights all engines of the process obey, whenever the last one has got there."""

    def __init__(self, num_engines: int, tell: Tell) -> None:
        """Nobody obeys anything yet."""
        self._revisions = [0] * num_engines
        self._snapshots: dict[int, PolicySnapshot] = {}
        self._told: Mapping[str, int] = {}
        self._tell = tell

    def note(self, engine: int, in_force: PolicyInForce) -> None:
        """Take in that the engine of this number obeys a policy."""
        last = min(self._revisions)
        self._revisions[engine] = in_force.revision
        self._snapshots.setdefault(in_force.revision, in_force.snapshot)
        slowest = min(self._revisions)
        if slowest > last:
            self._snapshots = {r: s for r, s in self._snapshots.items() if r >= slowest}
            rules = self._snapshots[slowest].tenants
            weights = {rule.tenant: rule.weight for rule in rules}
            self._tell(in_force.at, dict(weights.items() - self._told.items()))
            self._told = weights


async def _run(settings: EnginesSettings) -> None:
    """Run all engines until the observer closes its socket."""
    observed, observer = await asyncio.open_unix_connection(settings.observer)

    def tell(at: float, weights: Mapping[str, int]) -> None:
        observer.write(json.dumps({"at": at, "weights": weights}).encode() + b"\n")

    in_force = WeightsInForce(len(settings.pods), tell)
    books = TenantBooks(
        levels=ServiceLevels(time.monotonic, on_no_token=lambda _: None),
        metrics=EngineMetrics(settings.pool, model="simulated", capacity=_CAPACITY),
    )
    runs = [
        asyncio.create_task(
            _run_engine(settings.of_engine(pod), number, in_force=in_force, books=books)
        )
        for number, pod in enumerate(settings.pods)
    ]
    ended = asyncio.create_task(observed.read())
    try:
        done, _ = await asyncio.wait({ended, *runs}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all({ended, *runs})
        observer.close()
    for task in done - {ended}:
        task.result()


async def _run_engine(
    settings: Settings, number: int, *, in_force: WeightsInForce, books: TenantBooks
) -> None:
    loop = asyncio.get_running_loop()

    def hand_over(_: PolicySnapshot, revision: int) -> None:
        now = time.monotonic()
        applied = PolicyApplied(revision=revision, step=1, at=now, seconds=0.0)
        # As from the engine's thread: never before the offer has ended.
        loop.call_soon(board.applied, applied)

    board = PolicyBoard(hand_over)
    board.on_change.append(lambda policy: in_force.note(number, policy))
    redis = redis_client(settings)
    source = PolicySource(
        pool=settings.pool,
        redis=redis,
        verify=ed25519_verifier(settings.verify_key),
        board=board,
        state=StateFile(settings.policy_file),
    )
    reporter = Reporter(
        pod=settings.pod_name,
        pool=settings.pool,
        incarnation=uuid.uuid4().hex,
        redis=redis,
        board=board,
        source=source,
        rates=FleetRates(None, clock=time.monotonic),
        engine=IdleEngine(),
        tenants=books,
    )
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(source.run())
            group.create_task(reporter.run())
    finally:
        await redis.aclose()


def main() -> None:
    """Run the engines that the one argument tells of."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    # All policies of all engines would be walked over at once, amid a change; elsewhere each engine
    # has but its own.
    gc.disable()
    uvloop.run(_run(TypeAdapter(EnginesSettings).validate_json(sys.argv[1])))


if __name__ == "__main__":
    main()
