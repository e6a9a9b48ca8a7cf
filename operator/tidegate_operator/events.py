"""Kubernetes Events: tells whoever describes an object which of its conditions turned, and why."""

import asyncio
import logging
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import quote

import aiohttp

from tidegate_operator.kube import ApiError
from tidegate_operator.planner import StatusUpdate
from tidegate_operator.resources import API_VERSION
from tidegate_operator.verdicts import ConditionType, Json, Reason

_LOG = logging.getLogger(__name__)

SERIES_SECONDS = 600.0
"""The same that comes again within this is counted on the Event that tells of it already."""

PAUSE_SECONDS = 0.1
"""Between two writes: whatever happens, the API server gets no more than ten a second."""

MAX_WAITING = 1000
"""Most Events that wait to be written; what happens besides, only the status tells."""

MAX_NOTE_CHARACTERS = 1024
"""As the API server takes it."""

CONTROLLER = "tidegate.io/operator"

# Ready is left out: it repeats the reason and message of another condition.
_ACTIONS = {
    ConditionType.ACCEPTED: "Accept",
    ConditionType.RESOLVED_REFS: "ResolveReferences",
    ConditionType.PROGRAMMED: "Program",
    ConditionType.SERVICE_LEVEL_MET: "JudgeServiceLevel",
    ConditionType.DEGRADED: "WatchEngines",
}

_CLUSTER_SCOPED_EVENTS = "default"


@dataclass(frozen=True, slots=True)
class Transition:
    """One condition that turned.

    Attributes:
        type: Of the condition.
    """

    type: ConditionType
    status: str
    reason: str
    message: str

    @property
    def is_bad(self) -> bool:
        """Whether something is wrong now."""
        return (self.status == "True") is (self.type is ConditionType.DEGRADED)


def transitions(before: Json, after: Json) -> Iterator[Transition]:
    """Yield what is worth an Event between two statuses of an object.

    That is a condition whose status or reason changed. A condition that is good from its beginning
    is none, and neither is a policy on its way to the engines: that is what every change begins
    with, and what follows is compared with what was before (see `before_pending`).
    """
    known = {condition.get("type"): condition for condition in before.get("conditions", ())}
    for condition in after.get("conditions", ()):
        kind = condition.get("type")
        if kind not in _ACTIONS or condition["reason"] == Reason.PENDING:
            continue
        old = known.get(kind, {"reason": Reason.PENDING})
        new = Transition(
            ConditionType(kind), condition["status"], condition["reason"], condition["message"]
        )
        is_first = old.get("reason") == Reason.PENDING
        is_same = (old.get("status"), old.get("reason")) == (new.status, new.reason)
        if not (is_same or (is_first and not new.is_bad)):
            yield new


def before_pending(status: Json, replaced: Mapping[str, Json]) -> Json:
    """Return a status with what Pending replaced, by type, in place of each Pending."""
    conditions = [
        replaced.get(condition["type"], condition)
        if condition["reason"] == Reason.PENDING
        else condition
        for condition in status.get("conditions", ())
    ]
    return {**status, "conditions": conditions}


class EventApi(Protocol):
    """Where Events go."""

    async def request(
        self, method: str, path: str, *, body: object = None, content_type: str = ...
    ) -> Any:  # noqa: ANN401
        """Send one request and return the answer's JSON."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What an Event is about; what is equal in all of this, is the same happening again."""

    uid: str
    type: ConditionType
    status: str
    reason: str


@dataclass(slots=True)
class _Waiting:
    update: StatusUpdate
    transition: Transition
    at: datetime
    count: int = 1


@dataclass(slots=True)
class _Series:
    """An Event that is stored."""

    path: str
    count: int
    last: float


class EventWriter:
    """Writes Events one after the other, and counts on one what comes again.

    Events are for people who look: one that can't be written is dropped, and nothing waits for it.
    """

    def __init__(self, api: EventApi) -> None:
        """Prepare to write to `api`, which is owned by the caller."""
        self._api = api
        self._instance = socket.gethostname()[:128]
        self._waiting: dict[_Subject, _Waiting] = {}
        self._series: dict[_Subject, _Series] = {}
        self._replaced: dict[str, dict[str, Json]] = {}
        self._wake = asyncio.Event()

    def note(self, update: StatusUpdate, before: Json) -> None:
        """Take in that a status was written in place of `before`."""
        before = before_pending(before, self._replaced.get(update.uid, {}))
        self._remember(update, before)
        for turned in transitions(before, update.status):
            subject = _Subject(update.uid, turned.type, turned.status, turned.reason)
            now = datetime.now(UTC)
            if subject in self._waiting:
                self._waiting[subject].count += 1
                self._waiting[subject].at = now
            elif len(self._waiting) < MAX_WAITING:
                self._waiting[subject] = _Waiting(update, turned, now)
        if self._waiting:
            self._wake.set()

    def forget(self, uid: str) -> None:
        """Take in that an object is gone."""
        self._replaced.pop(uid, None)

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                subject = next(iter(self._waiting))
                await self._write(subject, self._waiting.pop(subject))
                await asyncio.sleep(PAUSE_SECONDS)

    def _remember(self, update: StatusUpdate, before: Json) -> None:
        """Keep what Pending replaces now, until something else takes Pending's place."""
        self._replaced.pop(update.uid, None)
        conditions = update.status.get("conditions", ())
        pending = {one["type"] for one in conditions if one["reason"] == Reason.PENDING}
        replaced = {
            one["type"]: one
            for one in before.get("conditions", ())
            if one["type"] in pending and one["reason"] != Reason.PENDING
        }
        if replaced:
            self._replaced[update.uid] = replaced

    async def _write(self, subject: _Subject, waiting: _Waiting) -> None:
        now = asyncio.get_running_loop().time()
        self._series = {
            known: series
            for known, series in self._series.items()
            if now - series.last < SERIES_SECONDS
        }
        series = self._series.get(subject)
        try:
            if series is None:
                self._series[subject] = await self._create(waiting, now)
            else:
                series.last, series.count = now, series.count + waiting.count
                await self._continue(series, waiting.at)
        except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
            # Also when it expired or somebody deleted it: the next one begins anew.
            self._series.pop(subject, None)
            _LOG.warning("an Event was not written: %s", error)

    async def _create(self, waiting: _Waiting, now: float) -> _Series:
        body = _event(waiting, self._instance)
        collection = f"/apis/events.k8s.io/v1/namespaces/{body['metadata']['namespace']}/events"
        made = await self._api.request("POST", collection, body=body)
        path = f"{collection}/{quote(made['metadata']['name'])}"
        return _Series(path, waiting.count, now)

    async def _continue(self, series: _Series, at: datetime) -> None:
        body = {"series": {"count": series.count, "lastObservedTime": _micro_time(at)}}
        await self._api.request(
            "PATCH", series.path, body=body, content_type="application/merge-patch+json"
        )


def _event(waiting: _Waiting, instance: str) -> Json:
    update, turned = waiting.update, waiting.transition
    regarding = {
        "apiVersion": API_VERSION,
        "kind": update.model.definition.kind,
        "name": update.name,
        "uid": update.uid,
        **({"namespace": update.namespace} if update.namespace else {}),
    }
    at = _micro_time(waiting.at)
    event: Json = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "generateName": f"{update.name}-",
            "namespace": update.namespace or _CLUSTER_SCOPED_EVENTS,
        },
        "regarding": regarding,
        "type": "Warning" if turned.is_bad else "Normal",
        "reason": turned.reason,
        "note": turned.message[:MAX_NOTE_CHARACTERS],
        "action": _ACTIONS[turned.type],
        "eventTime": at,
        "reportingController": CONTROLLER,
        "reportingInstance": instance,
    }
    if waiting.count > 1:
        event["series"] = {"count": waiting.count, "lastObservedTime": at}
    return event


def _micro_time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
