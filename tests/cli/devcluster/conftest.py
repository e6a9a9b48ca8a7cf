"""Manifests of the small server that stands for an engine in these tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidegate_testing

SERVER = str(Path(tidegate_testing.__file__).parent / "pod_server.py")


@pytest.fixture
def web() -> Callable[..., str]:
    """Returns a manifest: a Deployment `web` of the small server, and its Service."""

    def manifest(replicas: int, **container: Any) -> str:
        pod = {
            "metadata": {"labels": {"app": "web"}},
            "spec": {
                "terminationGracePeriodSeconds": 10,
                "containers": [_server_container(**container)],
            },
        }
        deployment = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "web"},
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": {"app": "web"}},
                "template": pod,
            },
        }
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "web"},
            "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8000}]},
        }
        return f"{json.dumps(deployment)}\n---\n{json.dumps(service)}\n"

    return manifest


def _server_container(**changes: Any) -> dict[str, Any]:
    env = [{"name": "WEB_PORT", "value": "8000"}, *changes.pop("env", [])]
    return {
        "name": "web",
        "image": "python",
        # -P: a neighbour of the script must not shadow the standard library.
        "args": ["-P", SERVER, "$(WEB_PORT)"],
        "env": env,
        "ports": [{"containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8000}, "periodSeconds": 1},
        **changes,
    }
