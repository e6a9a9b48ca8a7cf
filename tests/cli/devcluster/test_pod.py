from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tidegate_devcluster.api import KubernetesApi
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.errors import NetworkError
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.network import PodPlace
from tidegate_devcluster.pod import Node, Pod
from tidegate_devcluster.processes import Lifeline
from tidegate_testing.cluster import eventually

pytestmark = pytest.mark.cluster

MANIFEST = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "web"},
    "spec": {"containers": [{"name": "web", "image": "unknown"}]},
}


class OnePlace:
    """A network with one place to give, or with a reason to give none."""

    host_address = "127.0.0.1"

    def __init__(self, place: PodPlace | str) -> None:
        self._place = place

    async def attach(self, container_ports: Sequence[int]) -> PodPlace:  # noqa: ARG002
        if isinstance(self._place, str):
            raise NetworkError(self._place)
        return self._place

    async def detach(self, place: PodPlace) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def manifest(kubectl: Kubectl, namespace: str) -> dict[str, Any]:
    """The pod as the API has it."""
    made = kubectl(
        *("create", "-n", namespace, "-o", "json", "-f", "-"),
        input=json.dumps(MANIFEST),
        check=True,
    )
    pod: dict[str, Any] = json.loads(made.stdout)
    return pod


@asynccontextmanager
async def running_pod(
    manifest: dict[str, Any], control_plane: ControlPlane, root: Path, network: OnePlace
) -> AsyncIterator[list[str]]:
    """Runs the pod and gives what is told of it."""
    told: list[str] = []
    with Lifeline() as lifeline:
        async with (
            KubernetesApi(control_plane.kubeconfig) as api,
            aiohttp.ClientSession() as session,
        ):
            node = Node(
                name="node",
                root=root,
                images={},
                environment={},
                api=api,
                network=network,
                lifeline=lifeline,
                session=session,
                tell=told.append,
            )
            pod = Pod(manifest, node)
            run = asyncio.create_task(pod.run())
            yield told
            pod.abandon()
            await run


async def test_a_pod_without_a_place_says_what_it_waits_for(
    manifest: dict[str, Any],
    control_plane: ControlPlane,
    kubectl: Kubectl,
    namespace: str,
    tmp_path: Path,
) -> None:
    def waiting() -> dict[str, str]:
        shown = kubectl("get", "pod", "web", "-n", namespace, "-o", "json", check=True)
        statuses = json.loads(shown.stdout)["status"].get("containerStatuses") or [{}]
        found: dict[str, str] = statuses[0].get("state", {}).get("waiting", {})
        return found

    network = OnePlace("ip: Operation not permitted")
    async with running_pod(manifest, control_plane, tmp_path, network):
        found = await asyncio.to_thread(eventually, waiting, "a waiting container")

    assert found == {"reason": "ContainerCreating", "message": "ip: Operation not permitted"}


async def test_a_status_that_the_api_refuses_is_told_once_and_given_up(
    manifest: dict[str, Any], control_plane: ControlPlane, tmp_path: Path
) -> None:
    network = OnePlace(PodPlace("no-address", "127.0.0.1"))
    async with running_pod(manifest, control_plane, tmp_path, network) as told:
        await asyncio.to_thread(eventually, lambda: told, "a refusal that is told")
        refused = list(told)

    assert len(refused) == 1
    assert "/pods/web/status: 422 Invalid" in refused[0]
    assert "no-address" in refused[0]
