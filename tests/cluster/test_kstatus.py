"""What tools that wait by kstatus make of our objects; Helm 4 is one of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_testing.helm import Helm
from tidegate_testing.operator_process import (
    OperatorSetup,
    apply,
    conditions,
    read,
    running_operator,
)
from tidegate_testing.reporting_engine import ReportingEngine

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

POLICY = """
apiVersion: tidegate.io/v1alpha1
kind: TenantPolicy
metadata: {name: acme}
spec:
  poolRefs: [{name: chat}]
  weight: {{ .Values.weight }}
  {{- with .Values.gentle }}
  preemptionPolicyRef: {name: {{ . }}}
  {{- end }}
"""
GENTLE = {
    "apiVersion": "tidegate.io/v1alpha1",
    "kind": "PreemptionPolicy",
    "metadata": {"name": "gentle"},
    "spec": {},
}


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    folder = tmp_path / "tenants"
    (folder / "templates").mkdir(parents=True)
    (folder / "Chart.yaml").write_text("{apiVersion: v2, name: tenants, version: 0.1.0}")
    (folder / "templates" / "policy.yaml").write_text(POLICY)
    return folder


def test_helm_waits_until_a_policy_is_ready_and_no_longer(
    assets: Assets,
    control_plane: ControlPlane,
    kubectl: Kubectl,
    namespace: str,
    operator_setup: OperatorSetup,
    engines: list[ReportingEngine],
    chart: Path,
    tmp_path: Path,
) -> None:
    helm = Helm(assets.tool("helm"), tmp_path / "helm", control_plane.kubeconfig)

    def waited_for(action: str, *, seconds: int = 60, **values: object) -> str:
        """Return what Helm is not content with; nothing when it is."""
        where = (f"--namespace={namespace}", "--wait", f"--timeout={seconds}s")
        done = helm(action, "tenants", str(chart), *where, values=values, check=False)
        return done.stderr if done.returncode else ""

    def is_ready() -> bool:
        return conditions(read(kubectl, "tp", "acme", namespace)).get("Ready") == ("True", "Ready")

    # What nobody has looked at is not done, new as it is.
    assert "TenantPolicy" in waited_for("install", seconds=4, weight=1)
    helm("uninstall", "tenants", f"--namespace={namespace}", "--wait")
    with running_operator(replace(operator_setup, namespaces=(namespace,))):
        assert waited_for("install", weight=1) == ""
        assert is_ready()
        assert waited_for("upgrade", weight=2) == ""
        assert is_ready()
        assert engines[0].newest.tenant_rules[f"{namespace}/acme"].weight == 2
        assert "TenantPolicy" in waited_for("upgrade", seconds=4, weight=2, gentle="gentle")
        assert not is_ready()
        apply(kubectl, namespace, GENTLE)
        assert waited_for("upgrade", weight=3, gentle="gentle") == ""
        assert is_ready()
