"""The few requests of the API that the kubelet and the proxy need, on plain JSON."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import yaml

from tidegate_devcluster.errors import ApiError

Json = dict[str, Any]

STRATEGIC_MERGE = "application/strategic-merge-patch+json"
MERGE = "application/merge-patch+json"
# The server ends each watch after this; a dead connection is noticed soon after.
WATCH_SECONDS = 240
RETRY_SECONDS = 0.5
GONE = 410


@dataclass(frozen=True)
class Listing:
    """All objects there are: what isn't among them is gone, though no event said so."""

    items: list[Json]


@dataclass(frozen=True)
class Change:
    """One object was added or modified (`is_gone` false), or deleted."""

    item: Json
    is_gone: bool


class KubernetesApi:
    """Requests as the user of a kubeconfig; an async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig

    async def __aenter__(self) -> KubernetesApi:
        content = yaml.safe_load(self._kubeconfig.read_text())
        self._server = content["clusters"][0]["cluster"]["server"]
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=_tls(content), limit=0),
            timeout=aiohttp.ClientTimeout(total=30.0),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._session.close()

    @property
    def port(self) -> int:
        """The server's port."""
        return int(self._server.rpartition(":")[2])

    async def get(self, path: str, parameters: Mapping[str, str] | None = None) -> Json:
        """Returns the object or list at the path.

        Raises:
            ApiError: The server refused; so for every method here.
        """
        return await self._request("GET", path, parameters=parameters)

    async def create(self, path: str, body: Json) -> Json:
        """Posts the body to a collection."""
        return await self._request("POST", path, body=body)

    async def patch(self, path: str, body: Json) -> Json:
        """Applies a strategic merge patch; lists with merge keys are merged, not replaced."""
        return await self._request("PATCH", path, body=body, content_type=STRATEGIC_MERGE)

    async def merge(self, path: str, body: Json) -> Json:
        """Applies a JSON merge patch, the one that custom resources take."""
        return await self._request("PATCH", path, body=body, content_type=MERGE)

    async def text(self, path: str) -> str:
        """Returns what is served there as it is, for example `/metrics`."""
        async with self._session.get(self._server + path) as answer:
            await _raise_for_status("GET", path, answer)
            return await answer.text()

    async def delete(self, path: str, options: Json) -> Json:
        """Deletes an object under DeleteOptions."""
        return await self._request("DELETE", path, body=options)

    async def follow(
        self, path: str, parameters: Mapping[str, str] | None = None
    ) -> AsyncIterator[Listing | Change]:
        """Yields a listing, then changes; a new listing whenever changes may have been missed.

        Never ends and raises nothing: what fails is tried again, so that a restart of the API
        server passes by.
        """
        while True:
            try:
                listed = await self.get(path, parameters)
                yield Listing(listed["items"])
                version = listed["metadata"]["resourceVersion"]
                async for change in self._watch(path, parameters or {}, version):
                    yield change
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError, ValueError):
                await asyncio.sleep(RETRY_SECONDS)

    async def _watch(
        self, path: str, parameters: Mapping[str, str], version: str
    ) -> AsyncIterator[Change]:
        while True:
            query = {
                **parameters,
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": version,
                "timeoutSeconds": str(WATCH_SECONDS),
            }
            timeout = aiohttp.ClientTimeout(total=None, sock_read=WATCH_SECONDS + 30.0)
            async with self._session.get(
                self._server + path, params=query, timeout=timeout
            ) as answer:
                await _raise_for_status("GET", path, answer)
                try:
                    async for line in _lines(answer.content):
                        event = json.loads(line)
                        item = event["object"]
                        if event["type"] == "ERROR":
                            raise _watch_error(path, item)
                        version = item["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            yield Change(item, is_gone=event["type"] == "DELETED")
                finally:
                    # Otherwise TLS says goodbye in the background, longer than the session lives.
                    if answer.connection is not None and answer.connection.transport is not None:
                        answer.connection.transport.abort()

    async def _request(
        self,
        method: str,
        path: str,
        *,
        parameters: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        async with self._session.request(
            method,
            self._server + path,
            params=parameters,
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": content_type} if body is not None else None,
        ) as answer:
            await _raise_for_status(method, path, answer)
            received: Json = await answer.json()
            return received


def _watch_error(path: str, status: Json) -> ApiError:
    return ApiError(
        "WATCH",
        path,
        status.get("code", GONE),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
    )


async def _raise_for_status(method: str, path: str, answer: aiohttp.ClientResponse) -> None:
    if answer.ok:
        return
    text = await answer.text()
    try:
        status = json.loads(text)
    except ValueError:
        status = {"message": text}
    raise ApiError(
        method,
        path,
        answer.status,
        reason=status.get("reason", ""),
        message=status.get("message", ""),
    )


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    # StreamReader.readline refuses long lines, and objects may be up to 1.5 MB.
    unread = b""
    async for piece in content.iter_any():
        *lines, unread = (unread + piece).split(b"\n")
        for line in lines:
            yield line


def _tls(kubeconfig: Json) -> ssl.SSLContext:
    authority = base64.b64decode(kubeconfig["clusters"][0]["cluster"]["certificate-authority-data"])
    user = kubeconfig["users"][0]["user"]
    tls = ssl.create_default_context(cadata=authority.decode())
    # The ssl module reads a client's certificate from files alone.
    with tempfile.NamedTemporaryFile() as file:
        for part in ("client-certificate-data", "client-key-data"):
            file.write(base64.b64decode(user[part]))
        file.flush()
        tls.load_cert_chain(file.name)
    return tls
