"""Events that the operator writes, with the rights of the chart, as users see them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tidegate_devcluster.kubectl import Kubectl
from tidegate_testing.operator_process import (
    Manifest,
    OperatorSetup,
    a_policy,
    a_pool,
    apply,
    running_operator,
    wait_for_conditions,
    wait_until,
)
from tidegate_testing.reporting_engine import ReportingEngine

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed", "operator")]


@pytest.fixture(scope="module")
def operator(crds_installed: None, operator_setup: OperatorSetup) -> Iterator[None]:  # noqa: ARG001
    with running_operator(operator_setup):
        yield


def events_of(kubectl: Kubectl, namespace: str) -> list[Manifest]:
    where = ("-n", namespace, "-o", "json")
    found = kubectl("get", "events.events.k8s.io", *where, check=True)
    items: list[Manifest] = json.loads(found.stdout)["items"]
    return items


@pytest.mark.usefixtures("engines")
def test_policy_that_becomes_programmed_and_stays_so_leaves_no_event(
    kubectl: Kubectl, namespace: str
) -> None:
    wait_for_conditions(kubectl, "epool", "chat", namespace, Programmed="Programmed")
    before = len(events_of(kubectl, namespace))
    apply(kubectl, namespace, a_policy("gold", weight=300))
    wait_for_conditions(kubectl, "tp", "gold", namespace, Ready="Ready")
    # What is written later than this is written later than an Event of gold's would be.
    apply(kubectl, namespace, a_policy("lost", poolRefs=[{"name": "absent"}]))
    wait_until(lambda: len(events_of(kubectl, namespace)) > before)
    about = {event["regarding"]["name"] for event in events_of(kubectl, namespace)}
    assert "gold" not in about


def test_flapping_reference_is_two_events_that_count(
    kubectl: Kubectl,
    namespace: str,
    engines: list[ReportingEngine],  # noqa: ARG001
) -> None:
    lost = a_policy("lost", poolRefs=[{"name": "chat"}, {"name": "spare"}])

    def wait_for_event(reason: str, type_: str, count: int) -> None:
        wait_until(lambda: noted().get(reason) == (type_, count), context=noted)

    def noted() -> dict[str, tuple[str, int]]:
        return {
            event["reason"]: (event["type"], event.get("series", {}).get("count", 1))
            for event in events_of(kubectl, namespace)
            if event["regarding"]["name"] == "lost" and event["action"] == "ResolveReferences"
        }

    apply(kubectl, namespace, lost)
    for times in (1, 2):
        wait_for_conditions(kubectl, "tp", "lost", namespace, ResolvedRefs="PoolNotFound")
        wait_for_event("PoolNotFound", "Warning", times)
        apply(kubectl, namespace, a_pool("spare"))
        wait_for_conditions(kubectl, "tp", "lost", namespace, ResolvedRefs="ResolvedRefs")
        wait_for_event("ResolvedRefs", "Normal", times)
        kubectl("delete", "epool", "spare", "-n", namespace, check=True)
    described = kubectl("describe", "tp", "lost", "-n", namespace, check=True).stdout
    assert "PoolNotFound" in described.partition("Events:")[2]
