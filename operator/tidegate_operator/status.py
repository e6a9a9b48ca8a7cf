"""Status on its way to the API server: only what differs, urgent first, at a bounded rate."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import aiohttp

from tidegate_operator.kube import ApiError
from tidegate_operator.metrics import Metrics
from tidegate_operator.planner import StatusUpdate
from tidegate_operator.resources import Resource
from tidegate_operator.status_queue import StatusQueue, WaitingStatus
from tidegate_operator.verdicts import ConditionType, Json

_LOG = logging.getLogger(__name__)

HOLD_SECONDS = 0.3
"""How long a status that is about to change again is held back: engines mostly answer sooner."""

WRITERS = 8
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)

_GONE = 404
_REFUSED = (400, 422)
_OWN_CONDITIONS = frozenset(ConditionType)


class StatusApi(Protocol):
    """Where statuses go."""

    async def apply_status(self, model: type[Resource], metadata: Json, status: Json) -> None:
        """Make `status` the whole of what this operator says about an object."""


class StatusWriter:
    """Knows the status of every object as stored and as wanted, and writes the difference.

    Only the newest wanted status of an object is ever written, and never two at a time.
    """

    def __init__(
        self,
        api: StatusApi,
        *,
        metrics: Metrics,
        writes_per_second: float,
        on_written: Callable[[StatusUpdate, Json], None] | None = None,
    ) -> None:
        """Prepare to write.

        Args:
            api: Owned by the caller.
            metrics: Counts the writes.
            writes_per_second: On average; as many, but at least one, may be written at once after
                a rest.
            on_written: Is told of each status that was written, and the one before.
        """
        self._api = api
        self._on_written = on_written
        self._metrics = metrics
        self._rate = writes_per_second
        self._burst = max(1.0, writes_per_second)
        self._tokens = self._burst
        self._refilled = 0.0
        self._stored: dict[str, Json] = {}
        self._queue = StatusQueue()
        self._writing: dict[str, Json] = {}
        self._written_since_sweep: set[str] = set()
        self._order = itertools.count()
        self._wake = asyncio.Event()

    def known(self, uid: str) -> Json:
        """Return the status that the object has, or is about to have."""
        if (waiting := self._queue.get(uid)) is not None:
            return waiting.update.status
        return self._writing.get(uid) or self._stored.get(uid) or {}

    def submit(self, update: StatusUpdate) -> None:
        """Have a status written, unless it is the stored one already."""
        uid = update.uid
        current = self._writing.get(uid, self._stored.get(uid, {}))
        if update.status == current or _generation(update.status) < _generation(current):
            self._queue.drop(uid)
            return
        now = asyncio.get_running_loop().time()
        waiting = self._queue.get(uid)
        due = now if update.is_settled else now + HOLD_SECONDS
        order = next(self._order)
        if waiting is not None:
            due, order = min(due, max(waiting.due, now)), waiting.order
        is_urgent = update.status.get("conditions") != current.get("conditions")
        self._queue.put(WaitingStatus(update=update, due=due, is_urgent=is_urgent, order=order))
        self._wake.set()

    def begin_sweep(self) -> None:
        """Note that lists are asked for: what is written from now on is newer than they tell."""
        self._written_since_sweep.clear()

    def observe(self, uid: str, status: Json) -> bool:
        """Take in the status as a list tells it; tell whether somebody else changed it.

        Conditions that others added are theirs, and no difference.
        """
        status = _own(status)
        if uid in self._written_since_sweep or uid in self._writing:
            return False
        is_foreign = uid in self._stored and self._stored[uid] != status
        self._stored[uid] = status
        return is_foreign

    def forget(self, uid: str) -> None:
        """Drop an object that is gone."""
        self._stored.pop(uid, None)
        self._queue.drop(uid)

    async def run(self) -> None:
        """Write until cancelled."""
        slots = asyncio.Semaphore(WRITERS)
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                pending = await self._next()
                self._writing[pending.update.uid] = pending.update.status
                task = group.create_task(self._write(pending))
                task.add_done_callback(lambda _: slots.release())

    async def _next(self) -> WaitingStatus:
        """Wait for a status that is due and for the budget to write it."""
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            pause = self._refill(now)
            if pause == 0.0:
                if (first := self._queue.take(now, busy=self._writing)) is not None:
                    self._tokens -= 1.0
                    return first
                due_at = self._queue.due_at()
                pause = 60.0 if due_at is None else due_at - now
            self._wake.clear()
            try:
                async with asyncio.timeout(max(pause, 0.001)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _refill(self, now: float) -> float:
        """Return the seconds until a write is within the budget; 0 for now."""
        self._tokens = min(self._burst, self._tokens + (now - self._refilled) * self._rate)
        self._refilled = now
        return 0.0 if self._tokens >= 1.0 else (1.0 - self._tokens) / self._rate

    async def _write(self, pending: WaitingStatus) -> None:
        update = pending.update
        kind = update.model.definition.kind
        metadata = {"name": update.name}
        if update.namespace:
            metadata["namespace"] = update.namespace
        try:
            await self._api.apply_status(update.model, metadata, update.status)
        except ApiError as error:
            self._metrics.status_writes.labels(kind, str(error.status)).inc()
            if error.status == _GONE:
                self.forget(update.uid)
            elif error.status in _REFUSED:
                _LOG.error("a status was refused: %s", error)
                self._stored[update.uid] = update.status
            else:
                self._retry(pending, error)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._metrics.status_writes.labels(kind, "error").inc()
            self._retry(pending, error)
        else:
            self._metrics.status_writes.labels(kind, "ok").inc()
            before, self._stored[update.uid] = self._stored.get(update.uid, {}), update.status
            self._written_since_sweep.add(update.uid)
            if self._on_written is not None:
                self._on_written(update, before)
        finally:
            del self._writing[update.uid]
            if (waiting := self._queue.get(update.uid)) is not None:
                self._queue.put(waiting)
            self._wake.set()

    def _retry(self, pending: WaitingStatus, error: Exception) -> None:
        uid = pending.update.uid
        pause = RETRY_SECONDS[min(pending.failures, len(RETRY_SECONDS) - 1)]
        _LOG.warning("a status was not written, again in %s s: %s", pause, error)
        if self._queue.get(uid) is None:
            due = asyncio.get_running_loop().time() + pause
            self._queue.put(replace(pending, due=due, failures=pending.failures + 1))


def listed_status(raw: Json) -> Json:
    """Return the status of an object as the API server lists it.

    One that is about a generation which the object hasn't reached says nothing: a backup was
    restored between the change and its status.
    """
    status: Json = raw.get("status") or {}
    return {} if _generation(status) > raw["metadata"].get("generation", 0) else status


def _own(status: Json) -> Json:
    conditions = [c for c in status.get("conditions", ()) if c.get("type") in _OWN_CONDITIONS]
    return status | {"conditions": conditions} if "conditions" in status else status


def _generation(status: Json) -> int:
    return int(status.get("observedGeneration") or 0)
