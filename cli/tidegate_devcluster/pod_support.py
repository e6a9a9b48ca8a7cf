"""What the process kubelet can't do for a pod."""

from __future__ import annotations

from tidegate_devcluster import pod_volumes
from tidegate_devcluster.api import Json

SERVICE_ACCOUNT_MOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def unsupported(pod: Json, *, has_mounts: bool) -> str | None:
    """Names the first thing the pod asks for and this kubelet lacks; None where there is none.

    Args:
        pod: As the API has it.
        has_mounts: Whether the pod's place has mounts of its own, as those with namespaces have.
    """
    spec = pod["spec"]
    for name in ("initContainers", "readinessGates"):
        if spec.get(name):
            return f"spec.{name}: not supported by the process kubelet"
    for container in spec["containers"]:
        missing = _unsupported_of(pod, container, has_mounts=has_mounts)
        if missing is not None:
            return f"container {container['name']}: {missing}"
    return None


def _unsupported_of(pod: Json, container: Json, *, has_mounts: bool) -> str | None:
    hooks = container.get("lifecycle", {})
    if hooks and (set(hooks) != {"preStop"} or "sleep" not in hooks["preStop"]):
        return "of lifecycle hooks the process kubelet supports preStop.sleep alone"
    for probe in PROBES:
        if probe in container and not {"httpGet", "tcpSocket"} & set(container[probe]):
            return f"{probe} must be httpGet or tcpSocket for the process kubelet"
    if has_mounts:
        return pod_volumes.unsupported(pod, container)
    for mount in container.get("volumeMounts", ()):
        # Admission adds this one to every pod.
        if mount["mountPath"] != SERVICE_ACCOUNT_MOUNT:
            return (
                f"volume mount {mount['mountPath']} is not supported by the process kubelet on"
                " loopback; pass values by env"
            )
    return None
