"""Watches the Secrets with API keys, in the namespaces where the operator may read Secrets.

Everything else is watched for all namespaces or for the same few; Secrets are not, as a right to
read all of them is more than the operator should have.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from tidegate_operator.kube import SECRETS, ApiError, KubeApi

_LOG = logging.getLogger(__name__)

RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)

_ERRORS = (ApiError, aiohttp.ClientError, OSError, TimeoutError, ValueError)


class SecretWatch:
    """Tells of changes until cancelled."""

    def __init__(
        self,
        api: KubeApi,
        namespaces: Sequence[str | None],
        *,
        on_event: Callable[[str, Any], None],
        on_gap: Callable[[], None],
    ) -> None:
        """Prepare; `run` begins.

        Args:
            api: Owned by the caller.
            namespaces: Where to watch; None among them = everywhere.
            on_event: Called with the type and the object of each change.
            on_gap: Called when changes may have been missed, at the start as well: a list tells.
        """
        self._api = api
        self._namespaces = namespaces
        self._on_event = on_event
        self._on_gap = on_gap

    async def run(self) -> None:
        """Watch all namespaces at once."""
        async with asyncio.TaskGroup() as group:
            # Without any namespace there is one task that waits: who runs this takes an end for a
            # failure.
            group.create_task(asyncio.Event().wait())
            for namespace in self._namespaces:
                group.create_task(self._follow(namespace))

    async def _follow(self, namespace: str | None) -> None:
        failures = 0
        while True:
            try:
                version = await self._api.version_of(SECRETS, namespace)
                self._on_gap()
                failures = 0
                await self._watch(namespace, version)
            except _ERRORS as error:
                pause = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
                where = f"namespace {namespace}" if namespace else "all namespaces"
                _LOG.warning("Secrets of %s, again in %s s: %s", where, pause, error)
                await asyncio.sleep(pause)
                failures += 1

    async def _watch(self, namespace: str | None, version: str) -> None:
        """Follow changes from `version` on; returns when that is too old to go on from."""
        while True:
            async for event in self._api.watch(SECRETS, namespace, version):
                if event["type"] == "ERROR":
                    return
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    self._on_event(event["type"], event["object"])
