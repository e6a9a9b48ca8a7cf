"""Watches the custom resources of one namespace and tells when their conditions came true."""

import asyncio
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tidegate_cli.errors import NotReadyError
from tidegate_devcluster.api import Change, KubernetesApi, Listing
from tidegate_operator.resources import GROUP, VERSION


class ResourceWatch:
    """Follows all objects of one kind in one namespace, by watch, never by polling.

    Attributes:
        num_writes: Changes of objects seen since the first listing.
        written_at: The event loop's time at which the last of them was seen.
    """

    num_writes: int
    written_at: float

    def __init__(self, kubeconfig: Path, *, namespace: str, plural: str) -> None:
        """Prepare; inside the context, everything is seen from the start."""
        self.num_writes = 0
        self.written_at = 0.0
        self._path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{plural}"
        self._plural = plural
        self._api = KubernetesApi(kubeconfig)
        self._items: dict[str, dict[str, Any]] = {}
        # By name and condition: by generation, when the watch first brought it as True.
        self._true_at: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        self._changed = asyncio.Event()
        self._listed = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self._api.__aenter__()
        self._task = asyncio.create_task(self._follow())
        await self._listed.wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._api.__aexit__(kind, error, trace)
        # Gives the aborted connection the turn of the event loop in which it is closed.
        await asyncio.sleep(0)

    async def when_true(
        self, name: str, condition: str, *, generation: int, limit_seconds: float
    ) -> float:
        """Wait until the object's condition holds for `generation`.

        Returns:
            The event loop's time at which the watch brought it, however late this was called.

        Raises:
            NotReadyError: It didn't within the limit; the message holds the condition as last seen.
        """
        try:
            async with asyncio.timeout(limit_seconds):
                while True:
                    self._changed.clear()
                    found = self._when(name, condition, generation)
                    if found is not None:
                        return found
                    await self._changed.wait()
        except TimeoutError:
            raise NotReadyError(
                f"{self._plural}/{name}: {condition}=True for generation {generation}",
                limit_seconds=limit_seconds,
                last_seen=self._describe(name, condition),
            ) from None

    def _when(self, name: str, condition: str, generation: int) -> float | None:
        seen = self._true_at[name, condition]
        return min((at for observed, at in seen.items() if observed >= generation), default=None)

    def _describe(self, name: str, condition: str) -> str:
        if name not in self._items:
            return "no such object"
        conditions = self._items[name].get("status", {}).get("conditions", ())
        for one in conditions:
            if one["type"] == condition:
                return f"{one['status']} ({one['reason']}: {one['message']})"
        return "the condition is not set"

    async def _follow(self) -> None:
        async for news in self._api.follow(self._path):
            if isinstance(news, Listing):
                self._items = {item["metadata"]["name"]: item for item in news.items}
                for item in news.items:
                    self._note(item)
                self._listed.set()
            else:
                self._take(news)
            self._changed.set()

    def _take(self, change: Change) -> None:
        self.num_writes += 1
        self.written_at = asyncio.get_running_loop().time()
        name = change.item["metadata"]["name"]
        if change.is_gone:
            self._items.pop(name, None)
        else:
            self._items[name] = change.item
            self._note(change.item)

    def _note(self, item: dict[str, Any]) -> None:
        now = asyncio.get_running_loop().time()
        for one in item.get("status", {}).get("conditions", ()):
            if one["status"] == "True":
                key = (item["metadata"]["name"], one["type"])
                self._true_at[key].setdefault(one.get("observedGeneration", 0), now)
