"""What must hold while the operator or Redis is away, and after they are back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.redis_server import RedisServer
from tidegate_policies.wire import envelope_key, report_key
from tidegate_testing.operator_process import (
    OperatorSetup,
    a_pod,
    a_policy,
    a_pool,
    apply,
    change_status,
    make_ready,
    read,
    running_operator,
    wait_for_conditions,
    wait_until,
)
from tidegate_testing.reporting_engine import ReportingEngine, reporting_engine

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]


@pytest.fixture
def setup(operator_setup: OperatorSetup, namespace: str) -> OperatorSetup:
    return replace(operator_setup, namespaces=(namespace,))


def test_policy_deleted_while_the_operator_is_down_is_gone_after_its_restart(
    kubectl: Kubectl, namespace: str, setup: OperatorSetup, engines: list[ReportingEngine]
) -> None:
    with running_operator(setup) as operator:
        apply(kubectl, namespace, a_policy("stays"), a_policy("goes"))
        wait_for_conditions(kubectl, "tp", "goes", namespace, Ready="Ready")
        before = engines[0].revision
        operator.kill()
    kubectl("delete", "tp", "goes", "-n", namespace, check=True)
    with running_operator(setup):
        wait_until(lambda: list(engines[0].newest.tenant_rules) == [f"{namespace}/stays"])
    assert engines[0].revision > before


def test_engine_that_knows_a_revision_that_everybody_else_forgot_takes_policies_again(
    kubectl: Kubectl, namespace: str, setup: OperatorSetup, engines: list[ReportingEngine]
) -> None:
    cut_off, pool = engines[1], f"{namespace}/chat"
    with running_operator(setup):
        for weight in (2, 3, 4):
            apply(kubectl, namespace, a_policy("acme", weight=weight))
            wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
    for engine in engines:
        engine.cut_off.set()
    engines[0].stop()
    kubectl("delete", "epool", "chat", "-n", namespace, check=True)
    with redis.Redis.from_url(setup.redis_url) as connection:
        connection.delete(envelope_key(pool), *(report_key(pool, e.pod) for e in engines))
    apply(kubectl, namespace, a_pool(), a_policy("acme", weight=5))
    key = setup.public_key
    with running_operator(setup), reporting_engine(setup.redis_url, pool, "engine-0", key) as fresh:
        wait_until(lambda: fresh.revision == 1)
        assert cut_off.revision > 1
        cut_off.cut_off.clear()
        wait_for_conditions(kubectl, "epool", "chat", namespace, Ready="Ready")
        wait_until(lambda: cut_off.newest.tenant_rules[f"{namespace}/acme"].weight == 5)
        wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="Programmed")
        assert fresh.revision == cut_off.revision


def test_settled_cluster_gets_no_writes_and_a_restart_none_either(
    kubectl: Kubectl, namespace: str, setup: OperatorSetup, engines: list[ReportingEngine]
) -> None:
    def versions() -> list[str]:
        listed = json.loads(
            kubectl("get", "tp,epool,pods", "-n", namespace, "-o", "json", check=True).stdout
        )
        return [item["metadata"]["resourceVersion"] for item in listed["items"]]

    with running_operator(setup):
        apply(kubectl, namespace, a_policy("one"), a_policy("two"))
        for name in ("one", "two"):
            wait_for_conditions(kubectl, "tp", name, namespace, Ready="Ready")
        wait_for_conditions(kubectl, "epool", "chat", namespace, Ready="Ready")
        wait_until(lambda: "usage" in read(kubectl, "epool", "chat", namespace)["status"])
        settled = versions()
    revision = engines[0].revision
    with running_operator(setup) as operator:
        wait_until(lambda: "all objects are listed" in operator.log.read_text())
        # A change of something unrelated shows that the restarted operator is at work.
        apply(kubectl, namespace, a_policy("other", poolRefs=[{"name": "elsewhere"}]))
        wait_for_conditions(kubectl, "tp", "other", namespace, ResolvedRefs="PoolNotFound")
        kubectl("delete", "tp", "other", "-n", namespace, check=True)
        assert versions() == settled
    assert engines[0].revision == revision


def test_sweeps_write_nothing_at_rest_even_beside_the_condition_of_somebody_else(
    kubectl: Kubectl, namespace: str, setup: OperatorSetup, engines: list[ReportingEngine]
) -> None:
    def versions() -> list[str]:
        found = [read(kubectl, "tp", "one", namespace), read(kubectl, "epool", "chat", namespace)]
        return [item["metadata"]["resourceVersion"] for item in found]

    foreign = {
        "type": "example.com/Audited",
        "status": "True",
        "reason": "Audited",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    with running_operator(replace(setup, sweep_seconds=1.0)):
        elsewhere = a_policy("other", poolRefs=[{"name": "elsewhere"}])
        apply(kubectl, namespace, a_policy("one"), elsewhere)
        wait_for_conditions(kubectl, "tp", "one", namespace, Ready="Ready")
        wait_for_conditions(kubectl, "tp", "other", namespace, Ready="PoolNotFound")
        wait_for_conditions(kubectl, "epool", "chat", namespace, Ready="Ready")
        wait_until(lambda: "usage" in read(kubectl, "epool", "chat", namespace)["status"])
        for kind, name in (("tp", "one"), ("epool", "chat")):
            add = {"op": "add", "path": "/status/conditions/0", "value": foreign}
            change_status(kubectl, kind, name, namespace, add)
        settled = versions()
        for _ in range(2):
            # That a sweep repairs what it should shows that one has passed.
            spoil = {"op": "replace", "path": "/status/tenant", "value": "spoilt"}
            change_status(kubectl, "tp", "other", namespace, spoil)
            wait_until(
                lambda: read(kubectl, "tp", "other", namespace)["status"]["tenant"] != "spoilt"
            )
        assert versions() == settled
    assert engines[0].revision == engines[1].revision


@pytest.mark.usefixtures("engines")
def test_a_sweep_puts_right_what_is_said_of_a_generation_that_a_restored_backup_undid(
    kubectl: Kubectl, namespace: str, setup: OperatorSetup
) -> None:
    with running_operator(replace(setup, sweep_seconds=1.0)):
        apply(kubectl, namespace, a_policy("one"))
        said = wait_for_conditions(kubectl, "tp", "one", namespace, Ready="Ready")["status"]
        places = ["", *(f"/conditions/{n}" for n in range(len(said["conditions"])))]
        undone = [
            {"op": "replace", "path": f"/status{place}/observedGeneration", "value": 2}
            for place in places
        ]
        change_status(kubectl, "tp", "one", namespace, *undone)
        healed = wait_for_conditions(kubectl, "tp", "one", namespace, Ready="Ready")
        assert healed["status"]["observedGeneration"] == 1


def test_operator_ends_in_peace_when_told_to(
    kubectl: Kubectl, namespace: str, setup: OperatorSetup
) -> None:
    with running_operator(setup) as operator:
        apply(kubectl, namespace, a_pool())
        wait_for_conditions(kubectl, "epool", "chat", namespace, Programmed="NoEngines")
        assert operator.stop() == 0


def test_redis_away_blocks_no_status_and_its_return_brings_the_policy(
    kubectl: Kubectl, namespace: str, setup: OperatorSetup, assets: Assets, tmp_path: Path
) -> None:
    apply(kubectl, namespace, a_pool(), a_pod("engine-0"), a_policy("acme"))
    make_ready(kubectl, namespace, "engine-0")
    pool = f"{namespace}/chat"
    with RedisServer(tmp_path / "redis", assets) as own:
        setup = replace(setup, redis_url=own.url)
        own.stop()
        with (
            running_operator(setup),
            reporting_engine(own.url, pool, "engine-0", setup.public_key) as engine,
        ):
            wait_for_conditions(
                kubectl, "tp", "acme", namespace, Accepted="Accepted", Programmed="Pending"
            )
            wait_for_conditions(kubectl, "epool", "chat", namespace, Degraded="RedisUnreachable")
            own.restart()
            wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="Programmed")
            wait_for_conditions(
                kubectl, "epool", "chat", namespace, Degraded="PolicyCurrent", Ready="Ready"
            )
            revision = engine.revision
            own.stop()
            wait_for_conditions(kubectl, "epool", "chat", namespace, Degraded="RedisUnreachable")
            # What engines ran, they still run: the policy's status says so as before.
            wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="Programmed")
            apply(kubectl, namespace, a_policy("acme", weight=7))
            wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="Pending")
            own.restart()
            wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="Programmed")
            assert engine.revision == revision + 1
            assert engine.newest.tenant_rules[f"{namespace}/acme"].weight == 7
