"""Publishes what was compiled, again and again until Redis takes it."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from redis.exceptions import RedisError, ResponseError

from tidegate_operator.delivery import ContestedRevisionError, Delivery
from tidegate_operator.metrics import Metrics
from tidegate_operator.pools import PoolRecord, Pools
from tidegate_operator.progress import Published
from tidegate_operator.reporter import Reporter
from tidegate_operator.reports import ReportBook
from tidegate_operator.status import StatusWriter

_LOG = logging.getLogger(__name__)

STORE_CHECK_SECONDS = 5.0
RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)


class Publisher:
    """Keeps Redis at the newest policy of every pool."""

    def __init__(
        self,
        pools: Pools,
        *,
        delivery: Delivery,
        book: ReportBook,
        writer: StatusWriter,
        reporter: Reporter,
        metrics: Metrics,
    ) -> None:
        self._pools = pools
        self._delivery = delivery
        self._book = book
        self._writer = writer
        self._reporter = reporter
        self._metrics = metrics
        self._waiting: dict[str, None] = {}
        self._wake = asyncio.Event()

    def publish(self, keys: Iterable[str]) -> None:
        """Have the policies of these pools published, unless they are."""
        self._waiting.update(dict.fromkeys(keys))
        self._wake.set()

    def forget(self, key: str) -> None:
        """Drop what is remembered of a pool that is gone."""
        self._delivery.forget(key)

    async def run(self) -> None:
        """Publish until cancelled."""
        failures = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            if await self._publish_waiting():
                failures = 0
                continue
            await self._pause(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
            failures += 1
            self._wake.set()

    async def watch_store(self) -> None:
        """Notice until cancelled that Redis was emptied or replaced, which breaks no connection."""
        while True:
            await asyncio.sleep(STORE_CHECK_SECONDS)
            for key, record in list(self._pools.records.items()):
                try:
                    stored = await self._delivery.stored(key)
                except ResponseError:
                    stored = None
                except (RedisError, OSError):
                    break
                found = (stored.revision, stored.digest) if stored else None
                published = record.published
                if published is None or found != (published.revision, published.digest):
                    self.publish([key])

    def recorded(self, key: str) -> Published | None:
        """Return what the EnginePool's status says was published."""
        pool = self._pools.view.pools.get(key)
        policy: Any = self._writer.known(pool.metadata.uid).get("policy") if pool else None
        if not policy:
            return None
        return Published(
            revision=int(policy.get("revision") or 0),
            digest=policy.get("digest") or "",
            time=policy.get("publishedTime") or "",
        )

    async def _pause(self, seconds: float) -> None:
        """Wait, but not longer than until Redis is back or there is something new."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _publish_waiting(self) -> bool:
        """Try each waiting pool once; tell whether all of them are published.

        One pool that Redis refuses stands in nobody's way; without a connection none is tried.
        """
        waiting, self._waiting = self._waiting, {}
        failed = []
        for key in list(waiting):
            del waiting[key]
            try:
                await self._publish_one(key)
            except (ResponseError, ContestedRevisionError) as error:
                failed.append(key)
                self._note_refused(key, error)
            except (RedisError, OSError) as error:
                failed.append(key)
                self._note_unreachable(error)
                break
        self._waiting = {**waiting, **self._waiting, **dict.fromkeys(failed)}
        return not failed

    async def _publish_one(self, key: str) -> None:
        if (record := self._pools.records.get(key)) is not None:
            await self._store(key, record)

    async def _store(self, key: str, record: PoolRecord) -> None:
        published, is_new = await self._delivery.publish(record.compiled, self._seen(key))
        self._set_storing(is_storing=True)
        self._set_refused(key, record, is_refused=False)
        if is_new:
            self._metrics.published.labels(key).inc()
        self._adopt(key, record, published)

    def _adopt(self, key: str, record: PoolRecord, published: Published) -> None:
        recorded = self.recorded(key)
        if recorded is not None and recorded.revision == published.revision:
            published = replace(published, time=recorded.time)
        if record.published != published:
            record.published = published
            self._reporter.report(key)

    def _seen(self, key: str) -> dict[str, tuple[int, str]]:
        seen = {
            f"engine {pod}": (report.revision, report.digest)
            for pod, report in self._book.reports(key).items()
        }
        recorded = self.recorded(key)
        if recorded is not None:
            seen["status"] = (recorded.revision, recorded.digest)
        return seen

    def _note_refused(self, key: str, error: Exception) -> None:
        self._set_storing(is_storing=True)
        record = self._pools.records.get(key)
        if record is not None:
            if not record.is_refused:
                _LOG.warning("pool %s: the policy is not stored: %s", key, error)
            self._set_refused(key, record, is_refused=True)

    def _set_refused(self, key: str, record: PoolRecord, *, is_refused: bool) -> None:
        if is_refused is not record.is_refused:
            record.is_refused = is_refused
            self._reporter.report(key)

    def _note_unreachable(self, error: Exception) -> None:
        if self._pools.is_storing:
            _LOG.warning("policies can't be stored: %s", error)
        self._set_storing(is_storing=False)

    def _set_storing(self, *, is_storing: bool) -> None:
        if is_storing is not self._pools.is_storing:
            self._pools.is_storing = is_storing
            self._metrics.redis_reachable.set(is_storing and self._pools.is_listening)
            for key in self._pools.records:
                self._reporter.report(key)
