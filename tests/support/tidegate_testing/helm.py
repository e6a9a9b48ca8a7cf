"""The real Helm, and what the charts render."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tidegate_devcluster.assets import Tool
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl

Manifest = dict[str, Any]
Values = Mapping[str, Any]

CHARTS = Path(__file__).resolve().parents[3] / "charts"
CHART = CHARTS / "tidegate"
CRD_CHART = CHARTS / "tidegate-crds"
INSTALL_PAGE = CHARTS.parent / "docs" / "install.md"
DISASTER_PAGE = CHARTS.parent / "docs" / "disaster.md"


OPERATOR_NAMESPACE = "tidegate"
OPERATOR = "tidegate-operator"
OPERATOR_LEASE = f"{OPERATOR_NAMESPACE}/{OPERATOR}"
_RIGHTS = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}


class Helm:
    """Runs Helm with folders of its own; against a cluster where it is given one.

    Attributes:
        path: The program.
        environment: What it is run with.
    """

    def __init__(self, tool: Tool, home: Path, kubeconfig: Path | None = None) -> None:
        self.path = tool.path
        folders = ("CACHE", "CONFIG", "DATA")
        self.environment = os.environ | {
            f"HELM_{name}_HOME": str(home / name.lower()) for name in folders
        }
        self._kubeconfig = kubeconfig

    def __call__(
        self,
        *arguments: str,
        values: Values | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run it to the end; values go in by standard input."""
        own = [] if self._kubeconfig is None else [f"--kubeconfig={self._kubeconfig}"]
        given = [] if values is None else ["--values=-"]
        done = subprocess.run(
            [str(self.path), *arguments, *own, *given],
            input=json.dumps(values or {}),
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def render(
        self,
        chart: Path = CHART,
        *,
        values: Values | None = None,
        release: str = "tidegate",
        namespace: str = "tidegate",
        options: Sequence[str] = (),
    ) -> list[Manifest]:
        """Return the objects that a chart renders, hooks included."""
        done = self(
            *("template", release, str(chart), f"--namespace={namespace}"),
            *options,
            values=values,
        )
        return [found for found in yaml.safe_load_all(done.stdout) if found]


def written_commands(section: str, page: Path = INSTALL_PAGE) -> list[str]:
    """Return the commands under a heading of a page, in order."""
    text = page.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert text, f"{page} has no section {section!r}"
    # Only what is indented by four spaces is a command; files are in fences.
    outside = "".join(text.split("```")[::2])
    return [line.strip() for line in outside.splitlines() if line.startswith("    ")]


def only(objects: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """Return the one object of that kind and name."""
    (found,) = (one for one in objects if one["kind"] == kind and one["metadata"]["name"] == name)
    return found


def pod_specs(objects: Sequence[Manifest]) -> dict[str, Manifest]:
    """Return the specs of all pods that the objects make, by kind and name."""
    return {
        f"{one['kind']}/{one['metadata']['name']}": one["spec"]["template"]["spec"]
        for one in objects
        if one["kind"] in {"Deployment", "Job", "StatefulSet", "DaemonSet"}
    }


def listed(objects: Sequence[Manifest]) -> str:
    """Return the objects as one text for `kubectl -f -`."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


def acl_rules(objects: Sequence[Manifest], hashes: Mapping[str, str]) -> list[str]:
    """Return the users of the rendered Redis, each as after `user` in Redis' configuration.

    Args:
        objects: As rendered.
        hashes: SHA-256 of the password by user.
    """
    (redis,) = (spec for name, spec in pod_specs(objects).items() if name.endswith("-redis"))
    words: list[str] = redis["containers"][0]["args"]
    users: list[list[str]] = []
    for word in words:
        if word == "--user":
            users.append([])
        elif users:
            users[-1].append(word)
    rules = [" ".join(user) for user in users]
    for user, digest in hashes.items():
        rules = [rule.replace(f"$({user.upper()}_SHA256)", digest) for rule in rules]
    return rules


def operator_kubeconfig(
    control_plane: ControlPlane,
    kubectl: Kubectl,
    helm: Helm,
    *,
    namespace: str = OPERATOR_NAMESPACE,
    host: str | None = None,
    **operator: object,
) -> Path:
    """Write one of the chart's ServiceAccount, with the rights that the chart gives it alone.

    Args:
        control_plane: Signs it.
        kubectl: As administrator, to apply the rights.
        helm: Renders them.
        namespace: Of the release; made if need be.
        host: By which the API server is called, see `ControlPlane.user_kubeconfig`.
        operator: Values of the chart; without any, every Secret with API keys may be read.
    """
    values = {"operator": operator or {"apiKeyNamespaces": ["*"]}}
    rendered = helm.render(values=values, namespace=namespace)
    home = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    rights = [found for found in rendered if found["kind"] in _RIGHTS]
    kubectl("apply", "-f", "-", input=listed([home, *rights]), check=True)
    return control_plane.user_kubeconfig(
        f"system:serviceaccount:{namespace}:{OPERATOR}",
        ["system:serviceaccounts", f"system:serviceaccounts:{namespace}"],
        host=host,
    )
