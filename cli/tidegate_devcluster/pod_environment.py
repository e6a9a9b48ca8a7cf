"""What a container is started with: its variables and its command line, as Kubernetes has them."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate_devcluster.api import Json
from tidegate_devcluster.errors import DevClusterError
from tidegate_devcluster.network import PodPlace

REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_.-][A-Za-z0-9_.-]*)\))")


class ContainerConfigError(DevClusterError):
    """A container can't be started as it is declared.

    Attributes:
        reason: As in the container's waiting state, for example ErrImagePull.
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


@dataclass(frozen=True)
class Sources:
    """What variables may be taken from.

    Attributes:
        config_maps: Values of the ConfigMaps that the pod names and that exist.
        secrets: The same for Secrets, decoded.
        host_ip: Address of the node.
    """

    config_maps: Mapping[str, Mapping[str, str]]
    secrets: Mapping[str, Mapping[str, str]]
    place: PodPlace
    host_ip: str


def named_sources(container: Json) -> tuple[set[str], set[str]]:
    """Returns the names of the ConfigMaps and of the Secrets that the container's env names."""
    config_maps: set[str] = set()
    secrets: set[str] = set()
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            config_maps.add(source["configMapRef"]["name"])
        if "secretRef" in source:
            secrets.add(source["secretRef"]["name"])
    for variable in container.get("env", ()):
        value_from = variable.get("valueFrom", {})
        if "configMapKeyRef" in value_from:
            config_maps.add(value_from["configMapKeyRef"]["name"])
        if "secretKeyRef" in value_from:
            secrets.add(value_from["secretKeyRef"]["name"])
    return config_maps, secrets


def decoded(secret: Json) -> dict[str, str]:
    """Returns a Secret's values as text."""
    values = secret.get("data") or {}
    return {
        key: base64.b64decode(value).decode(errors="surrogateescape")
        for key, value in values.items()
    }


def environment(container: Json, pod: Json, sources: Sources) -> dict[str, str]:
    """Returns the container's variables.

    Where the place maps ports (pods on loopback), a variable named PORT or *_PORT whose value is
    a declared container port gets the real port: declare the port in such a variable and pass it
    as $(NAME), and the same manifest runs in either network.

    Raises:
        ContainerConfigError: A Secret, a ConfigMap or a key in it is missing.
    """
    variables: dict[str, str] = {"HOSTNAME": pod["metadata"]["name"]}
    for source in container.get("envFrom", ()):
        prefix = source.get("prefix", "")
        for key, value in _all_of(source, sources).items():
            variables[prefix + key] = value
    for declared in container.get("env", ()):
        name = declared["name"]
        if "valueFrom" in declared:
            found = _value_from(name, declared["valueFrom"], pod, sources)
            if found is not None:
                variables[name] = found
        else:
            value = expanded(declared.get("value", ""), variables)
            variables[name] = _real_port(name, value, sources.place)
    return variables


def command(
    container: Json, images: Mapping[str, Sequence[str]], variables: Mapping[str, str]
) -> list[str]:
    """Returns the command line: the image's or the container's `command`, then its `args`.

    Raises:
        ContainerConfigError: The image isn't in the table.
    """
    image = container["image"]
    if image not in images:
        known = ", ".join(sorted(images)) or "none"
        raise ContainerConfigError(
            "ErrImagePull",
            f"image {image!r} is not in this cluster's image table; it has: {known}",
        )
    entry_point = container.get("command")
    if entry_point is None:
        first = list(images[image])
    else:
        first = [expanded(part, variables) for part in entry_point]
    return first + [expanded(part, variables) for part in container.get("args", ())]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Replaces $(NAME) by the variable; an unknown one stays, and $$ is a dollar sign."""

    def replacement(found: re.Match[str]) -> str:
        if found[1] == "$":
            return "$"
        return variables.get(found[2], found[0])

    return REFERENCE.sub(replacement, text)


def _all_of(source: Json, sources: Sources) -> Mapping[str, str]:
    if "configMapRef" in source:
        kind, reference, known = "ConfigMap", source["configMapRef"], sources.config_maps
    else:
        kind, reference, known = "Secret", source["secretRef"], sources.secrets
    if reference["name"] in known:
        return known[reference["name"]]
    if reference.get("optional"):
        return {}
    raise ContainerConfigError(
        "CreateContainerConfigError", f"envFrom: {kind} {reference['name']!r} not found"
    )


def _value_from(variable: str, source: Json, pod: Json, sources: Sources) -> str | None:
    if "fieldRef" in source:
        return _field(variable, source["fieldRef"]["fieldPath"], pod, sources)
    if "secretKeyRef" in source:
        kind, reference, known = "Secret", source["secretKeyRef"], sources.secrets
    elif "configMapKeyRef" in source:
        kind, reference, known = "ConfigMap", source["configMapKeyRef"], sources.config_maps
    else:
        raise _config_error(variable, f"{', '.join(source)} is not supported")
    values = known.get(reference["name"])
    if values is not None and reference["key"] in values:
        return values[reference["key"]]
    if reference.get("optional"):
        return None
    what = "not found" if values is None else f"has no key {reference['key']!r}"
    raise _config_error(variable, f"{kind} {reference['name']!r} {what}")


def _field(variable: str, path: str, pod: Json, sources: Sources) -> str:
    subscript = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if subscript is not None:
        return str(pod["metadata"].get(subscript[1], {}).get(subscript[2], ""))
    fields = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"]["namespace"],
        "metadata.uid": pod["metadata"]["uid"],
        "spec.nodeName": pod["spec"]["nodeName"],
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", ""),
        "status.hostIP": sources.host_ip,
        "status.podIP": sources.place.bind_ip,
        "status.podIPs": sources.place.bind_ip,
    }
    if path not in fields:
        raise _config_error(variable, f"fieldRef {path!r} is not supported")
    return str(fields[path])


def _real_port(name: str, value: str, place: PodPlace) -> str:
    if (name == "PORT" or name.endswith("_PORT")) and value.isdecimal():
        return str(place.ports.get(int(value), value))
    return value


def _config_error(variable: str, what: str) -> ContainerConfigError:
    return ContainerConfigError("CreateContainerConfigError", f"env {variable}: {what}")
