from __future__ import annotations

import http.client
import json
import re
from pathlib import Path

import pytest

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl

pytestmark = pytest.mark.cluster

GO_MOD = Path(__file__).resolve().parents[3] / "tools" / "kubernetes" / "go.mod"


def test_the_server_reports_the_version_it_was_built_from(kubectl: Kubectl) -> None:
    version = json.loads(kubectl("version", "-o", "json", check=True).stdout)["serverVersion"]

    required = re.search(r"^require k8s.io/kubernetes (v.+)$", GO_MOD.read_text(), re.MULTILINE)
    assert required is not None
    assert version["gitVersion"] == required[1]
    assert version["gitVersion"].startswith(f"v{version['major']}.{version['minor']}.")


def test_a_fresh_namespace_admits_a_pod_without_any_controller(
    kubectl: Kubectl, namespace: str
) -> None:
    done = kubectl("run", "alone", "--image=none", "-n", namespace)

    assert done.returncode == 0, done.stderr
    found = kubectl("get", "pod", "alone", "-n", namespace, "-o", "jsonpath={.status.phase}")
    assert found.stdout == "Pending"


def test_a_user_may_do_only_what_rbac_grants(
    *,
    kubectl: Kubectl,
    control_plane: ControlPlane,
    assets: Assets,
    namespace: str,
    tmp_path: Path,
) -> None:
    kubeconfig = control_plane.user_kubeconfig("ada", ["readers"])
    as_ada = Kubectl(assets.tool("kubectl"), kubeconfig, tmp_path)
    assert "forbidden" in as_ada("get", "pods", "-n", namespace).stderr

    for what in (
        ("create", "role", "reader", "--verb=list", "--resource=pods"),
        ("create", "rolebinding", "readers", "--role=reader", "--group=readers"),
    ):
        kubectl(*what, "-n", namespace, check=True)

    assert "No resources found" in as_ada("get", "pods", "-n", namespace).stderr


def test_two_run_at_once_and_know_nothing_of_each_other(
    kubectl: Kubectl, namespace: str, assets: Assets, tmp_path: Path
) -> None:
    with ControlPlane(tmp_path / "second", assets, controllers=False) as second:
        other = Kubectl(assets.tool("kubectl"), second.kubeconfig, tmp_path / "cache")

        assert namespace in kubectl("get", "namespaces", "-o", "name").stdout
        assert namespace not in other("get", "namespaces", "-o", "name", check=True).stdout


def test_nothing_listens_after_it_was_left(assets: Assets, tmp_path: Path) -> None:
    with ControlPlane(tmp_path, assets, controllers=False) as started:
        children = list(started.children)
        host, port = started.server.removeprefix("https://").split(":")

    assert not any(child.is_running() for child in children)
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(host, int(port)).connect()
