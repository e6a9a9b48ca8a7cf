"""What `status` and `top` make of objects, whatever their status lacks."""

import asyncio
from typing import Any

from rich.console import Console

from tidegate_cli.cluster_access import Cluster
from tidegate_cli.fleet_view import FleetView, by_load, fleet_tables, read_fleet
from tidegate_operator.resources import EnginePool


class Objects(Cluster):
    """A cluster that holds these objects."""

    def __init__(self, pools: list[dict[str, Any]], policies: list[dict[str, Any]]) -> None:
        self.namespace = "serving"
        self._pools = pools
        self._policies = policies

    async def objects(self, model: type[Any], *, everywhere: bool) -> list[dict[str, Any]]:
        assert not everywhere
        return self._pools if model is EnginePool else self._policies


def an_object(name: str, spec: dict[str, Any], **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"namespace": "serving", "name": name, "generation": 2},
        "spec": spec,
        "status": status,
    }


def condition(kind: str, status: str, reason: str, generation: int = 2) -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "observedGeneration": generation}


def view(pools: list[dict[str, Any]], policies: list[dict[str, Any]]) -> FleetView:
    return asyncio.run(read_fleet(Objects(pools, policies), everywhere=False))


def shown(found: FleetView) -> str:
    console = Console(width=240)
    with console.capture() as captured:
        console.print(fleet_tables(found))
    return captured.get()


def test_laggards_and_what_is_wrong_are_named() -> None:
    pool = an_object(
        "chat",
        {},
        engines={"summary": "1/2", "programmed": 1},
        policy={"revision": 7},
        usage={"running": 3, "waiting": 4, "swapped": 5, "kvPercent": 80, "queueTimeP99": "1s"},
        laggards=["chat-1"],
        conditions=[
            condition("Programmed", "False", "EnginesLagging"),
            condition("Degraded", "True", "PolicyRefused"),
            condition("Accepted", "False", "OfAnEarlierGeneration", generation=1),
        ],
    )
    text = shown(view([pool], []))
    for part in ("chat", "1/2", "7", "80 %", "1s", "Programmed: EnginesLagging", "lagging: chat-1"):
        assert part in text
    assert "Degraded: PolicyRefused" in text
    assert "OfAnEarlierGeneration" not in text


def test_a_tenants_numbers_stand_beside_what_it_was_promised() -> None:
    policy = an_object(
        "acme",
        {"weight": 300, "kv": {"nominalPercent": 40}},
        tier="gold",
        usage={"kvPercent": 55, "sharePercent": 62, "outputTokensPerSecond": 120, "shed": 9},
        serviceLevel={"ttft": "410ms", "itl": "32ms", "attainmentPercent": 97},
        pools=[{"namespace": "serving", "name": "chat", "revision": 7}],
        conditions=[condition("Ready", "True", "Ready")],
    )
    found = view([], [policy])
    text = shown(found)
    for part in ("gold", "300", "55 of 40 %", "62 %", "120", "410ms", "32ms", "97 %", "9", "ready"):
        assert part in text
    assert found.to_json()["tenants"][0]["revisions"] == {"serving/chat": 7}


def test_an_object_that_nobody_has_seen_yet_is_shown_without_numbers() -> None:
    found = view([an_object("new", {})], [an_object("fresh", {})])
    assert found.pools[0].revision is None
    assert shown(found).count("not seen by the operator yet") == 2


def test_the_busiest_come_first() -> None:
    policies = [
        an_object("calm", {}),
        an_object("busy", {}, usage={"running": 1, "waiting": 8}),
        an_object("some", {}, usage={"running": 2}),
    ]
    assert [one.name for one in by_load(view([], policies)).tenants] == ["busy", "some", "calm"]
