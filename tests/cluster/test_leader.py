"""Several operators on one Lease of the real API server."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tidegate_devcluster.kubectl import Kubectl
from tidegate_operator.kube import KubeApi
from tidegate_operator.leader import Election, LeadershipLostError, LeaseName
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
