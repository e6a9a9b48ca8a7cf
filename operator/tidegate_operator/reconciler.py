"""The operator's one loop of loops: what changed is compiled, published and reported.

Nothing waits for anything else: compiling needs no Redis, status needs no Redis, and an engine's
acknowledgement goes straight into status.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from redis.exceptions import RedisError

from tidegate_operator.cluster import ClusterView, pool_keys
from tidegate_operator.compiler import CompiledPool, compile_pool, tier_flaws
from tidegate_operator.delivery import ContestedRevisionError, Delivery
from tidegate_operator.metrics import Metrics
from tidegate_operator.planner import (
    PoolState,
    plan_invalid_status,
    plan_plain_status,
    plan_policy_status,
    plan_pool_status,
)
from tidegate_operator.progress import Engines, Published
from tidegate_operator.reports import ReportBook
from tidegate_operator.resources import PreemptionPolicy, ServiceLevel, TenantPolicy
from tidegate_operator.status import StatusWriter
from tidegate_operator.usage import PoolActivity, UsageMeter
from tidegate_operator.watch_cache import WatchCache
from tidegate_policies.wire import EngineReport

_LOG = logging.getLogger(__name__)

QUIET_SECONDS = 0.05
"""A change waits until nothing changed for so long ..."""

LONGEST_WAIT_SECONDS = 0.25
"""... but never longer than this."""

FIRST_REPORTS_SECONDS = 5.0
EXPIRY_CHECK_SECONDS = 0.5
STORE_CHECK_SECONDS = 5.0
RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(slots=True)
class _Pool:
    """What is remembered of one pool from one compilation to the next."""

    compiled: CompiledPool
    published: Published | None = None
    activity: PoolActivity | None = None
    meter: UsageMeter = field(default_factory=UsageMeter)
    changed_at: float | None = None


class Reconciler:
    """Keeps policies, engines and statuses in step with the cluster."""

    def __init__(
        self,
        *,
        cache: WatchCache,
        delivery: Delivery,
        book: ReportBook,
        writer: StatusWriter,
        metrics: Metrics,
        usage_seconds: float,
    ) -> None:
        self._cache = cache
        self._delivery = delivery
        self._book = book
        self._writer = writer
        self._metrics = metrics
        self._usage_seconds = usage_seconds
        self._view = ClusterView()
        self._pools: dict[str, _Pool] = {}
        self._is_listening = True
        self._is_storing = True
        self._dirty: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._unpublished: dict[str, None] = {}
        self._publishable = asyncio.Event()
        self._unreported: dict[str, None] = {}
        self._reportable = asyncio.Event()
        self._heard = asyncio.Event()

    def mark(self, affected: Iterable[str] | None) -> None:
        """Have the pools compiled soon; None = nothing changed at all.

        An empty collection is a change too: an object that no pool depends on has a status.
        """
        if affected is None:
            return
        now = asyncio.get_running_loop().time()
        for key in affected:
            self._dirty.setdefault(key, now)
        self._changed.set()

    def take_report(self, report: EngineReport) -> None:
        """Take in what an engine reports."""
        if self._book.accept(report, now=asyncio.get_running_loop().time()):
            self._report(report.pool)

    def set_listening(self, is_listening: bool) -> None:  # noqa: FBT001
        """Take in whether Redis can be reached."""
        self._is_listening = is_listening
        self._is_storing = is_listening
        self._heard.set()
        self._book.refresh(now=asyncio.get_running_loop().time())
        self.report_all()
        if is_listening:
            self._publish(self._pools)

    def report_all(self) -> None:
        """Have every status compared with what it should be."""
        self._report(*self._pools)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._compile_for_ever())
            group.create_task(self._publish_for_ever())
            group.create_task(self._report_for_ever())
            group.create_task(self._expire_for_ever())
            group.create_task(self._check_store_for_ever())
            group.create_task(self._measure_for_ever())

    async def _compile_for_ever(self) -> None:
        while True:
            await self._changed.wait()
            await self._debounce()
            dirty, self._dirty = self._dirty, {}
            await self._compile(dirty)

    async def _debounce(self) -> None:
        loop = asyncio.get_running_loop()
        latest = loop.time() + LONGEST_WAIT_SECONDS
        while self._changed.is_set() and loop.time() < latest:
            self._changed.clear()
            await asyncio.sleep(min(QUIET_SECONDS, latest - loop.time()))
        self._changed.clear()

    async def _compile(self, dirty: Mapping[str, float]) -> None:
        """Compile the dirty pools; all of them take effect at once, with the view they came from.

        A status must never speak of a generation that the compiled policy doesn't hold.
        """
        view = self._cache.view()
        fresh: dict[str, CompiledPool] = {}
        for key in dirty:
            if (pool := view.pools.get(key)) is not None:
                with self._metrics.compile_seconds.time():
                    fresh[key] = compile_pool(view, pool)
                await asyncio.sleep(0)
        self._view = view
        for key, since in dirty.items():
            if key in fresh:
                self._adopt(fresh[key], since)
            elif self._pools.pop(key, None) is not None:
                self._delivery.forget(key)
                self._forget_metrics(key)
        self._publish(fresh)
        self._report(*dirty)
        self._report_plain(view)

    def _adopt(self, compiled: CompiledPool, since: float) -> None:
        known = self._pools.get(compiled.pool)
        if known is None or known.compiled.pool_uid != compiled.pool_uid:
            self._delivery.forget(compiled.pool)
            # After a restart, what the status says was published is as good as remembered.
            self._pools[compiled.pool] = _Pool(
                compiled, published=self._recorded(compiled.pool), changed_at=since
            )
            return
        if known.compiled.snapshot.digest != compiled.snapshot.digest:
            known.changed_at = known.changed_at or since
        known.compiled = compiled

    def _publish(self, keys: Iterable[str]) -> None:
        self._unpublished.update(dict.fromkeys(keys))
        self._publishable.set()

    async def _publish_for_ever(self) -> None:
        failures = 0
        while True:
            await self._publishable.wait()
            self._publishable.clear()
            while self._unpublished:
                key = next(iter(self._unpublished))
                if not await self._publish_one(key):
                    break
                failures = 0
            if self._unpublished:
                await self._pause(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
                failures += 1
                self._publishable.set()

    async def _pause(self, seconds: float) -> None:
        """Wait, but not longer than until Redis is back or there is something new."""
        try:
            async with asyncio.timeout(seconds):
                await self._publishable.wait()
        except TimeoutError:
            return

    async def _publish_one(self, key: str) -> bool:
        state = self._pools.get(key)
        if state is None:
            self._unpublished.pop(key, None)
            return True
        compiled = state.compiled
        try:
            published, is_new = await self._delivery.publish(compiled, self._seen(key))
        except (RedisError, OSError, ContestedRevisionError) as error:
            if self._is_storing:
                _LOG.warning("pool %s: the policy could not be stored: %s", key, error)
                self._is_storing = False
                self.report_all()
            return False
        if not self._is_storing:
            self._is_storing = True
            self.report_all()
        if state.compiled is compiled:
            self._unpublished.pop(key, None)
        if is_new:
            self._metrics.published.inc()
        recorded = self._recorded(key)
        if recorded is not None and recorded.revision == published.revision:
            published = replace(published, time=recorded.time)
        if state.published != published:
            state.published = published
            self._report(key)
        return True

    def _seen(self, key: str) -> dict[str, tuple[int, str]]:
        seen = {
            f"engine {pod}": (report.revision, report.digest)
            for pod, report in self._book.reports(key).items()
        }
        recorded = self._recorded(key)
        if recorded is not None:
            seen["status"] = (recorded.revision, recorded.digest)
        return seen

    def _recorded(self, key: str) -> Published | None:
        """Return what the EnginePool's status says was published."""
        pool = self._view.pools.get(key)
        policy: Any = self._writer.known(pool.metadata.uid).get("policy") if pool else None
        if not policy:
            return None
        return Published(
            revision=int(policy.get("revision") or 0),
            digest=policy.get("digest") or "",
            time=policy.get("publishedTime") or "",
        )

    def _report(self, *keys: str) -> None:
        self._unreported.update(dict.fromkeys(keys))
        self._reportable.set()

    async def _report_for_ever(self) -> None:
        await self._hear_first()
        while True:
            await self._reportable.wait()
            self._reportable.clear()
            keys, self._unreported = self._unreported, {}
            for key in keys:
                self._report_pool(key)
                await asyncio.sleep(0)

    async def _hear_first(self) -> None:
        """Wait for what engines last said: before that, all of them would seem to lag."""
        try:
            async with asyncio.timeout(FIRST_REPORTS_SECONDS):
                await self._heard.wait()
        except TimeoutError:
            _LOG.warning("no word from Redis yet; statuses are written without it")

    def _report_pool(self, key: str) -> None:
        """Have the statuses written of a pool and of the policies that refer to it."""
        view, now = self._view, datetime.now(UTC)
        states = _States(self)
        if (state := states.get(key)) is not None:
            self._observe_progress(key, state)
            known = self._writer.known(state.pool.metadata.uid)
            self._writer.submit(plan_pool_status(state, known=known, now=now))
        for policy in view.policies_by_pool.get(key, ()):
            known = self._writer.known(policy.metadata.uid)
            self._writer.submit(
                plan_policy_status(view, policy, states.of(policy), known=known, now=now)
            )

    def _report_plain(self, view: ClusterView) -> None:
        now = datetime.now(UTC)
        for tier in view.tiers.values():
            flaws = tier_flaws(view, tier.metadata.name)
            known = self._writer.known(tier.metadata.uid)
            self._writer.submit(plan_plain_status(tier, tier.spec, flaws, known=known, now=now))
        plains: list[PreemptionPolicy | ServiceLevel] = [
            *view.preemption_policies.values(),
            *view.service_levels.values(),
        ]
        for plain in plains:
            known = self._writer.known(plain.metadata.uid)
            self._writer.submit(plan_plain_status(plain, plain.spec, (), known=known, now=now))
        for invalid in view.invalid:
            known = self._writer.known(invalid.metadata.uid)
            self._writer.submit(plan_invalid_status(invalid, known=known, now=now))

    def state(self, key: str) -> PoolState | None:
        """Return everything known of a pool; None where it doesn't exist or isn't compiled."""
        pool, own = self._view.pools.get(key), self._pools.get(key)
        if pool is None or own is None:
            return None
        return PoolState(
            pool=pool,
            compiled=own.compiled,
            engines=Engines(pods=self._view.pods_of(pool), reports=self._book.reports(key)),
            published=own.published,
            is_redis_reachable=self._is_listening and self._is_storing,
            activity=own.activity,
        )

    def _observe_progress(self, key: str, state: PoolState) -> None:
        ready = state.engines.ready
        revision = state.published.revision if state.published else 0
        programmed = state.engines.programmed(revision) if revision else ()
        for name, count in (
            ("ready", len(ready)),
            ("programmed", len(programmed)),
            ("lagging", len(ready) - len(programmed)),
        ):
            self._metrics.engines.labels(key, name).set(count)
        own = self._pools[key]
        if own.changed_at is not None and state.is_published and ready == programmed and ready:
            elapsed = asyncio.get_running_loop().time() - own.changed_at
            self._metrics.propagation_seconds.observe(elapsed)
            own.changed_at = None

    def _forget_metrics(self, key: str) -> None:
        for name in ("ready", "programmed", "lagging"):
            self._metrics.engines.remove(key, name)

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_CHECK_SECONDS)
            # Without Redis no engine can be heard: silence means something only with it.
            if self._is_listening:
                now = asyncio.get_running_loop().time()
                self._report(*self._book.expire(now=now))

    async def _check_store_for_ever(self) -> None:
        """Notice that Redis was emptied or replaced, which breaks no connection."""
        while True:
            await asyncio.sleep(STORE_CHECK_SECONDS)
            for key, pool in list(self._pools.items()):
                try:
                    stored = await self._delivery.stored(key)
                except (RedisError, OSError):
                    break
                found = (stored.revision, stored.digest) if stored else None
                published = pool.published
                if published and found != (published.revision, published.digest):
                    self._publish([key])

    async def _measure_for_ever(self) -> None:
        await self._hear_first()
        while True:
            now = asyncio.get_running_loop().time()
            for key, pool in list(self._pools.items()):
                activity = pool.meter.sample(self._book.reports(key).values(), now=now)
                if activity is not None and activity != pool.activity:
                    pool.activity = activity
                    self._report(key)
            await asyncio.sleep(self._usage_seconds)


class _States:
    """The pools' states during one round of reports, each put together once."""

    def __init__(self, reconciler: Reconciler) -> None:
        self._reconciler = reconciler
        self._states: dict[str, PoolState | None] = {}

    def get(self, key: str) -> PoolState | None:
        if key not in self._states:
            self._states[key] = self._reconciler.state(key)
        return self._states[key]

    def of(self, policy: TenantPolicy) -> dict[str, PoolState]:
        """Return the states of the pools that exist among those of `policy`."""
        found = ((key, self.get(key)) for key in pool_keys(policy))
        return {key: state for key, state in found if state is not None}
