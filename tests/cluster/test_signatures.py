"""Policies that the operator didn't sign: refused by engines, reported, and replaced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tidegate_devcluster.kubectl import Kubectl
from tidegate_operator.keys import public_key_text, signer
from tidegate_policies.envelope import Envelope
from tidegate_policies.wire import envelope_key, wake_channel
from tidegate_testing.operator_process import (
    OperatorSetup,
    a_policy,
    apply,
    read,
    running_operator,
    wait_for_conditions,
    wait_until,
)
from tidegate_testing.reporting_engine import ReportingEngine, reporting_engine

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed", "operator")]


@pytest.fixture(scope="module")
def operator(crds_installed: None, operator_setup: OperatorSetup) -> Iterator[None]:  # noqa: ARG001
    with running_operator(operator_setup):
        yield


def test_engine_with_another_key_refuses_every_policy_and_is_named(
    kubectl: Kubectl,
    namespace: str,
    operator_setup: OperatorSetup,
    engines: list[ReportingEngine],
) -> None:
    apply(kubectl, namespace, a_policy("acme", weight=7))
    wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
    engines[1].stop()
    pool, strange = f"{namespace}/chat", public_key_text(Ed25519PrivateKey.generate())
    with reporting_engine(operator_setup.redis_url, pool, "engine-1", strange) as misled:
        apply(kubectl, namespace, a_policy("acme", weight=8))
        policy = wait_for_conditions(
            kubectl, "tp", "acme", namespace, Programmed="EngineRefused", Ready="EngineRefused"
        )
        (message,) = (
            entry["message"]
            for entry in policy["status"]["conditions"]
            if entry["type"] == "Programmed"
        )
        assert "engine-1 refused revision" in message
        assert "BadSignature" in message
        wait_for_conditions(kubectl, "epool", "chat", namespace, Degraded="EngineRefused")
        # The others are not held up.
        wait_until(lambda: engines[0].newest.tenant_rules[f"{namespace}/acme"].weight == 8)
        assert misled.snapshots == {}


def test_policy_that_somebody_puts_into_redis_is_run_by_nobody_and_replaced(
    kubectl: Kubectl,
    namespace: str,
    operator_setup: OperatorSetup,
    engines: list[ReportingEngine],
) -> None:
    apply(kubectl, namespace, a_policy("acme", weight=7))
    wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
    pool, revision = f"{namespace}/chat", engines[0].revision
    with redis.Redis.from_url(operator_setup.redis_url) as thief:
        text = thief.hget(envelope_key(pool), "envelope")
        assert isinstance(text, bytes)
        sealed = Envelope.from_json(text)
        forged = replace(sealed, revision=revision + 5)
        sign = signer(Ed25519PrivateKey.generate())
        forged = replace(forged, signature=sign(forged.message()))
        fields = {"revision": forged.revision, "envelope": forged.to_json(), "digest": "forged"}
        thief.hset(envelope_key(pool), mapping=fields)
        thief.publish(wake_channel(pool), forged.revision)
        # The operator goes on from the highest number that anybody has seen.
        wait_until(lambda: all(engine.revision > revision for engine in engines))
    for engine in engines:
        assert engine.newest.tenant_rules[f"{namespace}/acme"].weight == 7
    wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
    pool_status = read(kubectl, "epool", "chat", namespace)["status"]
    assert pool_status["policy"]["revision"] == engines[0].revision
