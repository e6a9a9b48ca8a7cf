import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from tidegate_cli.conditions import ResourceWatch
from tidegate_cli.errors import NotReadyError
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

POLICY = """
apiVersion: tidegate.io/v1alpha1
kind: TenantPolicy
metadata: {name: gold}
spec: {poolRefs: [{name: chat}]}
"""


@pytest.fixture
async def watch(control_plane: ControlPlane, namespace: str) -> AsyncIterator[ResourceWatch]:
    async with ResourceWatch(
        control_plane.kubeconfig, namespace=namespace, plural="tenantpolicies"
    ) as opened:
        yield opened


def set_programmed(kubectl: Kubectl, namespace: str, status: str, *, generation: int) -> None:
    condition = {
        "type": "Programmed",
        "status": status,
        "observedGeneration": generation,
        "reason": "Programmed" if status == "True" else "EnginesLagging",
        "message": "engine-1 runs revision 3",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    kubectl(
        *("-n", namespace, "patch", "tenantpolicy", "gold", "--subresource=status"),
        *("--type=merge", "-p", json.dumps({"status": {"conditions": [condition]}})),
        check=True,
    )


async def test_a_condition_that_comes_true_is_timed_by_its_event(
    watch: ResourceWatch, kubectl: Kubectl, namespace: str
) -> None:
    clock = asyncio.get_running_loop().time
    await asyncio.to_thread(kubectl, "-n", namespace, "apply", "-f", "-", input=POLICY, check=True)
    asked = clock()
    waiting = asyncio.create_task(
        watch.when_true("gold", "Programmed", generation=1, limit_seconds=30)
    )
    await asyncio.to_thread(set_programmed, kubectl, namespace, "True", generation=1)

    at = await waiting

    assert asked < at <= clock()
    # Whoever asks later gets the same time.
    assert await watch.when_true("gold", "Programmed", generation=1, limit_seconds=1) == at
    assert watch.num_writes == 2


async def test_a_condition_of_an_older_generation_does_not_count(
    watch: ResourceWatch, kubectl: Kubectl, namespace: str
) -> None:
    await asyncio.to_thread(kubectl, "-n", namespace, "apply", "-f", "-", input=POLICY, check=True)
    await asyncio.to_thread(set_programmed, kubectl, namespace, "True", generation=1)
    await watch.when_true("gold", "Programmed", generation=1, limit_seconds=30)

    with pytest.raises(NotReadyError, match="generation 2: not within") as refused:
        await watch.when_true("gold", "Programmed", generation=2, limit_seconds=0.05)

    assert refused.value.limit_seconds == 0.05


async def test_what_was_last_seen_is_told_when_time_is_over(
    watch: ResourceWatch, kubectl: Kubectl, namespace: str
) -> None:
    await asyncio.to_thread(kubectl, "-n", namespace, "apply", "-f", "-", input=POLICY, check=True)
    await asyncio.to_thread(set_programmed, kubectl, namespace, "False", generation=1)

    with pytest.raises(NotReadyError, match="EnginesLagging: engine-1 runs revision 3"):
        await watch.when_true("gold", "Programmed", generation=1, limit_seconds=1)


async def test_an_object_that_does_not_exist_is_told(watch: ResourceWatch) -> None:
    with pytest.raises(NotReadyError, match="last seen: no such object"):
        await watch.when_true("gold", "Programmed", generation=1, limit_seconds=0.05)
