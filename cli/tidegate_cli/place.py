"""Where a command looks: which cluster, which namespace, which operator."""

from dataclasses import dataclass
from pathlib import Path

OPERATOR = "tidegate/tidegate-operator:explain"
"""Namespace, Service and port of an operator that was installed as the guide says."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a command looks.

    Attributes:
        kubeconfig: None = as kubectl finds it.
        context: Of the kubeconfig; None = its current one.
        namespace: None = that of the context.
        operator: `NAMESPACE/SERVICE:PORT`, or the URL of one that runs outside the cluster.
    """

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    operator: str = OPERATOR
