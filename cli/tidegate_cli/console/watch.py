"""Keeps up with API server and Redis, as the operator does, and writes to neither."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
from kubernetes.aio.config import ConfigException
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tidegate_cli.console.fleet import Fleet, Json, Past, PublishedPolicy, Reports
from tidegate_cli.console.history import History, Sample
from tidegate_cli.console.views import PoolView, TenantView, pool_views, tenant_views
from tidegate_operator.kube import CUSTOM, POOLS, ApiError, KubeApi
from tidegate_operator.reports import ReportBook, ReportListener
from tidegate_operator.resources import TenantPolicy
from tidegate_policies.envelope import Envelope, EnvelopeRefusedError
from tidegate_policies.problems import SnapshotError
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import EngineReport, envelope_key

TICK_SECONDS = 0.25
"""How soon after a report the pages show it, at most."""

SAMPLE_SECONDS = 1.0
RATE_SECONDS = 30.0
"""Rates and shares are means over so long, or over less until so much is known."""

API_SECONDS = 3.0
"""How often objects are listed."""

_POLICIES = next(watched for watched in CUSTOM if watched.model is TenantPolicy)


class FleetWatch:
    """What is known of the fleet right now, and of its last minutes.

    Attributes:
        version: Changes whenever there is something new to show.
    """

    def __init__(
        self, redis: "Redis", *, redis_url: str, kubeconfig: Path | None, namespaces: Sequence[str]
    ) -> None:
        """Prepare; `run` begins.

        Args:
            redis: Owned by the caller.
            redis_url: Named, without its credentials, when Redis can't be reached.
            kubeconfig: None = the service account of the pod.
            namespaces: Only pools and policies in these; empty = all.
        """
        self.version = 0
        self._redis = redis
        self._redis_place = _place(redis_url)
        self._kubeconfig = kubeconfig
        self._namespaces = tuple(namespaces)
        self._book = ReportBook()
        self._is_listening = False
        self._pools_seen: set[str] = set()
        self._pools: dict[str, Json] = {}
        self._policies: dict[str, Json] = {}
        self._published: dict[str, PublishedPolicy] = {}
        self._digests: dict[str, tuple[bytes | None, bytes | None]] = {}
        self._past: dict[str, deque[tuple[float, Reports]]] = {}
        self._problems: dict[str, str] = {}
        self._history = History()
        self._heard_at = 0.0
        self._shown: dict[str, tuple[int, Any]] = {}
        self._is_new = False

    def fleet(self) -> Fleet:
        """Return what is known right now."""
        now = time.monotonic()
        return Fleet(
            pools=self._pools,
            policies=self._policies,
            published=self._published,
            reports={pool: self._book.reports(pool) for pool in self._pools_seen},
            past={
                pool: Past(seconds=now - samples[0][0], reports=samples[0][1])
                for pool, samples in self._past.items()
                if samples and now - samples[0][0] >= SAMPLE_SECONDS
            },
        )

    def pools(self) -> list[PoolView]:
        """Return every pool as it is now."""
        return cast("list[PoolView]", self._once("pools", pool_views))

    def tenants(self) -> list[TenantView]:
        """Return every tenant as it is now."""
        return cast("list[TenantView]", self._once("tenants", tenant_views))

    def history(self, pool: str) -> Sequence[Sample]:
        """Return the last minutes of a pool."""
        return self._history.of(pool)

    @property
    def is_live(self) -> bool:
        """Whether engines can be heard."""
        return self._is_listening

    @property
    def problems(self) -> list[str]:
        """What could not be read, in sentences."""
        told = [text for _, text in sorted(self._problems.items())]
        if not self._is_listening:
            ago = time.monotonic() - self._heard_at
            age = f" Figures are {ago:.0f} s old." if self._heard_at else ""
            told.append(f"Redis can't be reached at {self._redis_place}; trying again.{age}")
        return told

    async def run(self) -> None:
        """Keep up until cancelled."""
        listener = ReportListener(
            self._redis, on_report=self._take_report, on_connection=self._set_listening
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(listener.run())
            group.create_task(self._read_policies())
            group.create_task(self._read_api())
            group.create_task(self._tick())

    def _once(self, what: str, build: Any) -> Any:  # noqa: ANN401
        """Build a view once for all pages that show the same version."""
        version, view = self._shown.get(what, (-1, None))
        if version != self.version:
            view = build(self.fleet())
            self._shown[what] = (self.version, view)
        return view

    def _take_report(self, report: EngineReport) -> None:
        if self._namespaces and report.pool.partition("/")[0] not in self._namespaces:
            return
        self._pools_seen.add(report.pool)
        self._book.accept(report, now=time.monotonic())
        self._heard_at = time.monotonic()
        self._is_new = True

    def _set_listening(self, connected: bool) -> None:
        self._is_listening = connected
        self._book.refresh(now=time.monotonic())
        self._is_new = True

    async def _tick(self) -> None:
        sampled_at = 0.0
        while True:
            now = time.monotonic()
            if self._is_listening and self._book.expire(now=now):
                self._is_new = True
            is_due = now - sampled_at >= SAMPLE_SECONDS
            if self._is_new or is_due:
                self.version += 1
                self._is_new = False
            if is_due:
                sampled_at = now
                self._sample(now)
            await asyncio.sleep(TICK_SECONDS)

    def _sample(self, now: float) -> None:
        for pool in self._pools_seen:
            samples = self._past.setdefault(pool, deque())
            samples.append((now, self._book.reports(pool)))
            while samples[0][0] < now - RATE_SECONDS:
                samples.popleft()
        if self._is_listening:
            self._history.add(self.pools(), at=time.time())

    async def _read_policies(self) -> None:
        while True:
            for pool in sorted({*self._pools, *self._pools_seen}):
                try:
                    await self._read_policy(pool)
                except (RedisError, OSError):
                    break  # the listener says so
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _read_policy(self, pool: str) -> None:
        key, problem = envelope_key(pool), f"policy {pool}"
        asked = self._redis.hmget(key, ["revision", "digest"])
        revision, digest = await cast("Awaitable[list[bytes | None]]", asked)
        if self._digests.get(pool) == (revision, digest):
            return
        text = await cast("Awaitable[bytes | None]", self._redis.hget(key, "envelope"))
        if text is None:
            self._published.pop(pool, None)
        else:
            try:
                envelope = Envelope.from_json(text)
                snapshot = PolicySnapshot.from_text(envelope.body)
            except (EnvelopeRefusedError, SnapshotError) as error:
                self._problems[problem] = f"The policy of pool {pool} can't be read: {error}"
                return
            self._published[pool] = PublishedPolicy(revision=envelope.revision, snapshot=snapshot)
        self._problems.pop(problem, None)
        self._digests[pool] = (revision, digest)
        self._is_new = True

    async def _read_api(self) -> None:
        while True:
            try:
                _check_is_there(self._kubeconfig)
                async with KubeApi.connected(self._kubeconfig) as api:
                    while True:
                        await self._list(api)
                        await asyncio.sleep(API_SECONDS)
            except (ApiError, ConfigException, aiohttp.ClientError, TimeoutError, OSError) as error:
                self._problems["cluster"] = _cluster_problem(error)
                self._is_new = True
            await asyncio.sleep(API_SECONDS)

    async def _list(self, api: KubeApi) -> None:
        pools, policies = await asyncio.gather(
            api.list_objects(POOLS, self._namespaces), api.list_objects(_POLICIES, self._namespaces)
        )
        self._pools = {_qualified(one): one for one in pools}
        self._policies = {_qualified(one): one for one in policies}
        self._problems.pop("cluster", None)
        self._is_new = True


def _check_is_there(kubeconfig: Path | None) -> None:
    """Look for the file, or the files, as the client would only log that there are none."""
    if kubeconfig and not any(Path(one).is_file() for one in str(kubeconfig).split(os.pathsep)):
        raise ConfigException(f"there is no file {kubeconfig}")


def _qualified(thing: Json) -> str:
    return f"{thing['metadata']['namespace']}/{thing['metadata']['name']}"


def _place(redis_url: str) -> str:
    """Return where a Redis is, without the credentials of its URL."""
    parts = urlsplit(redis_url)
    return parts.netloc.rpartition("@")[2] or parts.path


def _cluster_problem(error: Exception) -> str:
    if isinstance(error, ConfigException):
        return f"No cluster: {error}. Name a kubeconfig by --kubeconfig."
    if isinstance(error, ApiError) and error.status == 404:
        return "The cluster doesn't know Tidegate's kinds: install the CustomResourceDefinitions."
    if isinstance(error, ApiError) and error.status in {401, 403}:
        return "The API server doesn't let this user list EnginePools and TenantPolicies."
    reason = str(error) or type(error).__name__
    return f"The API server can't be reached; trying again. ({reason})"
