"""One pod: its place, its containers, its status in the API, and its end."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tidegate_devcluster import pod_environment, pod_status, pod_support, pod_volumes
from tidegate_devcluster.api import Json, KubernetesApi
from tidegate_devcluster.container import (
    Container,
    ContainerState,
    Launch,
    Surroundings,
    timestamp,
)
from tidegate_devcluster.errors import ApiError, NetworkError
from tidegate_devcluster.network import PodNetwork, PodPlace
from tidegate_devcluster.pod_environment import ContainerConfigError, Sources
from tidegate_devcluster.pod_volumes import PodVolumes
from tidegate_devcluster.processes import Lifeline
from tidegate_devcluster.progress import Progress

PORT_MAP_ANNOTATION = "devcluster.tidegate.io/port-map"
RETRY_SECONDS = 0.5
NOT_FOUND, CONFLICT = 404, 409
# The server understood and will never take it.
REFUSED = frozenset({400, 422})


@dataclass(frozen=True)
class Node:
    """What the pods of one node share.

    Attributes:
        root: Folder of logs (`logs/NAMESPACE/POD/CONTAINER.log`) and of the pods' own folders.
        images: Command line by image name.
        environment: Variables of every container, under its own.
        tell: Told what the API refuses.
    """

    name: str
    root: Path
    images: Mapping[str, Sequence[str]]
    environment: Mapping[str, str]
    api: KubernetesApi
    network: PodNetwork
    lifeline: Lifeline
    session: aiohttp.ClientSession
    tell: Progress


class Pod:
    """Runs one pod from its binding to its end in the API."""

    def __init__(self, pod: Json, node: Node) -> None:
        self._pod = pod
        self._node = node
        metadata = pod["metadata"]
        self.uid: str = metadata["uid"]
        self._path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        self._is_gone = False
        self._ending = asyncio.Event()
        self._changed = asyncio.Event()
        self._conditions = pod_status.Conditions()
        self._written: Json | None = None
        self._started_at = timestamp()
        self._containers: list[Container] = []
        self.place: PodPlace | None = None
        self.update(pod)

    def update(self, pod: Json) -> None:
        """Takes the pod as the API has it now; begins its end where it is being deleted."""
        self._pod = pod
        self._changed.set()
        if "deletionTimestamp" in pod["metadata"]:
            self._ending.set()

    def abandon(self) -> None:
        """The API has it no more: ends it without grace and without a status."""
        self._is_gone = True
        self._ending.set()
        self._stop_containers()

    async def run(self) -> None:
        """Runs the pod until it is gone; leaves neither process nor place, also when cancelled."""
        folder = self._node.root / "pods" / self.uid
        folder.mkdir(parents=True, exist_ok=True)
        try:
            place = await self._attach()
            if place is not None:
                try:
                    await self._run_at(place, folder)
                finally:
                    await asyncio.shield(self._node.network.detach(place))
            if not self._is_gone:
                await self._remove_from_api()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _attach(self) -> PodPlace | None:
        ports = [
            int(port["containerPort"])
            for container in self._pod["spec"]["containers"]
            for port in container.get("ports", ())
        ]
        while not self._ending.is_set():
            try:
                return await self._node.network.attach(ports)
            except NetworkError as error:
                await self._write(self._status_without_place(str(error)))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), RETRY_SECONDS)
        return None

    async def _run_at(self, place: PodPlace, folder: Path) -> None:
        self.place = place
        self._containers = [
            Container(spec, self._surroundings(spec, place, folder))
            for spec in self._pod["spec"]["containers"]
        ]
        # A fault in one of these ends the group, and so the pod, loudly.
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(container.run()) for container in self._containers]
            writer = group.create_task(self._write_status())
            await self._publish_ports(place)
            await self._ending.wait()
            self._stop_containers()
            await asyncio.gather(*runs)
            writer.cancel()
        if not self._is_gone:
            await self._write_once()

    def _surroundings(self, spec: Json, place: PodPlace, folder: Path) -> Surroundings:
        metadata, node = self._pod["metadata"], self._node
        logs = node.root / "logs" / metadata["namespace"] / metadata["name"]
        return Surroundings(
            place=place,
            folder=folder,
            log=logs / f"{spec['name']}.log",
            restart_policy=self._pod["spec"].get("restartPolicy", "Always"),
            grace_seconds=float(self._pod["spec"].get("terminationGracePeriodSeconds", 30)),
            launch=lambda: self._launch(spec, place, folder),
            on_change=self._changed.set,
            lifeline=node.lifeline,
            session=node.session,
        )

    async def _launch(self, spec: Json, place: PodPlace, folder: Path) -> Launch:
        missing = pod_support.unsupported(self._pod, has_mounts=bool(place.prefix))
        if missing is not None:
            raise ContainerConfigError("CreateContainerConfigError", missing)
        config_maps, secrets = pod_environment.named_sources(spec)
        sources = Sources(
            config_maps={
                name: found.get("data") or {}
                for name in sorted(config_maps)
                if (found := await self._source("configmaps", name)) is not None
            },
            secrets={
                name: pod_environment.decoded(found)
                for name in sorted(secrets)
                if (found := await self._source("secrets", name)) is not None
            },
            place=place,
            host_ip=self._node.network.host_address,
        )
        own = pod_environment.environment(spec, self._pod, sources)
        common = {**self._node.environment, "HOME": str(folder), "TMPDIR": str(folder)}
        return Launch(
            command=[
                *(await self._bind_command(spec, folder) if place.prefix else ()),
                *pod_environment.command(spec, self._node.images, own),
            ],
            environment={**common, **own},
        )

    async def _bind_command(self, spec: Json, folder: Path) -> list[str]:
        volumes = PodVolumes(
            folder / "volumes", self._pod, read=self._source, request_token=self._token
        )
        return pod_volumes.bind_command(await volumes.mounts(spec))

    async def _token(self, spec: Json) -> str:
        account = self._pod["spec"]["serviceAccountName"]
        namespace = self._path.rpartition("/pods/")[0]
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        try:
            made = await self._node.api.create(
                f"{namespace}/serviceaccounts/{account}/token", request
            )
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            raise ContainerConfigError("CreateContainerConfigError", str(error)) from error
        return str(made["status"]["token"])

    async def _source(self, kind: str, name: str) -> Json | None:
        path = f"{self._path.rpartition('/pods/')[0]}/{kind}/{name}"
        try:
            return await self._node.api.get(path)
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise ContainerConfigError("CreateContainerConfigError", str(error)) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ContainerConfigError("CreateContainerConfigError", str(error)) from error

    def _stop_containers(self) -> None:
        grace = 0.0 if self._is_gone else self._pod["metadata"].get("deletionGracePeriodSeconds", 0)
        for container in self._containers:
            container.stop(float(grace))

    async def _publish_ports(self, place: PodPlace) -> None:
        if place.ports:
            annotations = {PORT_MAP_ANNOTATION: json.dumps(place.ports)}
            await self._send(self._path, {"metadata": {"annotations": annotations}})

    async def _write_status(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._write_once()

    async def _write_once(self) -> None:
        if self.place is None:
            return
        await self._write(self._status(self.place))

    async def _write(self, status: Json) -> None:
        if status != self._written:
            await self._send(f"{self._path}/status", {"status": status})
            self._written = status

    def _status_without_place(self, message: str) -> Json:
        waiting = {"waiting": {"reason": "ContainerCreating", "message": message}}
        states = [
            ContainerState(spec["name"], spec["image"], state=waiting)
            for spec in self._pod["spec"]["containers"]
        ]
        return {"phase": "Pending", "containerStatuses": [state.to_json() for state in states]}

    def _status(self, place: PodPlace) -> Json:
        host = self._node.network.host_address
        metadata, spec = self._pod["metadata"], self._pod["spec"]
        return {
            "observedGeneration": metadata.get("generation", 0),
            "phase": pod_status.phase(self._containers, spec.get("restartPolicy", "Always")),
            "conditions": self._conditions.update(pod_status.verdicts(self._containers)),
            "containerStatuses": [container.state.to_json() for container in self._containers],
            "hostIP": host,
            "hostIPs": [{"ip": host}],
            "podIP": place.ip,
            "podIPs": [{"ip": place.ip}],
            "startTime": self._started_at,
        }

    async def _send(self, path: str, body: Json) -> None:
        """Patches this very pod; another one of its name is left alone.

        Tries again whatever may pass, and gives up, telling it, on what the API refuses.
        """
        body = {**body, "metadata": {**body.get("metadata", {}), "uid": self.uid}}
        while not self._is_gone:
            try:
                await self._node.api.patch(path, body)
            except ApiError as error:
                if error.status in REFUSED:
                    self._node.tell(f"kubelet: {error}")
                    return
                if error.status in {NOT_FOUND, CONFLICT}:
                    return
            except (aiohttp.ClientError, TimeoutError):
                pass
            else:
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _remove_from_api(self) -> None:
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        while not self._is_gone:
            try:
                await self._node.api.delete(self._path, options)
            except ApiError as error:
                if error.status in {NOT_FOUND, CONFLICT}:
                    return
            except (aiohttp.ClientError, TimeoutError):
                pass
            else:
                return
            await asyncio.sleep(RETRY_SECONDS)
