"""The operator's work: what changed is compiled, published and reported.

Nothing waits for anything else: compiling needs no Redis, status needs no Redis, and an engine's
acknowledgement goes straight into status.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Protocol

from tidegate_operator.autoscaler_writer import AutoscalerApi, AutoscalerScope, AutoscalerWriter
from tidegate_operator.cluster import pool_keys
from tidegate_operator.compiler import CompiledPool, compile_pool
from tidegate_operator.delivery import Delivery
from tidegate_operator.lull import Lull
from tidegate_operator.metrics import Metrics
from tidegate_operator.pools import PoolRecord, Pools
from tidegate_operator.publisher import Publisher
from tidegate_operator.reporter import Reporter
from tidegate_operator.reports import ReportBook
from tidegate_operator.resources import TenantPolicy
from tidegate_operator.scaler import ScaleApi, Scaler
from tidegate_operator.signals import Signals
from tidegate_operator.status import StatusWriter
from tidegate_operator.usage import PoolActivity
from tidegate_operator.watch_cache import WatchCache
from tidegate_policies.wire import EngineReport

QUIET_SECONDS = 0.05
"""A change waits until nothing changed for so long ..."""

LONGEST_WAIT_SECONDS = 0.25
"""... but never longer than this ..."""

LONGEST_BUSY_SECONDS = 1.0
"""... or this, while engines are still taking the revision before: more would only queue there."""

EXPIRY_CHECK_SECONDS = 0.25


class ScalingApi(ScaleApi, AutoscalerApi, Protocol):
    """Where everything is that scales."""


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
        scaling: ScalingApi,
        scope: AutoscalerScope,
    ) -> None:
        self._cache = cache
        self._book = book
        self._metrics = metrics
        self._usage_seconds = usage_seconds
        self._pools = Pools(book)
        self._reporter = Reporter(self._pools, writer=writer, metrics=metrics)
        self._publisher = Publisher(
            self._pools,
            delivery=delivery,
            book=book,
            writer=writer,
            reporter=self._reporter,
            metrics=metrics,
        )
        self._scaler = Scaler(scaling, self._pools, book=book, reporter=self._reporter)
        self._autoscalers = AutoscalerWriter(
            scaling, self._pools, reporter=self._reporter, scope=scope
        )
        self._signals = Signals(self._pools, reporter=self._reporter, metrics=metrics)
        self._dirty: dict[str, float] = {}
        self._changes = Lull(quiet_seconds=QUIET_SECONDS, longest_seconds=self._longest_wait)

    def mark(self, affected: Iterable[str] | None) -> None:
        """Have the pools compiled soon; None = nothing changed at all.

        An empty collection is a change too: an object that no pool depends on has a status.
        """
        if affected is None:
            return
        now = asyncio.get_running_loop().time()
        for key in affected:
            self._dirty.setdefault(key, now)
        self._changes.disturb()

    def take_report(self, report: EngineReport) -> None:
        """Take in what an engine reports.

        An engine may know of a revision that was forgotten everywhere else; until a newer one is
        published, it refuses everything.
        """
        if self._book.accept(report, now=asyncio.get_running_loop().time()):
            self._reporter.report(report.pool)
        record = self._pools.records.get(report.pool)
        published = record.published if record is not None else None
        if published is not None and published.is_contradicted_by(report):
            self._publisher.publish([report.pool])

    def set_listening(self, is_listening: bool) -> None:  # noqa: FBT001
        """Take in whether Redis can be reached."""
        self._pools.is_listening = self._pools.is_storing = is_listening
        self._metrics.redis_reachable.set(is_listening)
        self._book.refresh(now=asyncio.get_running_loop().time())
        self._reporter.set_heard()
        for key in self._pools.records:
            self._reporter.report(key)
        if is_listening:
            self._publisher.publish(self._pools.records)

    def report_all(self) -> None:
        """Have every status compared with what it should be."""
        self._reporter.report_all()
        self._reporter.report_plain(self._pools.view)

    def policies_in_force(self) -> list[TenantPolicy]:
        """Return the policies that at least one pool obeys."""
        return [
            policy
            for policy in self._pools.view.policies.values()
            if any(
                record.compiled.verdicts[policy.metadata.qualified_name].is_in_force
                for key in pool_keys(policy)
                if (record := self._pools.records.get(key)) is not None
                and policy.metadata.qualified_name in record.compiled.verdicts
            )
        ]

    def works(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Return all that has to run side by side, each until it is cancelled, by name."""
        return {
            "the compiler": self._compile_for_ever(),
            "the publisher": self._publisher.run(),
            "the look at Redis": self._publisher.watch_store(),
            "the reporter": self._reporter.run(),
            "the scaler": self._scaler.run(),
            "the writer of autoscalers": self._autoscalers.run(),
            "the series for autoscalers": self._signals.run(),
            "the expiry of reports": self._expire_for_ever(),
            "the meter of usage": self._measure_for_ever(),
        }

    async def _compile_for_ever(self) -> None:
        while True:
            await self._changes.wait()
            dirty, self._dirty = self._dirty, {}
            await self._compile(dirty)

    def _longest_wait(self) -> float:
        is_busy = any(map(self._pools.is_on_its_way, self._dirty))
        return LONGEST_BUSY_SECONDS if is_busy else LONGEST_WAIT_SECONDS

    async def _compile(self, dirty: Mapping[str, float]) -> None:
        """Compile the dirty pools; all take effect at once, with the view that they came from."""
        view = self._cache.view()
        fresh: dict[str, CompiledPool] = {}
        for key in dirty:
            if (pool := view.pools.get(key)) is not None:
                record = self._pools.records.get(key)
                before = record.compiled if record is not None else None
                with self._metrics.compile_seconds.labels(key).time():
                    fresh[key] = compile_pool(view, pool, before=before)
                await asyncio.sleep(0)
        self._pools.view = view
        for key, since in dirty.items():
            if key in fresh:
                self._adopt(fresh[key], since)
            else:
                self._forget(key)
        self._publisher.publish(fresh)
        self._scaler.look_at(fresh)
        self._autoscalers.look()
        self._reporter.report_plain(view)

    def _adopt(self, compiled: CompiledPool, since: float) -> None:
        key = compiled.pool
        record = self._pools.records.get(key)
        if record is None or record.compiled.pool_uid != compiled.pool_uid:
            self._publisher.forget(key)
            # After a restart, what the status says was published is as good as remembered.
            self._pools.records[key] = PoolRecord(
                compiled, published=self._publisher.recorded(key), changed_at=since
            )
            self._reporter.report(key, None)
            return
        if record.compiled.snapshot.digest != compiled.snapshot.digest:
            record.changed_at = record.changed_at or since
        changed = compiled.differing_verdicts(record.compiled)
        record.behind.intersection_update(compiled.verdicts)
        record.compiled = compiled
        self._reporter.report(key, changed)

    def _forget(self, key: str) -> None:
        if self._pools.records.pop(key, None) is not None:
            self._publisher.forget(key)
            self._reporter.forget(key)
        self._reporter.report(key, None)

    async def _expire_for_ever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_CHECK_SECONDS)
            # Without Redis no engine can be heard: silence means something only with it.
            if self._pools.is_listening:
                for key in self._book.expire(now=asyncio.get_running_loop().time()):
                    self._reporter.report(key)

    async def _measure_for_ever(self) -> None:
        await self._reporter.hear_first()
        while True:
            now = asyncio.get_running_loop().time()
            for key, record in list(self._pools.records.items()):
                state = self._pools.state(key)
                reports = state.engines.ready_reports if state is not None else ()
                activity = record.meter.sample(reports, now=now)
                if activity is not None and activity != record.activity:
                    changed = _policies_with_news(record, activity)
                    record.activity = activity
                    self._reporter.report(key, changed)
            await asyncio.sleep(self._usage_seconds)


def _policies_with_news(record: PoolRecord, activity: PoolActivity) -> set[str] | None:
    """Return the policies whose usage may look different; None for all of them."""
    if record.activity is None:
        return None
    before, after = record.activity.tenants, activity.tenants
    rules = record.compiled.snapshot.tenant_rules
    return {
        rules[tenant].policy
        for tenant in (*before, *after)
        if tenant in rules and before.get(tenant) != after.get(tenant)
    }
