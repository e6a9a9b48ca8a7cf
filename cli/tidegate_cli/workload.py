"""The Kubernetes objects that the command makes itself: namespace, engine workload, API keys."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY_LABEL = "tidegate.io/api-keys"
"""The operator reads no Secret without this label."""

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EngineWorkload:
    """What the engine Deployment is made of.

    Attributes:
        image: Name in the process kubelet's image table.
        environment: Variables of the engine's container; TIDEGATE_POD_NAME, TIDEGATE_PORT and
            TIDEGATE_ADMIN_PORT come on top.
        grace_seconds: Between being asked to stop and being killed.
    """

    namespace: str
    image: str
    replicas: int
    environment: Mapping[str, str]
    name: str = "engine"
    port: int = 8000
    admin_port: int = 8001
    grace_seconds: int = 10

    def objects(self) -> list[Object]:
        """Return the Deployment and its Service."""
        return [self._deployment(), self._service()]

    def _deployment(self) -> Object:
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "replicas": self.replicas,
                "selector": {"matchLabels": {"app": self.name}},
                "template": {
                    "metadata": {"labels": {"app": self.name}},
                    "spec": {
                        # Engines know no Kubernetes: they get no token for its API.
                        "automountServiceAccountToken": False,
                        "terminationGracePeriodSeconds": self.grace_seconds,
                        "containers": [self._container()],
                    },
                },
            },
        }

    def _container(self) -> Object:
        return {
            "name": "engine",
            "image": self.image,
            "ports": [
                {"name": "http", "containerPort": self.port},
                {"name": "admin", "containerPort": self.admin_port},
            ],
            "env": [
                {"name": "TIDEGATE_POD_NAME", "valueFrom": _field("metadata.name")},
                {"name": "TIDEGATE_HOST", "valueFrom": _field("status.podIP")},
                {"name": "TIDEGATE_PORT", "value": str(self.port)},
                {"name": "TIDEGATE_ADMIN_PORT", "value": str(self.admin_port)},
                *({"name": name, "value": value} for name, value in self.environment.items()),
            ],
            "readinessProbe": {
                "httpGet": {"path": "/readyz", "port": "http"},
                "periodSeconds": 1,
                "failureThreshold": 3,
            },
        }

    def _service(self) -> Object:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "selector": {"app": self.name},
                "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
            },
        }


def namespace_object(name: str) -> Object:
    """Return a Namespace."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def key_secret(namespace: str, tenant: str, key: str) -> Object:
    """Return the Secret from which the operator learns that the holder of `key` is `tenant`."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": f"{tenant}-api-key",
            "namespace": namespace,
            "labels": {KEY_LABEL: "true"},
        },
        "stringData": {"key": key},
    }


def new_key(tenant: str) -> str:
    """Return a fresh API key that tells people, and only people, whose it is."""
    return f"{tenant}-{secrets.token_urlsafe(18)}"


def _field(path: str) -> Object:
    return {"fieldRef": {"fieldPath": path}}
