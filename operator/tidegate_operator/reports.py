"""What engines report through Redis: the last word of each, as long as it is fresh."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from tidegate_policies.wire import (
    REPORTS_PATTERN,
    EngineReport,
    ReportError,
    report_key,
)

_LOG = logging.getLogger(__name__)

SILENT_SECONDS = 4.0
"""An engine counts as silent after this, in which it reports four times: so a stopped one is shown
within five seconds."""

MAX_RETIRED = 8

RETIRED_SECONDS = 600.0
"""No message of a replaced incarnation arrives so late; then it need not be remembered."""

RECONNECT_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
POLL_SECONDS = 1.0

QUIET_SECONDS = 3.0
"""After so long without a message Redis is asked for a word ..."""

DEAF_SECONDS = 10.0
"""... and after so long the connection is dead, though nothing closed it; redis-py never looks."""

_LAST_REPORTS = report_key("*", "*")


class ReportBook:
    """The newest report of each engine; pure, time is an argument.

    An engine's reports are ordered by sequence inside an incarnation, and an incarnation that was
    replaced never comes back, however late its messages arrive.
    """

    def __init__(self, *, silent_seconds: float = SILENT_SECONDS) -> None:
        self._silent_seconds = silent_seconds
        self._pools: dict[str, dict[str, tuple[EngineReport, float]]] = {}
        self._retired: dict[tuple[str, str], tuple[list[str], float]] = {}

    def accept(self, report: EngineReport, *, now: float) -> bool:
        """Take in a report; tell whether it says something that status should show at once.

        Args:
            report: As received, in any order.
            now: Seconds of a clock that never goes back.
        """
        engines = self._pools.setdefault(report.pool, {})
        known, _ = engines.get(report.pod, (None, 0.0))
        retired, _ = self._retired.get((report.pool, report.pod), ([], 0.0))
        if report.incarnation in retired:
            return False
        if known is not None and known.incarnation == report.incarnation:
            if report.sequence <= known.sequence:
                return False
        elif known is not None:
            latest = [*retired, known.incarnation][-MAX_RETIRED:]
            self._retired[report.pool, report.pod] = (latest, now)
        engines[report.pod] = (report, now)
        return known is None or _acknowledgement(known) != _acknowledgement(report)

    def expire(self, *, now: float) -> frozenset[str]:
        """Forget engines that were silent for too long; returns their pools."""
        self._retired = {
            engine: (incarnations, at)
            for engine, (incarnations, at) in self._retired.items()
            if now - at <= RETIRED_SECONDS
        }
        affected = set()
        for pool, engines in self._pools.items():
            silent = [pod for pod, (_, at) in engines.items() if now - at > self._silent_seconds]
            for pod in silent:
                del engines[pod]
                affected.add(pool)
        return frozenset(affected)

    def refresh(self, *, now: float) -> None:
        """Count every report as just received: after an outage of Redis, silence proves nothing."""
        for engines in self._pools.values():
            for pod, (report, _) in engines.items():
                engines[pod] = (report, now)

    def reports(self, pool: str) -> dict[str, EngineReport]:
        """Return the fresh reports of a pool by pod."""
        return {pod: report for pod, (report, _) in self._pools.get(pool, {}).items()}


async def read_reports(redis: "Redis", pool: str, pods: Sequence[str]) -> dict[str, EngineReport]:
    """Return the last reports of these pods as far as they are fresh and can be read.

    Raises:
        RedisError: They can't be asked for.
    """
    texts: list[Any] = await redis.mget([report_key(pool, pod) for pod in pods]) if pods else []
    found = {}
    for pod, text in zip(pods, texts, strict=True):
        if text is not None:
            with suppress(ReportError):
                found[pod] = EngineReport.from_json(text)
    return found


class ReportListener:
    """Listens to the engines of all pools, over one connection that is made anew when it breaks."""

    def __init__(
        self,
        redis: "Redis",
        *,
        on_report: Callable[[EngineReport], None],
        on_connection: Callable[[bool], None],
    ) -> None:
        """Prepare to listen.

        Args:
            redis: Owned by the caller.
            on_report: Called with every valid report.
            on_connection: Called with whether Redis can be reached, whenever that changes.
        """
        self._redis = redis
        self._on_report = on_report
        self._on_connection = on_connection
        self._is_connected: bool | None = None

    async def run(self) -> None:
        """Listen until cancelled."""
        failures = 0
        while True:
            try:
                await self._listen()
            except (RedisError, OSError) as error:
                failures = 0 if self._is_connected else failures
                if self._is_connected is not False:
                    _LOG.warning("Redis is unreachable, trying again: %s", error)
                self._set_connected(connected=False)
                await asyncio.sleep(RECONNECT_SECONDS[min(failures, len(RECONNECT_SECONDS) - 1)])
                failures += 1

    async def _listen(self) -> None:
        async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.psubscribe(REPORTS_PATTERN)
            # Subscribed first, read second: a report in between is seen twice rather than never.
            await self._read_last_reports()
            self._set_connected(connected=True)
            await self._follow(pubsub)

    async def _follow(self, pubsub: Any) -> None:  # noqa: ANN401
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        while True:
            message = await pubsub.get_message(timeout=POLL_SECONDS)
            if message is not None:
                heard_at = loop.time()
                if message["type"] == "pmessage":
                    self._take(message["data"])
            elif (silence := loop.time() - heard_at) > DEAF_SECONDS:
                raise RedisConnectionError(f"nothing was heard for {silence:.0f} s")
            elif silence > QUIET_SECONDS:
                await pubsub.ping()

    async def _read_last_reports(self) -> None:
        keys = [key async for key in self._redis.scan_iter(match=_LAST_REPORTS, count=1000)]
        texts: list[Any] = list(await self._redis.mget(keys)) if keys else []
        for text in texts:
            if text is not None:
                self._take(text)

    def _take(self, text: bytes | str) -> None:
        try:
            report = EngineReport.from_json(text)
        except ReportError as error:
            _LOG.warning("ignored a report that is not one: %s", error)
            return
        self._on_report(report)

    def _set_connected(self, *, connected: bool) -> None:
        if connected is not self._is_connected:
            self._is_connected = connected
            self._on_connection(connected)


def _acknowledgement(report: EngineReport) -> tuple[object, ...]:
    return (
        report.incarnation,
        report.revision,
        report.digest,
        report.refused,
        report.degraded,
        report.kv_blocks,
        report.host_blocks,
    )
