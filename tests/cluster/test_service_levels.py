"""Whether a tenant gets what it was promised, from real engines through the operator to status."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tidegate_devcluster.kubectl import Kubectl
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import EngineProcess, an_engine_process
from tidegate_testing.engines import MODEL, key_of
from tidegate_testing.operator_process import (
    Manifest,
    OperatorSetup,
    a_key_secret,
    a_pod,
    a_policy,
    a_pool,
    apply,
    conditions,
    make_ready,
    read,
    running_operator,
    wait_for_conditions,
    wait_until,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("operator")]

PODS = ("engine-0", "engine-1")


@pytest.fixture(scope="module")
def operator(crds_installed: None, operator_setup: OperatorSetup) -> Iterator[None]:  # noqa: ARG001
    with running_operator(operator_setup):
        yield


@pytest.fixture
def serving(
    kubectl: Kubectl, namespace: str, operator_setup: OperatorSetup, tmp_path: Path
) -> Iterator[list[EngineProcess]]:
    """Two engine processes of the pool `chat`."""
    apply(kubectl, namespace, a_pool(), *map(a_pod, PODS))
    pool = Publisher(operator_setup.redis_url, pool=f"{namespace}/chat")
    with ExitStack() as stack:
        engines = []
        for pod in PODS:
            make_ready(kubectl, namespace, pod)
            (folder := tmp_path / pod).mkdir()
            more = {"TIDEGATE_POD_NAME": pod, "TIDEGATE_VERIFY_KEY": operator_setup.public_key}
            engines.append(stack.enter_context(an_engine_process(pool, folder, **more)))
        yield engines


def promise(kubectl: Kubectl, namespace: str, *, ttft: str, window: str) -> None:
    """Promise the tenant acme a time to the first token, and wait until engines know."""
    apply(
        kubectl,
        namespace,
        a_key_secret("keys", first=key_of("acme")),
        a_policy(
            "acme",
            apiKeySecretRefs=[{"name": "keys", "key": "first"}],
            serviceLevel={"ttft": {"target": ttft, "percentile": 90}, "window": window},
        ),
    )
    wait_for_conditions(kubectl, "tp", "acme", namespace, Programmed="Programmed")


def ask(engines: Sequence[EngineProcess], *, times: int) -> None:
    for engine in engines:
        engine.wait_until_ready()
        for _ in range(times):
            engine.openai().completions.create(
                model=MODEL, prompt="Hello " * 50, max_tokens=3, extra_body={"ignore_eos": True}
            )


def message_of(manifest: Manifest, kind: str) -> str:
    (message,) = (c["message"] for c in manifest["status"]["conditions"] if c["type"] == kind)
    return str(message)


def test_a_service_level_is_met_then_missed_and_gone_without_traffic(
    kubectl: Kubectl, namespace: str, serving: list[EngineProcess]
) -> None:
    promise(kubectl, namespace, ttft="60s", window="10m")
    before = wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
    assert "ServiceLevelMet" not in conditions(before)
    assert "serviceLevel" not in before["status"]

    ask(serving, times=3)
    met = wait_for_conditions(kubectl, "tp", "acme", namespace, ServiceLevelMet="ServiceLevelMet")
    assert conditions(met)["ServiceLevelMet"][0] == "True"
    assert conditions(met)["Ready"] == ("True", "Ready")
    figures = met["status"]["serviceLevel"]
    assert (figures["attainmentPercent"], figures["window"]) == (100, "10m")
    assert figures["ttft"].endswith("ms")
    header, row = kubectl("get", "tp", "acme", "-n", namespace, check=True).stdout.splitlines()
    assert dict(zip(header.split(), row.split(), strict=False))["SLO"] == "True"

    # One millisecond is less than a step takes.
    promise(kubectl, namespace, ttft="1ms", window="8s")
    ask(serving, times=3)
    missed = wait_for_conditions(
        kubectl, "tp", "acme", namespace, ServiceLevelMet="Missed", Ready="Missed"
    )
    message = message_of(missed, "ServiceLevelMet")
    assert "first tokens met the target of 1ms, 90 % have to (p90 " in message
    assert missed["status"]["serviceLevel"]["attainmentPercent"] == 0
    assert missed["status"]["serviceLevel"]["window"] == "8s"

    def is_gone() -> bool:
        policy = read(kubectl, "tp", "acme", namespace)
        return "ServiceLevelMet" not in conditions(policy) and (
            "serviceLevel" not in policy["status"]
        )

    wait_until(is_gone)
    wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
