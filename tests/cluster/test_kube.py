"""Writes of status and replicas against the real API server."""

from __future__ import annotations

import pytest

from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_operator.kube import ApiError, KubeApi, Watched
from tidegate_operator.resources import TenantPolicy
from tidegate_testing.operator_process import a_policy, a_pool, apply, read

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]


async def test_status_of_an_object_that_is_gone_creates_none(
    control_plane: ControlPlane, kubectl: Kubectl, namespace: str
) -> None:
    apply(kubectl, namespace, a_policy("acme"))
    metadata = {"name": "acme", "namespace": namespace}
    async with KubeApi.connected(control_plane.kubeconfig) as api:
        await api.apply_status(TenantPolicy, metadata, {"tenant": "t"})
        with pytest.raises(ApiError) as refused:
            await api.apply_status(TenantPolicy, metadata | {"name": "absent"}, {"tenant": "t"})
    assert refused.value.status == 404
    assert read(kubectl, "tp", "acme", namespace)["status"]["tenant"] == "t"


async def test_a_pool_without_replicas_is_given_some_unless_somebody_scales_it_meanwhile(
    control_plane: ControlPlane,
    kubectl: Kubectl,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ref = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engines"}
    for name in ("early", "late", "quiet"):
        apply(kubectl, namespace, a_pool(name) | {"spec": a_pool()["spec"] | {"workloadRef": ref}})

    def scale(name: str) -> None:
        kubectl("scale", f"epool/{name}", "--replicas=3", "-n", namespace, check=True)

    read_object = KubeApi.read

    async def read_and_scale(self: KubeApi, watched: Watched, namespace: str, name: str) -> object:
        found = await read_object(self, watched, namespace, name)
        if name == "late":
            scale(name)
        return found

    scale("early")
    monkeypatch.setattr(KubeApi, "read", read_and_scale)
    async with KubeApi.connected(control_plane.kubeconfig) as api:
        for name in ("early", "quiet"):
            await api.give_replicas(namespace, name, 1)
        with pytest.raises(ApiError) as refused:
            await api.give_replicas(namespace, "late", 1)
    assert refused.value.status == 409
    replicas = {
        name: read(kubectl, "epool", name, namespace)["spec"]["replicas"]
        for name in ("early", "late", "quiet")
    }
    assert replicas == {"early": 3, "late": 3, "quiet": 1}
