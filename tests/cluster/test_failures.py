"""What must hold when real processes are killed, stopped, cut off, or their clock jumps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tidegate_devcluster.assets import Assets
from tidegate_policies.envelope import Envelope
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.cluster import eventually
from tidegate_testing.fleet import NAMESPACE, Fleet
from tidegate_testing.members import Member
from tidegate_testing.operator_process import a_policy, apply, wait_for_conditions

pytestmark = pytest.mark.cluster

SHOWN_SECONDS = 5.0
"""An engine that is stopped is named after this at the latest."""

LIVE_SECONDS = 75.0
"""A change is live so long after the return of a black-holed network, at worst."""

DAY_SECONDS = 86400.0


@pytest.fixture(scope="module")
def running(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), assets, sweep_seconds=10.0) as fleet:
        for member in fleet.members:
            member.start()
        yield fleet


@pytest.fixture
def fleet(running: Fleet) -> Fleet:
    """One operator and two engines that obey one policy."""
    change(running, weight=1)
    settled(running)
    return running


@pytest.fixture
def operator(fleet: Fleet) -> Member:
    return fleet.operators[0]


def change(fleet: Fleet, **spec: object) -> None:
    apply(fleet.kubectl, NAMESPACE, a_policy("acme", **spec))


def settled(fleet: Fleet) -> int:
    """Wait until policy and engines say that the newest generation is in force; its revision."""
    wait_for_conditions(fleet.kubectl, "tp", "acme", NAMESPACE, Ready="Ready")
    wait_for_conditions(fleet.kubectl, "epool", "chat", NAMESPACE, Ready="Ready")
    eventually(lambda: len(revisions(fleet)) == 1, "one revision everywhere")
    return fleet.stored_revision()


def revisions(fleet: Fleet) -> set[int | None]:
    """Return what status, Redis and engines say is the newest revision; one of them in peace."""
    told = int(fleet.get("epool", "chat")["status"]["policy"]["revision"])
    return {told, fleet.stored_revision(), *map(fleet.revision, fleet.engines)}


def at_once(_fleet: Fleet, _revision: int) -> bool:
    return True


def once_stored(fleet: Fleet, revision: int) -> bool:
    return fleet.stored_revision() > revision


def once_obeyed(fleet: Fleet, revision: int) -> bool:
    return all((fleet.revision(engine) or 0) > revision for engine in fleet.engines)


@pytest.mark.parametrize("when", [at_once, once_stored, once_obeyed])
def test_an_operator_killed_in_the_middle_of_a_change_ends_it_after_its_restart(
    fleet: Fleet, operator: Member, when: Callable[[Fleet, int], bool]
) -> None:
    before = settled(fleet)
    change(fleet, weight=17)
    eventually(lambda: when(fleet, before), when.__name__)
    operator.kill()
    assert all(fleet.is_ready(engine) for engine in fleet.engines)
    operator.start()
    assert settled(fleet) == before + 1
    change(fleet, weight=18)
    assert settled(fleet) == before + 2


def test_an_api_server_that_is_killed_stops_no_engine_and_its_return_brings_changes(
    fleet: Fleet, operator: Member
) -> None:
    before, starts = settled(fleet), operator.starts
    fleet.control_plane.stop_api_server()
    assert [fleet.revision(engine) for engine in fleet.engines] == [before, before]
    assert all(fleet.is_ready(engine) for engine in fleet.engines)
    fleet.control_plane.restart_api_server()
    change(fleet, weight=2)
    assert settled(fleet) == before + 1
    assert operator.is_running
    assert operator.starts == starts


def test_changes_behind_a_point_that_etcd_has_forgotten_take_effect(
    fleet: Fleet, operator: Member
) -> None:
    apply(fleet.kubectl, NAMESPACE, a_policy("goes"))
    wait_for_conditions(fleet.kubectl, "tp", "goes", NAMESPACE, Ready="Ready")
    before = settled(fleet)
    assert f"{NAMESPACE}/goes" in fleet.stored_policy()
    seen = fleet.get("tp", "acme")["metadata"]["resourceVersion"]
    operator.pause()
    fleet.kubectl("delete", "tp", "goes", "-n", NAMESPACE, check=True)
    change(fleet, weight=3)
    fleet.forget_history()
    fleet.control_plane.restart_api_server()
    where = f"/apis/tidegate.io/v1alpha1/namespaces/{NAMESPACE}/tenantpolicies"
    query = f"watch=1&timeoutSeconds=1&resourceVersion={seen}"
    told = json.loads(fleet.kubectl("get", "--raw", f"{where}?{query}", check=True).stdout)
    assert told["object"]["code"] == 410
    operator.resume()
    eventually(lambda: fleet.stored_revision() > before, "the changes")
    settled(fleet)
    assert f"{NAMESPACE}/acme" in fleet.stored_policy()
    assert f"{NAMESPACE}/goes" not in fleet.stored_policy()


def test_a_restored_backup_of_etcd_is_put_in_force_as_newer_revisions_and_so_are_later_changes(
    fleet: Fleet, operator: Member, tmp_path: Path
) -> None:
    apply(fleet.kubectl, NAMESPACE, a_policy("restored", weight=9))
    wait_for_conditions(fleet.kubectl, "tp", "restored", NAMESPACE, Ready="Ready")
    settled(fleet)
    version = fleet.get("tp", "acme")["metadata"]["resourceVersion"]
    backed_up = stored_weights(fleet)
    fleet.control_plane.back_up(tmp_path / "backup")
    fleet.kubectl("delete", "tp", "restored", "-n", NAMESPACE, check=True)
    apply(fleet.kubectl, NAMESPACE, a_policy("forgotten"))
    wait_for_conditions(fleet.kubectl, "tp", "forgotten", NAMESPACE, Ready="Ready")
    change(fleet, weight=20)
    later = {"acme": 20, "forgotten": 100}
    eventually(lambda: stored_weights(fleet) == later, "what the backup will undo")
    newest, starts = settled(fleet), operator.starts

    fleet.control_plane.restore(tmp_path / "backup")
    assert fleet.get("tp", "acme")["metadata"]["resourceVersion"] == version
    eventually(lambda: stored_weights(fleet) == backed_up, "the policy of then")
    restored = settled(fleet)
    assert restored > newest

    change(fleet, weight=21)
    assert settled(fleet) == restored + 1
    fleet.kubectl("delete", "tp", "restored", "-n", NAMESPACE, check=True)
    eventually(lambda: stored_weights(fleet) == {"acme": 21}, "the deletion")
    assert settled(fleet) == restored + 2
    assert operator.starts == starts


def stored_weights(fleet: Fleet) -> dict[str, int]:
    """Return the weights in Redis by policy."""
    rules = PolicySnapshot.from_text(Envelope.from_json(fleet.stored_policy()).body).tenant_rules
    return {key.removeprefix(f"{NAMESPACE}/"): rule.weight for key, rule in rules.items()}


@pytest.mark.parametrize("is_replaced", [True, False], ids=["replaced", "flushed"])
def test_a_redis_that_lost_everything_gets_the_policy_back_without_a_compilation(
    fleet: Fleet, operator: Member, *, is_replaced: bool
) -> None:
    revision = settled(fleet)
    compilations = fleet.metric(operator, "tidegate_compile_seconds_count")
    if is_replaced:
        fleet.redis_server.restart()
    else:
        fleet.redis.flushall()
    assert [fleet.revision(engine) for engine in fleet.engines] == [revision, revision]
    assert all(fleet.is_ready(engine) for engine in fleet.engines)
    eventually(lambda: fleet.stored_revision() == revision, "the policy in Redis")
    assert settled(fleet) == revision
    assert fleet.metric(operator, "tidegate_compile_seconds_count") == compilations
    change(fleet, weight=4)
    assert settled(fleet) == revision + 1


def test_an_engine_that_is_stopped_is_named_and_keeps_nobody_from_the_change(fleet: Fleet) -> None:
    before, (running, stopped) = settled(fleet), fleet.engines
    stopped.pause()
    try:
        change(fleet, weight=5)
        began = time.monotonic()
        eventually(lambda: fleet.revision(running) == before + 1, "the other engine")
        eventually(lambda: stopped.name in programmed(fleet), "the laggard's name")
        assert time.monotonic() - began < SHOWN_SECONDS
        eventually(lambda: running.name not in programmed(fleet), "the laggard's name alone")
    finally:
        stopped.resume()
    assert settled(fleet) == before + 1


def test_an_engine_that_is_stopped_at_rest_is_shown_by_its_pool_and_by_no_policy(
    fleet: Fleet,
) -> None:
    revision, (_, stopped) = settled(fleet), fleet.engines
    policy = fleet.get("tp", "acme")["metadata"]["resourceVersion"]
    stopped.pause()
    began = time.monotonic()
    try:
        eventually(lambda: status_of_pool(fleet).get("laggards") == [stopped.name], "the laggard")
        assert time.monotonic() - began < SHOWN_SECONDS
        conditions = {one["type"]: one for one in status_of_pool(fleet)["conditions"]}
        assert conditions["Programmed"]["reason"] == "EnginesLagging"
        assert stopped.name in conditions["Programmed"]["message"]
        assert fleet.get("tp", "acme")["metadata"]["resourceVersion"] == policy
    finally:
        stopped.resume()
    assert settled(fleet) == revision
    assert "laggards" not in status_of_pool(fleet)


def status_of_pool(fleet: Fleet) -> dict[str, Any]:
    found: dict[str, Any] = fleet.get("epool", "chat")["status"]
    return found


def programmed(fleet: Fleet) -> str:
    """Return what the policy's condition says while it is not programmed."""
    found = fleet.get("tp", "acme")["status"]["conditions"]
    said = [one["message"] for one in found if one["type"] == "Programmed"]
    lacking = [one["status"] != "True" for one in found if one["type"] == "Programmed"]
    return str(said[0]) if lacking == [True] else ""


def test_an_engine_that_was_killed_has_the_newest_policy_before_it_is_ready(fleet: Fleet) -> None:
    before, (_, killed) = settled(fleet), fleet.engines
    killed.kill()
    change(fleet, weight=6)
    eventually(lambda: fleet.stored_revision() == before + 1, "the change")
    killed.start()
    eventually(lambda: fleet.is_ready(killed), "readiness")
    assert fleet.revision(killed) == before + 1
    assert settled(fleet) == before + 1


def test_a_change_behind_a_black_hole_is_live_soon_after_the_networks_return(
    fleet: Fleet, operator: Member
) -> None:
    if not operator.can_be_cut_off:
        pytest.skip("needs network namespaces")
    before, starts = settled(fleet), operator.starts
    operator.cut_off()
    try:
        # The server forgets its watches; nothing that says so reaches the operator.
        fleet.control_plane.restart_api_server()
        change(fleet, weight=8)
        assert fleet.metric(operator, "tidegate_watch_age_seconds") is None
        assert all(fleet.is_ready(engine) for engine in fleet.engines)
        assert fleet.stored_revision() == before
    finally:
        operator.reconnect()
    began = time.monotonic()
    eventually(
        lambda: fleet.stored_revision() == before + 1, "the change", timeout_seconds=LIVE_SECONDS
    )
    assert settled(fleet) == before + 1
    assert time.monotonic() - began < LIVE_SECONDS
    assert operator.starts == starts


def test_a_clock_that_jumps_changes_no_revision_and_no_order(
    fleet: Fleet, operator: Member
) -> None:
    revision = settled(fleet)
    for number, ahead in enumerate((DAY_SECONDS, -DAY_SECONDS)):
        for member in (operator, *fleet.engines):
            member.set_clock(ahead)
        assert settled(fleet) == revision + number
        change(fleet, weight=10 + number)
        assert settled(fleet) == revision + number + 1
    written = fleet.get("epool", "chat")["status"]["policy"]["publishedTime"]
    assert written < fleet.get("tp", "acme")["metadata"]["creationTimestamp"]
    for member in (operator, *fleet.engines):
        member.set_clock(0.0)
