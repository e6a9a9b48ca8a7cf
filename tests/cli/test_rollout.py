import asyncio
import json
from typing import Any

import pytest

from tidegate_cli.errors import NotReadyError
from tidegate_cli.rollout import describe_pod, pods_ready
from tidegate_cli.workload import EngineWorkload
from tidegate_devcluster.api import KubernetesApi
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl


def pod_with(container: dict[str, Any]) -> dict[str, Any]:
    return {
        "metadata": {"name": "engine-1"},
        "status": {"phase": "Running", "containerStatuses": [container]},
    }


@pytest.mark.parametrize(
    ("pod", "text"),
    [
        ({"metadata": {"name": "engine-1"}}, "engine-1 Pending"),
        (pod_with({"restartCount": 0, "state": {"running": {}}}), "engine-1 Running"),
        (
            pod_with(
                {
                    "restartCount": 2,
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "exit code 2"}},
                }
            ),
            "engine-1 Running, CrashLoopBackOff exit code 2, 2 restarts",
        ),
    ],
)
def test_a_pod_is_described_by_what_it_waits_for(pod: dict[str, Any], text: str) -> None:
    assert describe_pod(pod) == text


def create_deployment(kubectl: Kubectl, namespace: str) -> None:
    workload = EngineWorkload(namespace=namespace, image="any", replicas=2, environment={})
    kubectl("apply", "-f", "-", input=json.dumps(workload.objects()[0]), check=True)


def set_ready(kubectl: Kubectl, namespace: str, ready: int) -> None:
    status = {"status": {"replicas": 2, "readyReplicas": ready, "observedGeneration": 1}}
    kubectl(
        *("-n", namespace, "patch", "deployment", "engine", "--subresource=status"),
        *("--type=merge", "-p", json.dumps(status)),
        check=True,
    )


@pytest.mark.cluster
async def test_waiting_ends_when_all_replicas_are_ready(
    control_plane: ControlPlane, kubectl: Kubectl, namespace: str
) -> None:
    await asyncio.to_thread(create_deployment, kubectl, namespace)
    async with KubernetesApi(control_plane.kubeconfig) as api:
        waiting = asyncio.create_task(
            pods_ready(api, namespace, "engine", limit_seconds=30, tell=lambda _line: None)
        )
        await asyncio.to_thread(set_ready, kubectl, namespace, 1)
        assert not waiting.done()
        await asyncio.to_thread(set_ready, kubectl, namespace, 2)

        await waiting


@pytest.mark.cluster
async def test_replicas_that_do_not_become_ready_are_told_with_their_number(
    control_plane: ControlPlane, kubectl: Kubectl, namespace: str
) -> None:
    await asyncio.to_thread(create_deployment, kubectl, namespace)
    await asyncio.to_thread(set_ready, kubectl, namespace, 1)
    async with KubernetesApi(control_plane.kubeconfig) as api:
        with pytest.raises(NotReadyError, match="last seen: 1 of 2 ready"):
            await pods_ready(api, namespace, "engine", limit_seconds=0.05, tell=lambda _line: None)


def create_crashing_pod(kubectl: Kubectl, namespace: str) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "engine-1", "labels": {"app": "engine"}},
        "spec": {"containers": [{"name": "engine", "image": "any"}]},
    }
    container = {
        "name": "engine",
        "image": "any",
        "imageID": "",
        "ready": False,
        "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    }
    status = {"status": {"phase": "Running", "containerStatuses": [container]}}
    kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(pod), check=True)
    kubectl(
        *("-n", namespace, "patch", "pod", "engine-1", "--subresource=status"),
        *("--type=merge", "-p", json.dumps(status)),
        check=True,
    )


@pytest.mark.cluster
async def test_a_pod_that_keeps_crashing_ends_the_wait_at_once(
    control_plane: ControlPlane, kubectl: Kubectl, namespace: str
) -> None:
    await asyncio.to_thread(create_deployment, kubectl, namespace)
    await asyncio.to_thread(create_crashing_pod, kubectl, namespace)
    async with KubernetesApi(control_plane.kubeconfig) as api, asyncio.timeout(30):
        with pytest.raises(NotReadyError, match="CrashLoopBackOff, 3 restarts"):
            await pods_ready(api, namespace, "engine", limit_seconds=600, tell=lambda _line: None)
