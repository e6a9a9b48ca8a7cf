"""The operator as the external-metrics server of a cluster: registered as the chart does it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.pki import Pki
from tidegate_devcluster.processes import free_port
from tidegate_testing.cluster import eventually
from tidegate_testing.helm import OPERATOR, Helm, Manifest, listed, only, operator_kubeconfig

API_SERVICE = "v1beta1.external.metrics.k8s.io"
API_PATH = "/apis/external.metrics.k8s.io/v1beta1"


@dataclass(frozen=True)
class Server:
    """What an operator on this machine needs in order to be the server.

    Attributes:
        kubeconfig: With the rights that the chart gives it.
        certificates: Folder with its `tls.crt` and `tls.key`, made by `pki`.
        port: Where it has to listen.
        objects: By which the API server finds it.
    """

    kubeconfig: Path
    certificates: Path
    port: int
    pki: Pki
    objects: Sequence[Manifest]


def a_server(
    control_plane: ControlPlane, kubectl: Kubectl, helm: Helm, namespace: str, folder: Path
) -> Server:
    """Make what the chart would, for a release in the namespace."""
    pki, port = Pki(folder), free_port()
    pki.server("tls", [f"{OPERATOR}.{namespace}.svc"])
    ours: dict[str, Any] = {
        "externalMetrics": {"enabled": True, "tlsSecretName": "x", "ca": pki.ca.read_text()}
    }
    rendered = helm.render(values={"operator": ours}, namespace=namespace)
    api = only(rendered, "APIService", API_SERVICE)
    api["spec"]["service"]["port"] = port
    # The chart's Service leads to pods; this one to where the operator runs here.
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": OPERATOR, "namespace": namespace},
        "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
    }
    kubeconfig = operator_kubeconfig(control_plane, kubectl, helm, namespace=namespace, **ours)
    return Server(kubeconfig, folder, port, pki, (service, api))


@contextmanager
def registered(kubectl: Kubectl, server: Server) -> Iterator[None]:
    """Have the API server ask it for the length of the block, once it listens."""
    eventually(lambda: listens(server.port), "the server to listen")
    try:
        kubectl("apply", "-f", "-", input=listed(server.objects), check=True)
        available = ("--for=condition=Available", "--timeout=60s", f"apiservice/{API_SERVICE}")
        kubectl("wait", *available, check=True)
        yield
    finally:
        # While it is registered and absent, no namespace ends.
        kubectl("delete", "apiservice", API_SERVICE, "--ignore-not-found")


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def values_of(kubectl: Kubectl, namespace: str, metric: str, selector: str = "") -> list[Any]:
    """Return what the API server says of a metric, as an autoscaler asks it."""
    path = f"{API_PATH}/namespaces/{namespace}/{metric}?labelSelector={selector}"
    items: list[Any] = json.loads(kubectl("get", "--raw", path, check=True).stdout)["items"]
    return items
