"""The commands of docs/first-policy.md, as written: real operator, API server and kubectl."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tidegate_devcluster.kubectl import Kubectl
from tidegate_operator.verdicts import ConditionType, Reason
from tidegate_testing.operator_process import OperatorSetup, read, running_operator
from tidegate_testing.reporting_engine import ReportingEngine

PAGE = (Path(__file__).parents[2] / "docs" / "first-policy.md").read_text()


@pytest.mark.cluster
@pytest.mark.usefixtures("crds_installed")
def test_commands_of_the_page_make_a_policy_ready_change_it_and_show_it(
    kubectl: Kubectl,
    namespace: str,
    operator_setup: OperatorSetup,
    engines: list[ReportingEngine],  # noqa: ARG001
    tmp_path: Path,
) -> None:
    (policy,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "silver.yaml").write_text(policy)
    (tmp_path / "kubectl").symlink_to(kubectl.path)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "KUBECONFIG": str(kubectl.kubeconfig),
    }
    commands = re.findall(r"^    (\S.*)$", PAGE, re.MULTILINE)
    assert commands
    with running_operator(operator_setup):
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", command.replace("-n tidegate", f"-n {namespace}")],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert read(kubectl, "tp", "silver", namespace)["spec"]["weight"] == 100


def test_reasons_of_the_page_are_those_that_the_operator_writes() -> None:
    rows = re.findall(r"^\| `(\w+)`, `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows
    for condition, reason in rows:
        assert (ConditionType(condition).value, Reason(reason).value) == (condition, reason)
