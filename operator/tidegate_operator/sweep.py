"""Lists of all objects: the start, and what no watch tells of.

A watch that was down never reports what was deleted meanwhile; only a list shows it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from tidegate_operator.kube import CUSTOM, SECRETS, WATCHED, ApiError, KubeApi, Watched
from tidegate_operator.reconciler import Reconciler
from tidegate_operator.status import StatusWriter, listed_status
from tidegate_operator.watch_cache import WatchCache

_LOG = logging.getLogger(__name__)

SETTLE_SECONDS = 1.0
"""A watch that lists anew tells of every object: one sweep after the last of them is enough."""

RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)

_LIST_ERRORS = (ApiError, aiohttp.ClientError, OSError, TimeoutError)


class MissingKindError(Exception):
    """The API server doesn't serve one of Tidegate's kinds.

    Attributes:
        crd_name: Of the missing CustomResourceDefinition.
    """

    def __init__(self, crd_name: str) -> None:
        super().__init__(
            f"the API server doesn't serve {crd_name}: install the CustomResourceDefinitions first"
            " (kubectl apply --server-side -f crds/)"
        )
        self.crd_name = crd_name


class Sweeper:
    """Makes the cache equal to what the API server lists, at times and on request.

    Attributes:
        listed_at: When everything was last listed, by the monotonic clock; the start at first.
    """

    def __init__(
        self,
        api: KubeApi,
        *,
        cache: WatchCache,
        writer: StatusWriter,
        reconciler: Reconciler,
        namespaces: Sequence[str],
        secret_scopes: Sequence[str | None],
        interval_seconds: float,
    ) -> None:
        """Prepare.

        Args:
            api: Owned by the caller, like all but the last three.
            cache: Is made equal to what is listed.
            writer: Told of statuses.
            reconciler: Told of changes.
            namespaces: Only these are listed; empty = all.
            secret_scopes: Only their Secrets are; None = of all, empty = of none.
            interval_seconds: Between two sweeps that nobody asked for.
        """
        self._api = api
        self._cache = cache
        self._writer = writer
        self._reconciler = reconciler
        self._namespaces = namespaces
        self._secret_scopes = secret_scopes
        self._interval_seconds = interval_seconds
        self._requested = asyncio.Event()
        self.listed_at = time.monotonic()

    def request(self) -> None:
        """Ask for a sweep soon."""
        self._requested.set()

    async def first(self) -> None:
        """Sweep until it works once; nothing may be compiled from half of the cluster.

        Raises:
            MissingKindError: A kind is not served; waiting would not help.
        """
        failures = 0
        while True:
            try:
                return await self.sweep()
            except ApiError as error:
                await self._check_kinds()
                failures = await self._back_off(failures, error)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                failures = await self._back_off(failures, error)

    async def run(self) -> None:
        """Sweep until cancelled."""
        failures = 0
        while True:
            await self._wait()
            try:
                await self.sweep()
            except _LIST_ERRORS as error:
                failures = await self._back_off(failures, error)
                self._requested.set()
            else:
                failures = 0

    async def sweep(self) -> None:
        """List everything once.

        Raises:
            ApiError: The API server refused a list; all that it didn't refuse is taken in. Like
                the others, the first of those that occurred.
            aiohttp.ClientError: The connection failed.
            OSError: Likewise.
            TimeoutError: Likewise.
        """
        self._writer.begin_sweep()
        is_foreign = False
        errors: list[Exception] = []
        for watched in WATCHED:
            try:
                is_foreign |= await self._sweep_kind(watched)
            except _LIST_ERRORS as error:
                errors.append(error)
        if is_foreign:
            self._reconciler.report_all()
        if errors:
            raise errors[0]
        self.listed_at = time.monotonic()

    async def _sweep_kind(self, watched: Watched) -> bool:
        """List one kind; tell whether somebody else changed a status."""
        before = self._cache.begin_sweep(watched)
        listed = await self._list(watched)
        is_foreign = False
        if watched in CUSTOM:
            for raw in listed:
                is_foreign |= self._writer.observe(raw["metadata"]["uid"], listed_status(raw))
            present = {raw["metadata"]["uid"] for raw in listed}
            for uid in before - present:
                self._writer.forget(uid)
        self._reconciler.mark(self._cache.end_sweep(watched, before, listed))
        return is_foreign

    async def _list(self, watched: Watched) -> list[Any]:
        if watched is not SECRETS:
            return await self._api.list_objects(watched, self._namespaces)
        if None in self._secret_scopes:
            return await self._api.list_objects(watched, ())
        scopes = [scope for scope in self._secret_scopes if scope]
        # No namespace at all would mean all of them.
        return await self._api.list_objects(watched, scopes) if scopes else []

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._interval_seconds):
                await self._requested.wait()
        except TimeoutError:
            return
        while self._requested.is_set():
            self._requested.clear()
            await asyncio.sleep(SETTLE_SECONDS)

    async def _check_kinds(self) -> None:
        for watched in CUSTOM:
            try:
                await self._api.list_objects(watched, self._namespaces)
            except ApiError as error:
                if error.status == 404 and watched.model is not None:
                    raise MissingKindError(watched.model.definition.crd_name) from error

    async def _back_off(self, failures: int, error: Exception) -> int:
        pause = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
        _LOG.warning("listing failed, again in %s s: %s", pause, error)
        await asyncio.sleep(pause)
        return failures + 1
