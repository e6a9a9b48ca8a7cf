"""Status writes against the real API server."""

from __future__ import annotations

import pytest

from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_operator.kube import ApiError, KubeApi
from tidegate_operator.resources import TenantPolicy
from tidegate_testing.operator_process import a_policy, apply, read

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
