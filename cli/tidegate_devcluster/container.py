"""One container of a pod: a process, restarted as its pod's policy says."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from tidegate_devcluster.api import Json
from tidegate_devcluster.network import PodPlace
from tidegate_devcluster.pod_environment import ContainerConfigError
from tidegate_devcluster.probes import Probe, probe_of
from tidegate_devcluster.processes import Lifeline

FIRST_BACK_OFF_SECONDS = 1.0
LONGEST_BACK_OFF_SECONDS = 30.0
# Who has run this long starts again without the waits of earlier crashes.
FORGIVEN_AFTER_SECONDS = 60.0
LEAST_GRACE_SECONDS = 2.0
# A missing Secret or ConfigMap is looked for again so often.
CONFIG_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Launch:
    """What a container is started with; made anew for each start."""

    command: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Surroundings:
    """What a container gets from its pod.

    Attributes:
        launch: Gives the command and variables, or raises ContainerConfigError.
        on_change: Called whenever the container's status has changed.
    """

    place: PodPlace
    folder: Path
    log: Path
    restart_policy: str
    grace_seconds: float
    launch: Callable[[], Awaitable[Launch]]
    on_change: Callable[[], None]
    lifeline: Lifeline
    session: aiohttp.ClientSession


@dataclass
class ContainerState:
    """What the pod's status says of a container."""

    name: str
    image: str
    state: Json = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Json = field(default_factory=dict)
    is_ready: bool = False
    is_started: bool = False
    restart_count: int = 0
    container_id: str = ""

    def to_json(self) -> Json:
        """Returns the entry of status.containerStatuses."""
        return {
            "name": self.name,
            "image": self.image,
            "imageID": "",
            "containerID": self.container_id,
            "ready": self.is_ready,
            "started": self.is_started,
            "restartCount": self.restart_count,
            "state": self.state,
            "lastState": self.last_state,
        }


class BackOff:
    """Waits between restarts that double with each crash."""

    def __init__(self) -> None:
        self._next_seconds = FIRST_BACK_OFF_SECONDS

    def after(self, up_seconds: float) -> float:
        """Returns the wait in seconds after a run of this length."""
        if up_seconds >= FORGIVEN_AFTER_SECONDS:
            self._next_seconds = FIRST_BACK_OFF_SECONDS
        wait = self._next_seconds
        self._next_seconds = min(2 * wait, LONGEST_BACK_OFF_SECONDS)
        return wait


class Container:
    """Runs one container until it has ended for good."""

    def __init__(self, spec: Json, surroundings: Surroundings) -> None:
        self._spec = spec
        self._around = surroundings
        self._stopping = asyncio.Event()
        self._group: int | None = None
        self._grace_seconds = surroundings.grace_seconds
        self.state = ContainerState(spec["name"], spec["image"])

    @property
    def has_ended(self) -> bool:
        """Whether the last run is over."""
        return "terminated" in self.state.state

    @property
    def exit_code(self) -> int | None:
        """Exit code of the last run when it is over; 128 and the signal's number if killed."""
        code: int | None = self.state.state.get("terminated", {}).get("exitCode")
        return code

    async def run(self) -> None:
        """Starts it, again and again as the policy says, until it has ended or was stopped.

        Leaves no process when cancelled.
        """
        back_off = BackOff()
        while not self._stopping.is_set():
            try:
                launch = await self._around.launch()
                process = await self._start(launch)
            except ContainerConfigError as error:
                self._wait_for(error.reason, str(error))
                await self._pause(CONFIG_RETRY_SECONDS)
                continue
            began = asyncio.get_running_loop().time()
            code = await self._supervise(process)
            self._note_end(code)
            if self._stopping.is_set() or not self._is_restarted(code):
                return
            wait = back_off.after(asyncio.get_running_loop().time() - began)
            self.state.last_state = self.state.state
            self._wait_for("CrashLoopBackOff", f"back-off {wait:g}s restarting {self.state.name}")
            await self._pause(wait)
            self.state.restart_count += 1

    def stop(self, grace_seconds: float) -> None:
        """Ends it for good: SIGTERM, the grace, SIGKILL; `run` returns after that.

        A second call without grace cuts the first one's grace short.
        """
        self._grace_seconds = grace_seconds
        self._stopping.set()
        if grace_seconds <= 0 and self._group is not None:
            _signal_group(self._group, signal.SIGKILL)

    async def _start(self, launch: Launch) -> asyncio.subprocess.Process:
        around = self._around
        around.log.parent.mkdir(parents=True, exist_ok=True)
        with around.log.open("ab") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *around.place.prefix,
                    *launch.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    cwd=self._spec.get("workingDir") or around.folder,
                    env=dict(launch.environment),
                    start_new_session=True,
                )
            except OSError as error:
                raise ContainerConfigError("RunContainerError", str(error)) from error
        around.lifeline.watch_group(process.pid)
        self._group = process.pid
        return process

    async def _supervise(self, process: asyncio.subprocess.Process) -> int:
        self.state.state = {"running": {"startedAt": timestamp()}}
        self.state.container_id = f"proc://{process.pid}"
        probes = asyncio.create_task(self._probe())
        stopping = asyncio.create_task(self._stopping.wait())
        end = asyncio.create_task(process.wait())
        try:
            self._around.on_change()
            await asyncio.wait({probes, stopping, end}, return_when=asyncio.FIRST_COMPLETED)
            if probes.done():
                probes.result()
            if not end.done():
                await self._end(process)
            return await end
        finally:
            probes.cancel()
            stopping.cancel()
            # Its children may outlive it; on cancellation it lives itself.
            _signal_group(process.pid, signal.SIGKILL)
            await asyncio.shield(end)
            self._around.lifeline.forget_group(process.pid)
            self._group = None

    async def _probe(self) -> None:
        """Keeps readiness up to date; returns when the container has to be restarted."""
        startup, readiness, liveness = (
            probe_of(self._spec, kind, self._around.place)
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        )
        if startup is not None and not await self._first_verdict(startup):
            return
        self.state.is_started = True
        self.state.is_ready = readiness is None
        self._around.on_change()
        ready = asyncio.create_task(self._follow_readiness(readiness))
        try:
            await self._until_dead(liveness)
        finally:
            ready.cancel()

    async def _first_verdict(self, probe: Probe) -> bool:
        async for passed in probe.verdicts(self._around.session):
            return passed
        return False

    async def _follow_readiness(self, probe: Probe | None) -> None:
        if probe is None:
            return
        async for passed in probe.verdicts(self._around.session):
            self.state.is_ready = passed
            self._around.on_change()

    async def _until_dead(self, probe: Probe | None) -> None:
        if probe is None:
            await asyncio.Event().wait()
            return
        async for passed in probe.verdicts(self._around.session):
            if not passed:
                return

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        pause = min(self._pre_stop_seconds(), self._grace_seconds)
        if pause > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), pause)
        # What the hook takes is part of the grace; like a real kubelet, this one leaves a moment.
        grace = max(self._grace_seconds - pause, min(self._grace_seconds, LEAST_GRACE_SECONDS))
        if grace > 0 and process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace)
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGKILL)

    def _pre_stop_seconds(self) -> float:
        hook = self._spec.get("lifecycle", {}).get("preStop", {})
        return float(hook.get("sleep", {}).get("seconds", 0))

    def _is_restarted(self, code: int) -> bool:
        policy = self._around.restart_policy
        return policy == "Always" or (policy == "OnFailure" and code != 0)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _wait_for(self, reason: str, message: str) -> None:
        self.state.state = {"waiting": {"reason": reason, "message": message}}
        self.state.is_ready = self.state.is_started = False
        self._around.on_change()

    def _note_end(self, code: int) -> None:
        terminated = {
            "exitCode": code if code >= 0 else 128 - code,
            "reason": "Completed" if code == 0 else "Error",
            "startedAt": self.state.state["running"]["startedAt"],
            "finishedAt": timestamp(),
            "containerID": self.state.container_id,
        }
        if code < 0:
            terminated["signal"] = -code
        self.state.state = {"terminated": terminated}
        self.state.is_ready = self.state.is_started = False
        self._around.on_change()


def timestamp() -> str:
    """Returns the present time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
