from __future__ import annotations

from typing import Any

import pytest

from tidegate_devcluster.pod_support import SERVICE_ACCOUNT_MOUNT, unsupported

CLAIM = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
SCRATCH = {"name": "scratch", "emptyDir": {}}


def found(*, has_mounts: bool = True, **spec: Any) -> str | None:
    container = {"name": "web", **spec.pop("container", {})}
    return unsupported({"spec": {"containers": [container], **spec}}, has_mounts=has_mounts)


def mounting(name: str, path: str, **more: Any) -> dict[str, Any]:
    return {"volumeMounts": [{"name": name, "mountPath": path, **more}]}


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"initContainers": [{}]}, "spec.initContainers"),
        ({"readinessGates": [{}]}, "spec.readinessGates"),
        ({"container": {"lifecycle": {"postStart": {}}}}, "container web: of lifecycle hooks"),
        ({"container": {"lifecycle": {"preStop": {"exec": {}}}}}, "preStop.sleep alone"),
        ({"container": {"livenessProbe": {"exec": {}}}}, "livenessProbe must be httpGet or tcp"),
        ({"volumes": [CLAIM], "container": mounting("models", "/srv")}, "volume mount /srv"),
        (
            {"volumes": [SCRATCH], "container": mounting("scratch", "/srv", subPath="a")},
            "volume mount /srv: subPath",
        ),
        (
            {"volumes": [SCRATCH], "container": mounting("scratch", "/nowhere/else")},
            "volume mount /nowhere/else: the path must exist",
        ),
    ],
)
def test_what_the_kubelet_lacks_is_named(spec: dict[str, Any], named: str) -> None:
    assert named in (found(**spec) or "")


@pytest.mark.parametrize(
    "spec",
    [
        {"container": {"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}},
        {"container": {"livenessProbe": {"tcpSocket": {"port": 1}}}},
        {"volumes": [SCRATCH], "container": mounting("scratch", "/var/run/tidegate/new")},
    ],
)
def test_what_the_kubelet_has_is_no_obstacle(spec: dict[str, Any]) -> None:
    assert found(**spec) is None


def test_on_loopback_only_the_service_account_that_admission_mounts_is_no_obstacle() -> None:
    token = {"container": mounting("token", SERVICE_ACCOUNT_MOUNT)}
    scratch = {"volumes": [SCRATCH], "container": mounting("scratch", "/srv")}

    assert found(has_mounts=False, **token) is None
    assert "on loopback" in (found(has_mounts=False, **scratch) or "")
