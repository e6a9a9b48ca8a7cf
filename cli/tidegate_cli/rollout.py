"""Waits until a Deployment's pods are ready, saying how far it is; fails early when they crash."""

import asyncio
from collections.abc import Callable
from typing import Any

from tidegate_cli.errors import NotReadyError
from tidegate_devcluster.api import KubernetesApi

MOST_RESTARTS = 2
_POLL_SECONDS = 0.2
_SILENCE_SECONDS = 10.0


async def pods_ready(
    api: KubernetesApi,
    namespace: str,
    deployment: str,
    *,
    limit_seconds: float,
    tell: Callable[[str], None],
) -> None:
    """Wait until all replicas of a Deployment are ready.

    Raises:
        NotReadyError: They aren't within the limit, or one crashed more than twice.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_seconds
    spoke_at = loop.time()
    while True:
        found = await api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{deployment}")
        wanted = found["spec"]["replicas"]
        ready = found.get("status", {}).get("readyReplicas", 0)
        if ready == wanted:
            return
        pods = await api.get(
            f"/api/v1/namespaces/{namespace}/pods", {"labelSelector": f"app={deployment}"}
        )
        seen = f"{ready} of {wanted} ready; {'; '.join(describe_pod(p) for p in pods['items'])}"
        restarts = max((_restarts(pod) for pod in pods["items"]), default=0)
        if restarts > MOST_RESTARTS or loop.time() > deadline:
            raise NotReadyError(
                f"deployment/{deployment}", limit_seconds=limit_seconds, last_seen=seen
            )
        if loop.time() - spoke_at > _SILENCE_SECONDS:
            tell(f"{deployment}: {seen}")
            spoke_at = loop.time()
        await asyncio.sleep(_POLL_SECONDS)


def describe_pod(pod: dict[str, Any]) -> str:
    """Return the pod's name, phase, what its container waits for, and its restarts."""
    status = pod.get("status", {})
    parts = [f"{pod['metadata']['name']} {status.get('phase', 'Pending')}"]
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting")
        if waiting:
            parts.append(f"{waiting.get('reason', '')} {waiting.get('message', '')}".strip())
    if restarts := _restarts(pod):
        parts.append(f"{restarts} restarts")
    return ", ".join(parts)


def _restarts(pod: dict[str, Any]) -> int:
    containers = pod.get("status", {}).get("containerStatuses", ())
    return sum(container.get("restartCount", 0) for container in containers)
