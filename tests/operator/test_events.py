import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from tidegate_operator import events
from tidegate_operator.events import MAX_WAITING, EventWriter, transitions
from tidegate_operator.kube import ApiError
from tidegate_operator.planner import StatusUpdate
from tidegate_operator.resources import PriorityTier, Resource, TenantPolicy
from tidegate_operator.verdicts import Json

PENDING = ("False", "Pending")
PROGRAMMED = ("True", "Programmed")
LAGGING = ("False", "EnginesLagging")
REFUSED = ("False", "EngineRefused")
NO_POOL = ("False", "PoolNotFound")
RESOLVED = ("True", "ResolvedRefs")


def a_status(*, message: str = "m", **conditions: tuple[str, str]) -> Json:
    return {
        "conditions": [
            {"type": kind, "status": status, "reason": reason, "message": message}
            for kind, (status, reason) in conditions.items()
        ]
    }


def an_update(
    status: Json,
    *,
    name: str = "gold",
    namespace: str = "team",
    model: type[Resource] = TenantPolicy,
) -> StatusUpdate:
    return StatusUpdate(
        model=model,
        namespace=namespace,
        name=name,
        uid=f"uid-{name}",
        status=status,
        is_settled=True,
    )


def turned(before: Json, after: Json) -> list[tuple[str, str, bool]]:
    return [(str(one.type), one.reason, one.is_bad) for one in transitions(before, after)]


@pytest.mark.parametrize(
    ("before", "after", "reason", "is_bad"),
    [
        (PROGRAMMED, LAGGING, "EnginesLagging", True),
        (LAGGING, REFUSED, "EngineRefused", True),
        (LAGGING, PROGRAMMED, "Programmed", False),
        (PENDING, LAGGING, "EnginesLagging", True),
    ],
)
def test_change_of_status_or_reason_is_a_transition(
    before: tuple[str, str], after: tuple[str, str], reason: str, *, is_bad: bool
) -> None:
    found = turned(a_status(Programmed=before), a_status(Programmed=after))
    assert found == [("Programmed", reason, is_bad)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (a_status(Programmed=LAGGING, message="a"), a_status(Programmed=LAGGING, message="b")),
        ({}, a_status(Programmed=PENDING)),
        ({}, a_status(Programmed=PROGRAMMED, Degraded=("False", "PolicyCurrent"))),
        (a_status(Programmed=PENDING), a_status(Programmed=PROGRAMMED)),
        (a_status(Programmed=PROGRAMMED), a_status(Programmed=PENDING)),
        (a_status(Programmed=LAGGING), {}),
        (a_status(Ready=("True", "Ready")), a_status(Ready=NO_POOL)),
    ],
)
def test_what_is_no_news_is_no_transition(before: Json, after: Json) -> None:
    assert turned(before, after) == []


def test_condition_that_is_bad_from_its_beginning_is_a_transition() -> None:
    assert turned({}, a_status(ResolvedRefs=NO_POOL)) == [("ResolvedRefs", "PoolNotFound", True)]


def test_degraded_is_bad_when_true() -> None:
    good, bad = ("False", "PolicyCurrent"), ("True", "RedisUnreachable")
    assert turned(a_status(Degraded=good), a_status(Degraded=bad))[0][2]
    assert not turned(a_status(Degraded=bad), a_status(Degraded=good))[0][2]


class EventStore:
    """Takes Events as the API server does, and fails on demand."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.failures: list[Exception] = []
        self._changed = asyncio.Event()

    async def request(
        self, method: str, path: str, *, body: object = None, content_type: str = ""
    ) -> Json:
        self.requests.append((method, path, body))
        assert (method == "PATCH") is (content_type == "application/merge-patch+json")
        self._changed.set()
        if self.failures:
            raise self.failures.pop(0)
        return {"metadata": {"name": "gold.1"}}

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.requests) < count:
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def writing(store: EventStore) -> AsyncIterator[EventWriter]:
    writer = EventWriter(store)
    task = asyncio.create_task(writer.run())
    try:
        yield writer
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PAUSE_SECONDS", 0.0)


def flap(writer: EventWriter) -> None:
    good, bad = a_status(ResolvedRefs=RESOLVED), a_status(ResolvedRefs=NO_POOL)
    writer.note(an_update(bad), good)


def go_through(writer: EventWriter, *programmed: tuple[str, str]) -> None:
    for before, after in pairwise(programmed):
        writer.note(an_update(a_status(Programmed=after)), a_status(Programmed=before))


async def test_event_says_what_turned_of_which_object() -> None:
    store = EventStore()
    async with writing(store) as writer:
        writer.note(an_update(a_status(ResolvedRefs=NO_POOL, message="n" * 2000)), {})
        await store.wait_for(1)
    ((method, path, body),) = store.requests
    assert (method, path) == ("POST", "/apis/events.k8s.io/v1/namespaces/team/events")
    assert body["regarding"]["kind"] == "TenantPolicy"
    assert body["regarding"]["uid"] == "uid-gold"
    assert (body["type"], body["reason"]) == ("Warning", "PoolNotFound")
    assert (body["note"], body["action"]) == ("n" * 1024, "ResolveReferences")


async def test_event_of_an_object_without_namespace_is_in_the_default_one() -> None:
    store = EventStore()
    async with writing(store) as writer:
        status = a_status(Accepted=("False", "TierConflict"))
        writer.note(an_update(status, model=PriorityTier, namespace=""), {})
        await store.wait_for(1)
    ((_, path, body),) = store.requests
    assert path == "/apis/events.k8s.io/v1/namespaces/default/events"
    assert "namespace" not in body["regarding"]


async def test_same_happening_again_is_counted_on_one_event() -> None:
    store = EventStore()
    async with writing(store) as writer:
        flap(writer)
        await store.wait_for(1)
        flap(writer)
        flap(writer)
        await store.wait_for(2)
    (_, collection, _), (method, path, body) = store.requests
    assert (method, path) == ("PATCH", f"{collection}/gold.1")
    assert body["series"]["count"] == 3


async def test_what_flaps_faster_than_it_is_written_is_one_event() -> None:
    store = EventStore()
    async with writing(store) as writer:
        for _ in range(5):
            flap(writer)
        await store.wait_for(1)
    ((method, _, body),) = store.requests
    assert (method, body["series"]["count"]) == ("POST", 5)


async def test_same_happening_long_after_is_an_event_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "SERIES_SECONDS", 0.0)
    store = EventStore()
    async with writing(store) as writer:
        flap(writer)
        await store.wait_for(1)
        flap(writer)
        await store.wait_for(2)
    assert [method for method, _, _ in store.requests] == ["POST", "POST"]


async def test_recovery_by_way_of_pending_is_told_once() -> None:
    store = EventStore()
    async with writing(store) as writer:
        go_through(writer, PROGRAMMED, PENDING, LAGGING)
        await store.wait_for(1)
        go_through(writer, LAGGING, PENDING, PENDING, PROGRAMMED, PENDING, PROGRAMMED)
        await store.wait_for(2)
        go_through(writer, PROGRAMMED, REFUSED)
        await store.wait_for(3)
    told = [(body["type"], body["reason"]) for _, _, body in store.requests]
    assert told == [
        ("Warning", "EnginesLagging"),
        ("Normal", "Programmed"),
        ("Warning", "EngineRefused"),
    ]


async def test_what_is_as_bad_after_pending_is_no_news() -> None:
    store = EventStore()
    async with writing(store) as writer:
        go_through(writer, LAGGING, PENDING, LAGGING, REFUSED)
        await store.wait_for(1)
    ((_, _, body),) = store.requests
    assert body["reason"] == "EngineRefused"


async def test_object_of_the_same_name_starts_anew() -> None:
    store = EventStore()
    async with writing(store) as writer:
        go_through(writer, LAGGING, PENDING)
        writer.forget("uid-gold")
        go_through(writer, PENDING, PROGRAMMED, REFUSED)
        await store.wait_for(1)
    ((_, _, body),) = store.requests
    assert body["reason"] == "EngineRefused"


async def test_event_that_is_gone_is_followed_by_a_new_one() -> None:
    store = EventStore()
    async with writing(store) as writer:
        flap(writer)
        await store.wait_for(1)
        store.failures = [ApiError(404, "PATCH", "gone")]
        flap(writer)
        await store.wait_for(2)
        flap(writer)
        await store.wait_for(3)
    assert [method for method, _, _ in store.requests] == ["POST", "PATCH", "POST"]


async def test_event_that_is_refused_stops_no_other() -> None:
    store = EventStore()
    store.failures = [ApiError(403, "POST", "forbidden"), TimeoutError()]
    async with writing(store) as writer:
        for name in ("a", "b", "c"):
            writer.note(an_update(a_status(ResolvedRefs=NO_POOL), name=name), {})
        await store.wait_for(3)


async def test_flood_of_transitions_takes_a_bounded_place() -> None:
    store = EventStore()
    async with writing(store) as writer:
        for number in range(MAX_WAITING + 50):
            writer.note(an_update(a_status(ResolvedRefs=NO_POOL), name=f"p{number}"), {})
        await store.wait_for(MAX_WAITING)
        await asyncio.sleep(0)
        assert len(store.requests) == MAX_WAITING
