"""A pod's status from the state of its containers, without I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate_devcluster.api import Json
from tidegate_devcluster.container import Container, timestamp


def phase(containers: Sequence[Container], restart_policy: str) -> str:
    """Returns status.phase."""
    if all(container.has_ended for container in containers) and restart_policy != "Always":
        failed = any(container.exit_code for container in containers)
        return "Failed" if failed else "Succeeded"
    unstarted = [
        container
        for container in containers
        if "waiting" in container.state.state and not container.state.last_state
    ]
    return "Pending" if unstarted else "Running"


class Conditions:
    """A pod's conditions, each with the time when it last changed."""

    def __init__(self) -> None:
        self._known: dict[str, Json] = {}

    def update(self, verdicts: Mapping[str, bool]) -> list[Json]:
        """Returns the conditions by these verdicts; an unchanged one keeps its time."""
        for kind, holds in verdicts.items():
            status = "True" if holds else "False"
            if self._known.get(kind, {}).get("status") != status:
                self._known[kind] = {
                    "type": kind,
                    "status": status,
                    "lastTransitionTime": timestamp(),
                }
        return [dict(condition) for condition in self._known.values()]


def verdicts(containers: Sequence[Container]) -> dict[str, bool]:
    """Returns what holds of a pod that has its place."""
    are_ready = all(container.state.is_ready for container in containers)
    return {
        "PodReadyToStartContainers": True,
        "Initialized": True,
        "ContainersReady": are_ready,
        "Ready": are_ready,
    }
