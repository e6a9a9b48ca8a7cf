"""The API server, raw: lists objects as JSON and applies status.

Answers are kept as plain JSON: the typed client's models are slow in bulk and refuse objects that
lack a field which they require.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from inspect import isawaitable
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import orjson
from kubernetes.aio import client
from kubernetes.aio.config import load_incluster_config, load_kube_config

from tidegate_operator.resources import (
    API_VERSION,
    GROUP,
    KINDS,
    VERSION,
    EnginePool,
    Resource,
    WorkloadKind,
)

FIELD_MANAGER = "tidegate"
API_KEYS_LABEL = "tidegate.io/api-keys"

REQUEST_TIMEOUT_SECONDS = 30.0
PAGE_SIZE = 500
WATCH_SECONDS = 290
WATCH_SILENCE_SECONDS = 90.0
"""The server sends a bookmark about once a minute: a stream that is silent for longer is dead."""

_NOT_FOUND = 404
_JSON = "application/json"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A kind of object that the operator reads.

    Attributes:
        model: Of the operator's own kinds; None for Kubernetes' own.
        label_selector: Only these objects; empty = all.
    """

    group: str
    version: str
    plural: str
    is_namespaced: bool = True
    model: type[Resource] | None = None
    label_selector: str = ""

    def path(self, namespace: str | None = None) -> str:
        """Return the path under which the objects are listed."""
        prefix = f"/apis/{self.group}" if self.group else "/api"
        scope = f"/namespaces/{namespace}" if namespace and self.is_namespaced else ""
        return f"{prefix}/{self.version}{scope}/{self.plural}"


CUSTOM = tuple(
    Watched(
        group=GROUP,
        version=VERSION,
        plural=model.definition.plural,
        is_namespaced=model.definition.is_namespaced,
        model=model,
    )
    for model in KINDS
)
POOLS = next(watched for watched in CUSTOM if watched.model is EnginePool)
PODS = Watched(group="", version="v1", plural="pods")
NAMESPACES = Watched(group="", version="v1", plural="namespaces", is_namespaced=False)
SECRETS = Watched(group="", version="v1", plural="secrets", label_selector=f"{API_KEYS_LABEL}=true")
WORKLOADS = {
    kind: Watched(group="apps", version="v1", plural=f"{kind.lower()}s") for kind in WorkloadKind
}
WATCHED = (*CUSTOM, NAMESPACES, SECRETS, PODS)


class ApiError(Exception):
    """The API server refused a request.

    Attributes:
        status: The HTTP status.
        answer: What it said.
    """

    def __init__(self, status: int, request: str, answer: str) -> None:
        super().__init__(f"{request}: HTTP {status}: {answer}")
        self.status = status
        self.answer = answer


@dataclass(frozen=True, slots=True)
class Login:
    """What kopf needs in order to reach the same API server with the same identity."""

    server: str
    ca_path: str | None
    certificate_path: str | None
    private_key_path: str | None
    token: str | None
    is_insecure: bool


class KubeApi:
    """One connection pool to the API server."""

    def __init__(self, configuration: client.Configuration) -> None:
        self._client = client.ApiClient(configuration)

    @classmethod
    @asynccontextmanager
    async def connected(cls, kubeconfig: Path | None) -> AsyncIterator[Self]:
        """Open connections for the length of the block."""
        api = cls(await _configuration(kubeconfig))
        try:
            yield api
        finally:
            await api.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def list_objects(self, watched: Watched, namespaces: Sequence[str]) -> list[Any]:
        """Return all objects of a kind as JSON.

        Args:
            watched: The kind.
            namespaces: Only those in these; empty = all.

        Raises:
            ApiError: With status 404 where the kind is not served.
        """
        scopes: Sequence[str | None] = namespaces if watched.is_namespaced else ()
        found: list[Any] = []
        for scope in scopes or (None,):
            found += await self._list(watched.path(scope), watched.label_selector)
        return found

    async def apply_status(self, model: type[Resource], metadata: Any, status: Any) -> None:  # noqa: ANN401
        """Make `status` the whole of what this operator says about an object.

        Args:
            model: Its kind.
            metadata: `name`, and `namespace` where it has one. The API server checks no uid here:
                an object that took the name just now gets the status, until a sweep notices.
            status: JSON.

        Raises:
            ApiError: With status 404 when there is no such object.
        """
        watched = next(kind for kind in CUSTOM if kind.model is model)
        path = f"{watched.path(metadata.get('namespace'))}/{quote(metadata['name'])}/status"
        body = {
            "apiVersion": API_VERSION,
            "kind": model.definition.kind,
            "metadata": metadata,
            "status": status,
        }
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        await self.request("PATCH", path, query=query, body=body, content_type=_APPLY)

    async def apply(self, watched: Watched, manifest: Any) -> None:  # noqa: ANN401
        """Make an object what `manifest` says of it, creating it if need be.

        Raises:
            ApiError: The API server refused.
        """
        metadata = manifest["metadata"]
        path = f"{watched.path(metadata['namespace'])}/{quote(metadata['name'])}"
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        await self.request("PATCH", path, query=query, body=manifest, content_type=_APPLY)

    async def read(self, watched: Watched, namespace: str, name: str) -> Any:  # noqa: ANN401
        """Return one namespaced object as JSON.

        Raises:
            ApiError: With status 404 when there is no such object.
        """
        return await self.request("GET", f"{watched.path(namespace)}/{quote(name)}")

    async def set_replicas(
        self, watched: Watched, namespace: str, name: str, replicas: int
    ) -> None:
        """Have a workload scaled, and own its replicas from then on.

        Raises:
            ApiError: With status 404 when there is no such object.
        """
        body = {
            "apiVersion": "autoscaling/v1",
            "kind": "Scale",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"replicas": replicas},
        }
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        path = f"{watched.path(namespace)}/{quote(name)}/scale"
        await self.request("PATCH", path, query=query, body=body, content_type=_APPLY)

    async def give_replicas(self, namespace: str, pool: str, replicas: int) -> None:
        """Set the replicas of an EnginePool that has none; what has none can't be applied to.

        Raises:
            ApiError: With status 404 when there is no such pool, 409 when somebody else wrote it
                just now, and may have scaled it.
        """
        found = await self.read(POOLS, namespace, pool)
        if found["spec"].get("replicas") is not None:
            return
        path = f"{POOLS.path(namespace)}/{quote(pool)}/scale"
        seen = {"resourceVersion": found["metadata"]["resourceVersion"]}
        body = {"metadata": seen, "spec": {"replicas": replicas}}
        query = [("fieldManager", FIELD_MANAGER)]
        await self.request("PATCH", path, query=query, body=body, content_type=_MERGE)

    async def annotate(
        self, watched: Watched, namespace: str, name: str, annotations: Mapping[str, str | None]
    ) -> None:
        """Set annotations of an object; None removes one.

        Raises:
            ApiError: With status 404 when there is no such object.
        """
        path = f"{watched.path(namespace)}/{quote(name)}"
        body = {"metadata": {"annotations": dict(annotations)}}
        query = [("fieldManager", FIELD_MANAGER)]
        await self.request("PATCH", path, query=query, body=body, content_type=_MERGE)

    async def delete(self, watched: Watched, namespace: str, name: str) -> None:
        """Delete an object, unless it is gone.

        Raises:
            ApiError: The API server refused.
        """
        try:
            await self.request("DELETE", f"{watched.path(namespace)}/{quote(name)}")
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise

    async def list_metadata(self, watched: Watched, namespaces: Sequence[str]) -> list[Any]:
        """Return the metadata of all objects of a namespaced kind, without what is in them.

        Raises:
            ApiError: The API server refused.
        """
        found: list[Any] = []
        for scope in namespaces or (None,):
            path = watched.path(scope)
            found += await self._list(path, watched.label_selector, accept=_METADATA)
        return [item["metadata"] for item in found]

    async def version_of(self, watched: Watched, namespace: str | None) -> str:
        """Return the version of the collection, from which a watch can begin.

        Raises:
            ApiError: The API server refused.
        """
        answer = await self.request("GET", watched.path(namespace), query=[("limit", "1")])
        return str(answer["metadata"]["resourceVersion"])

    async def watch(
        self, watched: Watched, namespace: str | None, version: str
    ) -> AsyncIterator[Any]:
        """Yield the events after `version` as JSON, `type` and `object`, until the server ends it.

        Raises:
            ApiError: The API server refused.
        """
        path = watched.path(namespace)
        query = [
            ("watch", "1"),
            ("resourceVersion", version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(WATCH_SECONDS)),
            *([("labelSelector", watched.label_selector)] if watched.label_selector else []),
        ]
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=5.0, sock_read=WATCH_SILENCE_SECONDS
        )
        response = await self._send("GET", path, query=query, timeout=timeout)
        async with response.response as stream:
            if stream.status >= 400:
                raise ApiError(stream.status, f"GET {path}", await stream.text())
            async for line in stream.content:
                yield orjson.loads(line)

    async def _list(self, path: str, label_selector: str, *, accept: str = _JSON) -> list[Any]:
        items: list[Any] = []
        position = ""
        while True:
            query = [("limit", str(PAGE_SIZE))]
            query += [("labelSelector", label_selector)] if label_selector else []
            query += [("continue", position)] if position else []
            answer = await self.request("GET", path, query=query, accept=accept)
            items += answer["items"] or ()  # null where there is no metadata to list
            position = answer["metadata"].get("continue") or ""
            if not position:
                return items

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: object = None,
        content_type: str = _JSON,
        accept: str = _JSON,
        headers: Mapping[str, str] | None = None,
    ) -> Any:  # noqa: ANN401
        """Send one request and return the answer's JSON; `headers` are further ones.

        Raises:
            ApiError: The API server refused.
            aiohttp.ClientError: The connection failed.
        """
        response = await self._send(
            method,
            path,
            query=query,
            body=body,
            content_type=content_type,
            accept=accept,
            headers=headers,
        )
        content = await response.read()
        if response.status >= 400:
            raise ApiError(response.status, f"{method} {path}", content.decode(errors="replace"))
        return orjson.loads(content)

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]],
        body: object = None,
        content_type: str = _JSON,
        accept: str = _JSON,
        headers: Mapping[str, str] | None = None,
        timeout: float | aiohttp.ClientTimeout = REQUEST_TIMEOUT_SECONDS,
    ) -> Any:  # noqa: ANN401
        request = await self._client.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params={"Accept": accept, "Content-Type": content_type, **(headers or {})},
            body=body,
            auth_settings=["BearerToken"],
        )
        return await self._client.call_api(*request, _request_timeout=timeout)


async def login(kubeconfig: Path | None) -> Login:
    """Read the credentials anew, as tokens expire."""
    configuration = await _configuration(kubeconfig)
    header: Any = configuration.get_api_key_with_prefix("BearerToken")
    if isawaitable(header):
        header = await header
    return Login(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        token=header.split()[-1] if header else None,
        is_insecure=not configuration.verify_ssl,
    )


async def _configuration(kubeconfig: Path | None) -> client.Configuration:
    configuration = client.Configuration()
    if kubeconfig is None:
        load_incluster_config(configuration)  # type: ignore[no-untyped-call]
    else:
        await load_kube_config(  # type: ignore[no-untyped-call]
            str(kubeconfig), client_configuration=configuration
        )
    return configuration
