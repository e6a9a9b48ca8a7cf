"""Volumes of a pod: folders of this machine, bound to their paths in the container's own mounts.

What there is: emptyDir, secret, configMap, and the projected volume of the service account. Only
where pods have network namespaces, as both need root. Their content is written when a container
starts and not renewed while it runs.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate_devcluster import pod_environment
from tidegate_devcluster.api import Json
from tidegate_devcluster.pod_environment import ContainerConfigError

# Long enough that nothing has to renew it.
TOKEN_SECONDS = 24 * 3600

# $1, $2, $3 = folder, path, options; `--` ends them, and what follows is run.
_BIND = """
while [ "$1" != -- ]; do
  mkdir -p "$2" && mount -o "bind,$3" "$1" "$2" || exit 125
  shift 3
done
shift
exec "$@"
"""

Read = Callable[[str, str], Awaitable[Json | None]]
"""Returns the object of a kind ("secrets") and name in the pod's namespace; None = none."""

RequestToken = Callable[[Json], Awaitable[str]]
"""Returns a token of the pod's service account for the spec of a TokenRequest."""


@dataclass(frozen=True)
class Mount:
    """A folder and the path where the container sees it."""

    folder: Path
    path: str
    is_read_only: bool


class PodVolumes:
    """The volumes of one pod, under a folder that ends with it."""

    def __init__(self, folder: Path, pod: Json, *, read: Read, request_token: RequestToken) -> None:
        self._folder = folder
        self._pod = pod
        self._read = read
        self._request_token = request_token

    async def mounts(self, container: Json) -> list[Mount]:
        """Writes what the container mounts; outer paths come first.

        Raises:
            ContainerConfigError: A Secret or a ConfigMap, or a key in it, is missing.
        """
        volumes = {volume["name"]: volume for volume in self._pod["spec"].get("volumes", ())}
        found = []
        for mount in sorted(container.get("volumeMounts", ()), key=_path):
            volume = volumes[mount["name"]]
            folder = self._folder / mount["name"]
            folder.mkdir(parents=True, exist_ok=True)
            is_written = "emptyDir" not in volume
            if is_written:
                await self._fill(folder, volume)
            found.append(Mount(folder, mount["mountPath"], is_written))
        return found

    async def _fill(self, folder: Path, volume: Json) -> None:
        sources = volume["projected"]["sources"] if "projected" in volume else [volume]
        files: dict[str, str] = {}
        for source in sources:
            files |= await self._files(source)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, errors="surrogateescape")

    async def _files(self, source: Json) -> Mapping[str, str]:
        if "serviceAccountToken" in source:
            wish = source["serviceAccountToken"]
            spec = {
                "audiences": [wish["audience"]] if "audience" in wish else [],
                "expirationSeconds": TOKEN_SECONDS,
            }
            return {wish["path"]: await self._request_token(spec)}
        if "downwardAPI" in source:
            return {
                item["path"]: self._field(item["fieldRef"]["fieldPath"])
                for item in source["downwardAPI"]["items"]
            }
        if "secret" in source:
            spec = source["secret"]
            name = spec.get("secretName") or spec["name"]
            return _chosen(f"Secret {name!r}", spec, await self._secret(name))
        spec = source["configMap"]
        config_map = await self._read("configmaps", spec["name"])
        values = None if config_map is None else config_map.get("data") or {}
        return _chosen(f"ConfigMap {spec['name']!r}", spec, values)

    async def _secret(self, name: str) -> Mapping[str, str] | None:
        secret = await self._read("secrets", name)
        return None if secret is None else pod_environment.decoded(secret)

    def _field(self, path: str) -> str:
        return str(self._pod["metadata"][path.removeprefix("metadata.")])


def bind_command(mounts: Sequence[Mount]) -> list[str]:
    """Returns what makes the mounts for the command that follows it, and for nobody else."""
    if not mounts:
        return []
    triples = [
        part
        for mount in mounts
        for part in (str(mount.folder), mount.path, "ro" if mount.is_read_only else "rw")
    ]
    return ["unshare", "--mount", "sh", "-c", _BIND, "sh", *triples, "--"]


def unsupported(pod: Json, container: Json) -> str | None:
    """Names the first mount of the container that can't be made; None where there is none."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
    for mount in container.get("volumeMounts", ()):
        path, volume = mount["mountPath"], volumes.get(mount["name"], {})
        if not {"emptyDir", "secret", "configMap", "projected"} & set(volume):
            return f"volume mount {path}: only emptyDir, secret, configMap and projected volumes"
        if mount.keys() & {"subPath", "subPathExpr"}:
            return f"volume mount {path}: subPath is not supported"
        # The path has to be made on this machine where it is missing, and /run is empty at its
        # next start.
        if not Path(path).is_dir() and not os.path.realpath(path).startswith("/run/"):
            return f"volume mount {path}: the path must exist on this machine or be below /run"
    return None


def _path(mount: Json) -> str:
    return str(mount["mountPath"])


def _chosen(source: str, spec: Json, values: Mapping[str, str] | None) -> Mapping[str, str]:
    """Returns the files that a source gives, by path."""
    is_optional = bool(spec.get("optional"))
    if values is None:
        if is_optional:
            return {}
        raise ContainerConfigError("CreateContainerConfigError", f"volume: {source} not found")
    if "items" not in spec:
        return values
    missing = [item["key"] for item in spec["items"] if item["key"] not in values]
    if missing and not is_optional:
        raise ContainerConfigError(
            "CreateContainerConfigError", f"volume: {source} has no key {missing[0]!r}"
        )
    return {item["path"]: values[item["key"]] for item in spec["items"] if item["key"] in values}
