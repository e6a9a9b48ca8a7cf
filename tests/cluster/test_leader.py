"""Several operators on one Lease of the real API server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tidegate_devcluster.kubectl import Kubectl
from tidegate_operator.kube import ApiError, KubeApi
from tidegate_operator.leader import (
    CONFLICT,
    LEASE_SECONDS,
    RELEASE_SECONDS,
    Election,
    LeadershipLostError,
    LeaseName,
)
from tidegate_testing.operator_process import (
    OperatorSetup,
    a_policy,
    apply,
    read,
    running_operator,
    wait_for_conditions,
    wait_until,
)
from tidegate_testing.reporting_engine import ReportingEngine

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

HAND_OVER_SECONDS = 15.0


@pytest.fixture
def setup(operator_setup: OperatorSetup, operator_lease: str, namespace: str) -> OperatorSetup:
    return replace(operator_setup, namespaces=(namespace,), lease=operator_lease)


def holder(kubectl: Kubectl, lease: str) -> str:
    namespace, name = lease.split("/")
    found = kubectl("get", "lease", name, "-n", namespace, "-o", "json")
    if found.returncode != 0:
        return ""
    return str(json.loads(found.stdout)["spec"].get("holderIdentity", ""))


def test_standby_takes_over_at_once_from_one_that_stops_and_in_time_from_one_that_dies(
    kubectl: Kubectl, namespace: str, setup: OperatorSetup, engines: list[ReportingEngine]
) -> None:
    with running_operator(setup) as first:
        apply(kubectl, namespace, a_policy("acme", weight=1))
        wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
        leader = holder(kubectl, setup.lease)
        with running_operator(setup) as second:
            wait_until(lambda: second.log_has("held by"))
            assert holder(kubectl, setup.lease) == leader
            assert first.stop() == 0
            began = time.monotonic()
            wait_until(lambda: holder(kubectl, setup.lease) not in {"", leader})
            assert time.monotonic() - began < HAND_OVER_SECONDS / 3
            apply(kubectl, namespace, a_policy("acme", weight=2))
            wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
            revision, leader = engines[0].revision, holder(kubectl, setup.lease)
            with running_operator(setup) as third:
                wait_until(lambda: third.log_has("held by"))
                second.kill()
                began = time.monotonic()
                apply(kubectl, namespace, a_policy("acme", weight=3))
                wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
                assert time.monotonic() - began < HAND_OVER_SECONDS
                assert holder(kubectl, setup.lease) != leader
                assert engines[0].revision == revision + 1
                assert engines[0].newest.tenant_rules[f"{namespace}/acme"].weight == 3


def test_operator_whose_lease_was_taken_stops_working(
    kubectl: Kubectl, setup: OperatorSetup
) -> None:
    with running_operator(setup) as operator:
        wait_until(lambda: holder(kubectl, setup.lease) != "")
        stolen = {"spec": {"holderIdentity": "thief"}}
        namespace, name = setup.lease.split("/")
        kubectl(
            *("patch", "lease", name, "-n", namespace, "--type=merge"),
            *("-p", json.dumps(stolen)),
            check=True,
        )
        wait_until(lambda: not operator.is_running)
        assert operator.log_has("taken by thief")
        assert holder(kubectl, setup.lease) == "thief"


def test_leader_that_was_frozen_ends_when_it_wakes_and_writes_nothing(
    kubectl: Kubectl, namespace: str, setup: OperatorSetup, engines: list[ReportingEngine]
) -> None:
    with running_operator(setup) as first:
        apply(kubectl, namespace, a_policy("acme", weight=1))
        wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
        leader = holder(kubectl, setup.lease)
        first.pause()
        with running_operator(setup) as second:
            wait_until(lambda: holder(kubectl, setup.lease) not in {"", leader})
            apply(kubectl, namespace, a_policy("acme", weight=2))
            wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
            revision, leader = engines[0].revision, holder(kubectl, setup.lease)
            first.resume()
            wait_until(lambda: not first.is_running)
            apply(kubectl, namespace, a_policy("acme", weight=3))
            wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
            assert second.is_running
            assert holder(kubectl, setup.lease) == leader
            assert engines[0].revision == revision + 1


async def test_lease_is_renewed_as_long_as_it_is_kept(
    kubectl: Kubectl, operator_setup: OperatorSetup, operator_lease: str
) -> None:
    lease = LeaseName.parse(operator_lease)
    async with KubeApi.connected(Path(operator_setup.kubeconfig)) as api:
        one, two = Election(api, lease, "one"), Election(api, lease, "two")
        await one.acquire()
        keeping = asyncio.create_task(one.keep())
        standing_by = asyncio.create_task(two.acquire())
        # Longer than a Lease lasts that nobody renews.
        done, _ = await asyncio.wait({keeping, standing_by}, timeout=LEASE_SECONDS + 3)
        assert not done
        keeping.cancel()
        await one.release()
        await asyncio.wait_for(standing_by, HAND_OVER_SECONDS / 3)
    assert read(kubectl, "lease", lease.name, lease.namespace)["spec"]["holderIdentity"] == "two"


async def no_answer(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


async def test_leader_that_ends_waits_for_no_answer_for_ever(
    operator_setup: OperatorSetup, operator_lease: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with KubeApi.connected(Path(operator_setup.kubeconfig)) as api:
        one = Election(api, LeaseName.parse(operator_lease), "one")
        await one.acquire()
        monkeypatch.setattr(api, "request", no_answer)
        async with asyncio.timeout(2 * RELEASE_SECONDS):
            await one.release()


async def test_leader_that_gets_no_answer_stops_before_others_begin(
    operator_setup: OperatorSetup, operator_lease: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with KubeApi.connected(Path(operator_setup.kubeconfig)) as api:
        one = Election(api, LeaseName.parse(operator_lease), "one")
        await one.acquire()
        monkeypatch.setattr(api, "request", no_answer)
        async with asyncio.timeout(LEASE_SECONDS):
            with pytest.raises(LeadershipLostError, match="not renewed for 7 s: TimeoutError"):
                await one.keep()


async def test_of_two_that_want_a_free_lease_at_once_one_gets_it(
    operator_setup: OperatorSetup, operator_lease: str
) -> None:
    lease = LeaseName.parse(operator_lease)
    async with KubeApi.connected(Path(operator_setup.kubeconfig)) as api:
        first = Election(api, lease, "first")
        await first.acquire()
        await first.release()
        many = [Election(api, lease, f"candidate-{number}") for number in range(8)]
        # All have read the same free Lease before the first of them writes.
        read_by_all = asyncio.Barrier(len(many))
        for one in many:
            one._read = read_together(one._read, read_by_all)  # type: ignore[method-assign]
        taken = await asyncio.gather(*(one._try_to_take() for one in many), return_exceptions=True)
    assert taken.count(True) == 1
    refused = [one for one in taken if isinstance(one, ApiError)]
    assert [one.status for one in refused] == [CONFLICT] * (len(many) - 1)


def read_together(
    ask: Callable[[], Coroutine[Any, Any, Any]], read_by_all: asyncio.Barrier
) -> Callable[[], Coroutine[Any, Any, Any]]:
    async def ask_and_wait() -> object:
        found = await ask()
        await read_by_all.wait()
        return found

    return ask_and_wait


async def test_two_candidates_never_both_lead(
    kubectl: Kubectl, operator_setup: OperatorSetup, operator_lease: str
) -> None:
    lease = LeaseName.parse(operator_lease)
    async with KubeApi.connected(Path(operator_setup.kubeconfig)) as api:
        one, two = Election(api, lease, "one"), Election(api, lease, "two")
        await one.acquire()
        assert not await two._try_to_take()
        await one.release()
        await two.acquire()
        assert read(kubectl, "lease", lease.name, lease.namespace)["spec"]["leaseTransitions"] == 1
        # What was released is not taken back by a late renewal.
        one._held = read(kubectl, "lease", lease.name, lease.namespace)
        one._held["metadata"]["resourceVersion"] = "1"
        with pytest.raises(LeadershipLostError, match="taken by two"):
            await one._renew()
        await two.release()
