"""The real operator against the real API server and Redis, with engines that speak the protocol."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import redis

from tidegate_devcluster.kubectl import Kubectl
from tidegate_operator.watch_cache import key_digest
from tidegate_policies.wire import TenantCounters, envelope_key
from tidegate_testing.operator_process import (
    USAGE_SECONDS,
    Manifest,
    OperatorSetup,
    a_key_secret,
    a_policy,
    a_pool,
    apply,
    read,
    running_operator,
    wait_for_conditions,
    wait_until,
)
from tidegate_testing.reporting_engine import ReportingEngine, reporting_engine

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("crds_installed", "operator"),
]


@pytest.fixture(scope="module")
def operator(crds_installed: None, operator_setup: OperatorSetup) -> Iterator[None]:  # noqa: ARG001
    with running_operator(operator_setup):
        yield


def an_object(kind: str, name: str, **spec: object) -> Manifest:
    return {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }


def test_applied_policy_is_run_by_every_engine_and_said_so(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    apply(kubectl, namespace, a_policy("gold", weight=300))
    policy = wait_for_conditions(
        kubectl,
        "tp",
        "gold",
        namespace,
        Accepted="Accepted",
        Programmed="Programmed",
        Ready="Ready",
    )
    tenant = f"{namespace}/gold"
    assert policy["status"]["tenant"] == tenant
    (entry,) = policy["status"]["pools"]
    for engine in engines:
        assert engine.revision >= entry["revision"]
        assert engine.newest.tenant_rules[tenant].weight == 300
    pool = wait_for_conditions(kubectl, "epool", "chat", namespace, Programmed="Programmed")
    assert pool["status"]["engines"] == {"ready": 2, "programmed": 2, "summary": "2/2"}
    assert pool["status"]["selector"] == "app=engine"


def test_policy_in_conflict_leaves_the_others_in_force(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    apply(kubectl, namespace, a_policy("good", weight=200))
    wait_for_conditions(kubectl, "tp", "good", namespace, Ready="Ready")
    apply(
        kubectl,
        namespace,
        a_policy("reserved", tenant="unknown"),
        a_policy("thief", tenant=f"{namespace}/good", weight=999),
    )
    wait_for_conditions(kubectl, "tp", "reserved", namespace, Accepted="Invalid", Ready="Invalid")
    wait_for_conditions(kubectl, "tp", "thief", namespace, Accepted="TenantConflict")
    rules = engines[0].newest.tenant_rules
    assert {tenant: rule.weight for tenant, rule in rules.items()} == {f"{namespace}/good": 200}


@pytest.mark.usefixtures("engines")
def test_newest_quota_that_does_not_fit_is_refused(kubectl: Kubectl, namespace: str) -> None:
    apply(kubectl, namespace, a_policy("first", kv={"nominalPercent": 60}))
    wait_for_conditions(kubectl, "tp", "first", namespace, Ready="Ready")
    # Two objects of one second are ordered by name.
    apply(kubectl, namespace, a_policy("second", kv={"nominalPercent": 30}))
    second = wait_for_conditions(
        kubectl, "tp", "second", namespace, Accepted="QuotaOversubscribed", Programmed="Programmed"
    )
    assert second["status"]["pools"][0]["reason"] == "QuotaOversubscribed"
    wait_for_conditions(kubectl, "tp", "first", namespace, Accepted="Accepted", Ready="Ready")


def test_references_heal_when_what_they_name_appears(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    tier = f"gold-{namespace}"
    refs = [{"name": "keys", "key": "first"}]
    apply(kubectl, namespace, a_policy("acme", priorityTier=tier, apiKeySecretRefs=refs))
    wait_for_conditions(
        kubectl, "tp", "acme", namespace, Accepted="Accepted", ResolvedRefs="TierNotFound"
    )
    apply(
        kubectl,
        namespace,
        an_object("PriorityTier", tier, value=7),
    )
    wait_for_conditions(kubectl, "tp", "acme", namespace, ResolvedRefs="SecretNotFound")
    apply(kubectl, namespace, a_key_secret("keys", first="swordfish\n"))
    policy = wait_for_conditions(
        kubectl, "tp", "acme", namespace, ResolvedRefs="ResolvedRefs", Ready="Ready"
    )
    assert policy["status"]["tier"] == tier
    digest = key_digest(b"swordfish")
    wait_until(lambda: digest in engines[0].newest.tenant_by_key_digest)
    assert engines[0].newest.tier_values == {tier: 7}
    kubectl("delete", "ptier", tier, check=True)
    wait_for_conditions(kubectl, "tp", "acme", namespace, ResolvedRefs="TierNotFound")


def test_a_key_that_is_replaced_is_live_within_seconds_and_reaches_engines_as_a_hash(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    refs = [{"name": "keys", "key": "first"}]
    tenant = f"{namespace}/acme"
    apply(kubectl, namespace, a_key_secret("keys", first="swordfish"))
    apply(kubectl, namespace, a_policy("acme", apiKeySecretRefs=refs))
    for key in ("swordfish", "marlin"):
        apply(kubectl, namespace, a_key_secret("keys", first=key))
        only = {key_digest(key.encode()): tenant}
        for engine in engines:
            wait_until(lambda: engine.newest.tenant_by_key_digest == only, timeout=15)  # noqa: B023
            assert key not in str(engine.newest)
    kubectl("delete", "secret", "keys", "-n", namespace, check=True)
    for engine in engines:
        wait_until(lambda: not engine.newest.tenant_by_key_digest, timeout=15)  # noqa: B023
    stored = kubectl("get", "tp,epool", "-n", namespace, "-o", "json", check=True)
    assert "marlin" not in str(stored)


def test_preemption_and_service_level_reach_engines_as_soon_as_they_appear_and_change(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    refs = {"preemptionPolicyRef": {"name": "gentle"}, "serviceLevelRef": {"name": "interactive"}}
    apply(kubectl, namespace, a_policy("acme", **refs))
    wait_for_conditions(
        kubectl,
        "tp",
        "acme",
        namespace,
        Accepted="Accepted",
        Programmed="Programmed",
        ResolvedRefs="PreemptionPolicyNotFound",
    )
    gentle = an_object("PreemptionPolicy", "gentle", maxPreemptionsPerRequest=1)
    apply(kubectl, namespace, gentle)
    wait_for_conditions(kubectl, "tp", "acme", namespace, ResolvedRefs="ServiceLevelNotFound")
    apply(kubectl, namespace, an_object("ServiceLevel", "interactive", ttft={"target": "500ms"}))
    wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
    wait_for_conditions(kubectl, "ppol", "gentle", namespace, Ready="Ready")

    def in_force() -> tuple[int, float | None]:
        rule = engines[0].newest.tenant_rules[f"{namespace}/acme"]
        return rule.preemption.max_preemptions, rule.service.ttft_seconds

    wait_until(lambda: in_force() == (1, 0.5))
    apply(kubectl, namespace, an_object("ServiceLevel", "interactive", ttft={"target": "2s"}))
    wait_until(lambda: in_force() == (1, 2.0))
    kubectl("delete", "ppol", "gentle", f"--namespace={namespace}", check=True)
    wait_for_conditions(kubectl, "tp", "acme", namespace, ResolvedRefs="PreemptionPolicyNotFound")
    wait_until(lambda: in_force() == (3, 2.0))


def test_reserved_share_that_does_not_fit_is_the_newer_tiers_fault(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    # Two objects of one second are ordered by name.
    older, newer = f"a-{namespace}", f"b-{namespace}"
    for tier in (older, newer):
        apply(kubectl, namespace, an_object("PriorityTier", tier, reservedSharePercent=60))
    apply(kubectl, namespace, *(a_policy(name, priorityTier=name) for name in (older, newer)))
    wait_for_conditions(kubectl, "tp", newer, namespace, Ready="Ready")
    conflict = wait_for_conditions(kubectl, "ptier", newer, namespace, Accepted="TierConflict")
    wait_for_conditions(kubectl, "ptier", older, namespace, Ready="Ready")
    (message,) = (c["message"] for c in conflict["status"]["conditions"] if c["type"] == "Accepted")
    assert f"pool '{namespace}/chat'" in message
    assert f"{older} 60" in message

    def shares() -> dict[str, int]:
        return {tier.name: tier.reserved_share_percent for tier in engines[0].newest.tiers}

    wait_until(lambda: shares() == {older: 60, newer: 0})
    kubectl("delete", "tp", older, f"--namespace={namespace}", check=True)
    wait_for_conditions(kubectl, "ptier", newer, namespace, Accepted="Accepted", Ready="Ready")
    kubectl("delete", "ptier", older, newer, check=True)


def test_key_of_two_policies_identifies_neither(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    refs = [{"name": "keys", "key": "first"}]
    apply(
        kubectl,
        namespace,
        a_key_secret("keys", first="shared"),
        a_policy("one", apiKeySecretRefs=refs),
        a_policy("two", apiKeySecretRefs=refs),
    )
    for name in ("one", "two"):
        wait_for_conditions(kubectl, "tp", name, namespace, Accepted="KeyConflict")
    wait_until(lambda: len(engines[0].newest.tenants) == 2)
    assert engines[0].newest.tenant_by_key_digest == {}


def test_of_a_burst_of_changes_the_last_one_is_live(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    apply(kubectl, namespace, *(a_policy("busy", weight=weight) for weight in range(1, 51)))
    policy = wait_for_conditions(kubectl, "tp", "busy", namespace, Programmed="Programmed")
    assert policy["status"]["observedGeneration"] == policy["metadata"]["generation"] == 50
    for engine in engines:
        assert engine.newest.tenant_rules[f"{namespace}/busy"].weight == 50


def test_engine_that_lags_is_named(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    apply(kubectl, namespace, a_policy("acme"))
    wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="Programmed")
    engines[1].paused.set()
    apply(kubectl, namespace, a_policy("acme", weight=5))
    wait_for_conditions(
        kubectl, "tp", "acme", namespace, Programmed="EnginesLagging", Ready="EnginesLagging"
    )
    pool = wait_for_conditions(kubectl, "epool", "chat", namespace, Programmed="EnginesLagging")
    assert pool["status"]["laggards"] == ["engine-1"]
    assert pool["status"]["engines"]["programmed"] == 1
    engines[1].paused.clear()
    wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="Programmed", Ready="Ready")
    wait_for_conditions(kubectl, "epool", "chat", namespace, Programmed="Programmed")


def test_engine_that_comes_back_without_the_policy_takes_programmed_back(
    kubectl: Kubectl,
    namespace: str,
    operator_setup: OperatorSetup,
    engines: list[ReportingEngine],
) -> None:
    apply(kubectl, namespace, a_policy("acme"))
    wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="Programmed")
    engines[1].stop()
    pool, key = f"{namespace}/chat", operator_setup.public_key
    with reporting_engine(
        operator_setup.redis_url, pool, "engine-1", key, is_paused=True
    ) as restarted:
        wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="EnginesLagging")
        restarted.paused.clear()
        wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="Programmed")


def test_redis_emptied_gets_the_same_revision_again(
    kubectl: Kubectl,
    namespace: str,
    operator_setup: OperatorSetup,
    engines: list[ReportingEngine],
) -> None:
    apply(kubectl, namespace, a_policy("acme"))
    wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="Programmed")
    revision = engines[0].revision
    key = envelope_key(f"{namespace}/chat")
    with redis.Redis.from_url(operator_setup.redis_url) as connection:
        connection.delete(key)
        wait_until(lambda: connection.hget(key, "revision") == str(revision).encode())
    assert engines[0].revision == revision


def test_pool_that_redis_refuses_stands_in_no_other_pools_way(
    kubectl: Kubectl,
    namespace: str,
    operator_setup: OperatorSetup,
    engines: list[ReportingEngine],
) -> None:
    key = envelope_key(f"{namespace}/blocked")
    with redis.Redis.from_url(operator_setup.redis_url) as connection:
        connection.set(key, "not a hash")
        apply(kubectl, namespace, a_pool("blocked"))
        wait_for_conditions(
            kubectl,
            "epool",
            "blocked",
            namespace,
            Programmed="Pending",
            Degraded="RedisUnreachable",
        )
        apply(kubectl, namespace, a_policy("acme", weight=3))
        wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
        assert engines[0].newest.tenant_rules[f"{namespace}/acme"].weight == 3
        wait_for_conditions(kubectl, "epool", "chat", namespace, Degraded="PolicyCurrent")
        connection.delete(key)
        wait_for_conditions(kubectl, "epool", "blocked", namespace, Degraded="PolicyCurrent")


def test_pool_without_engines_says_so(kubectl: Kubectl, namespace: str) -> None:
    apply(kubectl, namespace, a_pool(), a_policy("acme"))
    wait_for_conditions(kubectl, "epool", "chat", namespace, Programmed="NoEngines")
    wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="NoEngines", Ready="NoEngines")


def test_usage_of_an_active_tenant_is_shown_and_goes_at_rest(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    def usage() -> dict[str, int] | None:
        found: dict[str, int] | None = read(kubectl, "tp", "acme", namespace)["status"].get("usage")
        return found

    tenant = f"{namespace}/acme"
    apply(kubectl, namespace, a_policy("acme"))
    wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
    engines[0].tenants = (TenantCounters(tenant=tenant, running=2, kv_used_blocks=50),)
    wait_until(lambda: (usage() or {}).get("running") == 2)
    assert (usage() or {})["kvPercent"] == 25
    engines[0].tenants = ()
    wait_until(lambda: usage() is None)


def test_usage_that_changes_all_the_time_is_written_now_and_then(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    apply(kubectl, namespace, a_policy("acme"))
    wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
    written: dict[str, float] = {}
    numbers = itertools.cycle(range(1, 90))

    def has_been_written(times: int) -> bool:
        used = TenantCounters(tenant=f"{namespace}/acme", running=1, kv_used_blocks=next(numbers))
        engines[0].tenants = (used,)
        version = read(kubectl, "tp", "acme", namespace)["metadata"]["resourceVersion"]
        written.setdefault(version, time.monotonic())
        return len(written) > times

    wait_until(lambda: has_been_written(6))
    _, first, *_, last = written.values()
    # Five periods, but for what looking takes.
    assert last - first > 4 * USAGE_SECONDS
