"""A pool that can take no further tenant, with a limit that a test reaches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidegate_devcluster.kubectl import Kubectl
from tidegate_testing.operator_process import (
    OperatorSetup,
    a_policy,
    apply,
    running_operator,
    wait_for_conditions,
    wait_until,
)
from tidegate_testing.reporting_engine import ReportingEngine

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

ROOM_FOR_TWO = "import tidegate_operator.compiler as compiler; compiler.MAX_TENANTS = 2"


def test_policy_beyond_the_limit_is_told_it_and_gets_in_once_there_is_room(
    kubectl: Kubectl, namespace: str, operator_setup: OperatorSetup, engines: list[ReportingEngine]
) -> None:
    def tenants() -> set[str]:
        return {key.removeprefix(f"{namespace}/") for key in engines[0].newest.tenant_rules}

    setup = replace(operator_setup, namespaces=(namespace,))
    with running_operator(setup, fault=ROOM_FOR_TWO):
        for name in ("a-first", "b-second"):
            apply(kubectl, namespace, a_policy(name))
            wait_for_conditions(kubectl, "tp", name, namespace, Ready="Ready")
        apply(kubectl, namespace, a_policy("c-third"))
        told = wait_for_conditions(kubectl, "tp", "c-third", namespace, Accepted="TooManyTenants")
        messages = {one["type"]: one["message"] for one in told["status"]["conditions"]}
        assert f"'{namespace}/chat' has 2 older tenants" in messages["Accepted"]
        assert messages["Ready"] == messages["Accepted"]
        assert tenants() == {"a-first", "b-second"}

        kubectl("delete", "tp", "a-first", "-n", namespace, check=True)
        wait_for_conditions(kubectl, "tp", "c-third", namespace, Ready="Ready")
        wait_until(lambda: tenants() == {"b-second", "c-third"})
