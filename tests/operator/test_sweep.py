from collections.abc import Sequence
from typing import Any

import pytest
from kubernetes.aio.client import Configuration
from redis.asyncio import Redis

from tidegate_operator import sweep
from tidegate_operator.autoscaler_writer import AutoscalerScope
from tidegate_operator.delivery import Delivery
from tidegate_operator.kube import ApiError, KubeApi, Watched
from tidegate_operator.metrics import Metrics
from tidegate_operator.reconciler import Reconciler
from tidegate_operator.reports import ReportBook
from tidegate_operator.status import StatusWriter
from tidegate_operator.sweep import MissingKindError, Sweeper
from tidegate_operator.watch_cache import WatchCache


class ListingApi(KubeApi):
    """Lists what it was given; refuses as many times as told."""

    def __init__(self, objects: dict[str, list[Any]], *, refusals: int = 0) -> None:
        super().__init__(Configuration())
        self.objects = objects
        self.refusals = refusals
        self.refused = ""
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    async def list_objects(self, watched: Watched, namespaces: Sequence[str]) -> list[Any]:
        self.asked.append((watched.plural, tuple(namespaces)))
        if watched.plural == self.refused:
            raise ApiError(500, "GET", "broken")
        if self.refusals:
            self.refusals -= 1
            raise ApiError(503, "GET", "starting")
        if watched.plural not in self.objects:
            raise ApiError(404, "GET", "not found")
        return self.objects[watched.plural]


ALL = [
    "prioritytiers",
    "preemptionpolicies",
    "servicelevels",
    "tenantpolicies",
    "enginepools",
    "namespaces",
    "secrets",
    "pods",
]


def a_sweeper(
    api: KubeApi, secret_scopes: Sequence[str | None] = (None,)
) -> tuple[Sweeper, WatchCache]:
    cache, metrics = WatchCache(), Metrics()
    writer = StatusWriter(api, metrics=metrics, writes_per_second=1.0)
    reconciler = Reconciler(
        cache=cache,
        delivery=Delivery(Redis(), lambda message: message.hex()),
        book=ReportBook(),
        writer=writer,
        metrics=metrics,
        usage_seconds=1.0,
        scaling=api,
        scope=AutoscalerScope(),
    )
    sweeper = Sweeper(
        api,
        cache=cache,
        writer=writer,
        reconciler=reconciler,
        namespaces=(),
        secret_scopes=secret_scopes,
        interval_seconds=60.0,
    )
    return sweeper, cache


async def test_missing_kind_is_named_at_the_start() -> None:
    sweeper, _ = a_sweeper(ListingApi({name: [] for name in ALL if name != "enginepools"}))
    with pytest.raises(MissingKindError, match=r"enginepools\.tidegate\.io.*install"):
        await sweeper.first()


async def test_api_server_that_is_not_up_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep, "RETRY_SECONDS", (0.0,))
    tier = {"metadata": {"name": "gold", "uid": "u", "generation": 1}, "spec": {"value": 1}}
    sweeper, cache = a_sweeper(
        ListingApi({name: [] for name in ALL} | {ALL[0]: [tier]}, refusals=3)
    )
    await sweeper.first()
    assert list(cache.view().tiers) == ["gold"]


async def test_kind_that_cannot_be_listed_keeps_no_other_from_being_listed() -> None:
    pod = {"metadata": {"name": "engine-0", "namespace": "team", "uid": "u"}}
    api = ListingApi({name: [] for name in ALL} | {"pods": [pod]})
    api.refused = ALL[0]
    sweeper, cache = a_sweeper(api)
    started = sweeper.listed_at
    with pytest.raises(ApiError, match="broken"):
        await sweeper.sweep()
    assert list(cache.view().pods) == ["team/engine-0"]
    assert sweeper.listed_at == started
    api.refused = ""
    await sweeper.sweep()
    assert sweeper.listed_at > started


@pytest.mark.parametrize(
    ("scopes", "asked"),
    [((None,), [()]), (("one", "two"), [("one", "two")]), ((), [])],
)
async def test_secrets_are_listed_only_where_they_may_be_read(
    scopes: tuple[str | None, ...], asked: list[tuple[str, ...]]
) -> None:
    api = ListingApi({name: [] for name in ALL})
    sweeper, _ = a_sweeper(api, scopes)
    await sweeper.sweep()
    assert [namespaces for plural, namespaces in api.asked if plural == "secrets"] == asked
    assert {namespaces for plural, namespaces in api.asked if plural != "secrets"} == {()}
