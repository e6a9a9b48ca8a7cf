"""What the engine says about itself: acknowledgements at once, a heartbeat every second."""

import asyncio
import logging
from collections.abc import Mapping

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tidegate_engine.bridge import CountedEngine, engine_stats
from tidegate_engine.core.request import SchedulerStats, TenantStats
from tidegate_engine.fleet.rates import FleetRates
from tidegate_engine.metrics import EngineMetrics
from tidegate_engine.policy_board import PolicyBoard
from tidegate_engine.policy_source import PolicySource
from tidegate_engine.service_levels import ServiceLevels
from tidegate_engine.tasks import cancel_all
from tidegate_policies.wire import (
    HEARTBEAT_SECONDS,
    REPORT_EXPIRY_SECONDS,
    Attainment,
    EngineReport,
    TenantCounters,
    report_key,
    reports_channel,
)

PATIENCE_SECONDS = 0.5
"""How long a heartbeat waits for the step in flight; it must come well before it would expire."""

_log = logging.getLogger(__name__)


class TenantBooks:
    """What a report says of the tenants, and of steps, from all who count them."""

    def __init__(self, *, levels: ServiceLevels, metrics: EngineMetrics) -> None:
        """Read along with the scheduler's numbers how tenants fare, and what was refused."""
        self._levels = levels
        self._metrics = metrics

    def steps(self) -> tuple[int, float]:
        """Return how many steps were executed, and the seconds that they took together."""
        return self._metrics.steps()

    def queue_times(self) -> tuple[tuple[int, int], ...]:
        """Return how often each time in the queue was seen in the last minute, in buckets."""
        return self._levels.queue_times.buckets()

    def counters(self, tenants: Mapping[str, TenantStats]) -> tuple[TenantCounters, ...]:
        """Return the counters of every tenant with work or with any total, by name.

        Args:
            tenants: As the scheduler has them; who got nothing but refusals may be unknown to it.
        """
        attainments, shed = self._levels.attainments(), self._metrics.shed()
        told = {**dict.fromkeys((*attainments, *shed), TenantStats()), **tenants}
        return tuple(
            _counters(name, stats, shed=shed.get(name, 0), attainment=attainments.get(name))
            for name, stats in sorted(told.items())
            if name in attainments or name in shed or _is_worth_telling(stats)
        )


class Reporter:
    """Publishes this engine's reports until cancelled."""

    def __init__(  # noqa: PLR0913 - parts by name
        self,
        *,
        pod: str,
        pool: str,
        incarnation: str,
        redis: Redis,
        board: PolicyBoard,
        source: PolicySource,
        rates: FleetRates,
        engine: CountedEngine,
        tenants: TenantBooks,
    ) -> None:
        """Listen to what is worth a report; `run` begins.

        Args:
            pod: The engine's identity in its pool.
            pool: `namespace/name`.
            incarnation: Unique to this start of the process.
            redis: Its commands must time out.
            board: Tells the policy in force.
            source: Tells what was refused, and whether the engine is degraded.
            rates: Tell whether they are divided, which is degraded too.
            engine: Is counted.
            tenants: Tell what is to be said of each.
        """
        self._pod = pod
        self._pool = pool
        self._incarnation = incarnation
        self._redis = redis
        self._board = board
        self._source = source
        self._rates = rates
        self._engine = engine
        self._tenants = tenants
        self._sequence = 0
        self._is_failing = False
        self._woken = asyncio.Event()
        board.on_change.append(lambda _: self._woken.set())
        source.on_change.append(self._woken.set)

    async def run(self) -> None:
        """Report now, whenever something changes, and every `HEARTBEAT_SECONDS`."""
        while True:
            await self._count()
            self._woken.clear()
            await self._publish(self._report(self._engine.last_stats.scheduler))
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _count(self) -> None:
        """Bring the engine's last count up to date, unless something is to be reported at once."""
        counting = asyncio.create_task(
            engine_stats(self._engine, patience_seconds=PATIENCE_SECONDS)
        )
        waking = asyncio.create_task(self._woken.wait())
        try:
            await asyncio.wait({counting, waking}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_all({counting, waking})

    def _report(self, stats: SchedulerStats) -> EngineReport:
        self._sequence += 1
        in_force = self._board.in_force
        steps, step_seconds = self._tenants.steps()
        return EngineReport(
            pod=self._pod,
            pool=self._pool,
            incarnation=self._incarnation,
            sequence=self._sequence,
            revision=in_force.revision if in_force else 0,
            digest=in_force.digest if in_force else "",
            step=in_force.step if in_force else 0,
            refused=self._source.refused,
            degraded=self._source.degraded or self._rates.is_alone,
            running=stats.running,
            waiting=stats.waiting,
            swapped=stats.swapped,
            kv_blocks=stats.kv_blocks,
            kv_used_blocks=stats.kv_used_blocks,
            host_blocks=stats.host_blocks,
            block_size=stats.block_size,
            waiting_tokens=stats.waiting_tokens,
            queue_times=self._tenants.queue_times(),
            steps=steps,
            step_seconds=step_seconds,
            tenants=self._tenants.counters(stats.tenants),
        )

    async def _publish(self, report: EngineReport) -> None:
        text = report.to_json()
        expiry = round(REPORT_EXPIRY_SECONDS * 1000)
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.set(report_key(self._pool, self._pod), text, px=expiry)
                pipe.publish(reports_channel(self._pool), text)
                await pipe.execute()
        except (RedisError, OSError) as error:
            if not self._is_failing:
                _log.warning("reports can't be published: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False


def _is_worth_telling(stats: TenantStats) -> bool:
    """Whether the tenant has work, or ever had."""
    is_active = stats.running + stats.waiting + stats.swapped > 0
    ended = stats.finished + stats.cancelled + stats.expired
    return is_active or stats.service > 0 or ended > 0


def _counters(
    name: str, stats: TenantStats, *, shed: int, attainment: Attainment | None
) -> TenantCounters:
    return TenantCounters(
        tenant=name,
        running=stats.running,
        waiting=stats.waiting,
        swapped=stats.swapped,
        kv_used_blocks=stats.kv_used_blocks,
        kv_borrowed_blocks=stats.kv_borrowed_blocks,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        output_tokens=stats.output_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        kv_seconds=stats.kv_seconds,
        service=stats.service,
        preempted=stats.preempted,
        cancelled=stats.cancelled + stats.expired,
        shed=shed,
        stop_seconds=stats.stop_seconds,
        attainment=attainment,
    )
