"""The user's cluster, as kubectl knows it: the API server, and the operator behind its proxy."""

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.config import (
    KUBE_CONFIG_DEFAULT_LOCATION,
    ConfigException,
    list_kube_config_contexts,
    load_kube_config,
)

from tidegate_cli.errors import CommandError
from tidegate_cli.place import Place
from tidegate_operator.explanations import AUDIENCE, TOKEN_HEADER
from tidegate_operator.kube import CUSTOM, ApiError, KubeApi
from tidegate_operator.resources import Resource

TOKEN_SECONDS = 600
"""How long a token for the operator is good; the API server gives none for less."""

_SERVICE_ACCOUNT = "default"
_PROBLEMS = (aiohttp.ClientError, TimeoutError, OSError)


class ClusterError(CommandError):
    """The cluster can't be asked, or refuses; the message says what is missing."""


class Cluster:
    """One cluster, seen from one namespace.

    Attributes:
        namespace: The one asked for, else that of the kubeconfig's context.
    """

    def __init__(self, api: KubeApi, *, namespace: str, operator: str) -> None:
        """Wrap an open API.

        Args:
            api: As the user.
            namespace: To look from.
            operator: As in `Place`.
        """
        self.namespace = namespace
        self._api = api
        self._operator = operator

    async def objects(self, model: type[Resource], *, everywhere: bool) -> list[dict[str, Any]]:
        """Return all objects of a kind, in the namespace or in all, by namespace and name.

        Raises:
            ClusterError: They can't be listed.
        """
        watched = next(kind for kind in CUSTOM if kind.model is model)
        scopes = () if everywhere else (self.namespace,)
        try:
            found: list[dict[str, Any]] = await self._api.list_objects(watched, scopes)
        except ApiError as error:
            where = "all namespaces" if everywhere else f"namespace {self.namespace!r}"
            raise ClusterError(_listing_problem(error, watched.plural, where)) from error
        except _PROBLEMS as error:
            raise ClusterError(f"the API server can't be reached: {error}") from error
        return sorted(found, key=lambda one: _place_of(one["metadata"]))

    async def ask_operator(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the operator's answer, asked on behalf of the namespace.

        Raises:
            ClusterError: There is none, or it says no.
        """
        headers = {TOKEN_HEADER: await self._token()}
        if "://" in self._operator:
            return await self._ask_at(self._operator.rstrip("/") + path, query, headers)
        namespace, _, service = self._operator.partition("/")
        if not service:
            message = f"--operator {self._operator!r} is neither NAMESPACE/SERVICE:PORT nor a URL"
            raise ClusterError(message)
        proxied = f"/api/v1/namespaces/{namespace}/services/{service}/proxy{path}"
        try:
            answer = await self._api.request(
                "GET", proxied, query=list(query.items()), headers=headers
            )
        except ApiError as error:
            raise ClusterError(self._proxy_problem(error)) from error
        except _PROBLEMS as error:
            raise ClusterError(f"the API server can't be reached: {error}") from error
        found: dict[str, Any] = answer
        return found

    async def _ask_at(
        self, url: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=30)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(url, params=query, headers=headers) as answer,
            ):
                content = await answer.text()
                if answer.status >= 400:
                    raise ClusterError(_message_in(content))
                found: dict[str, Any] = await answer.json()
                return found
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ClusterError(f"no operator answers at {self._operator}: {error}") from error

    async def _token(self) -> str:
        """Make a token that says no more than that we may work in the namespace."""
        account = f"serviceaccounts/{_SERVICE_ACCOUNT}"
        path = f"/api/v1/namespaces/{self.namespace}/{account}/token"
        spec = {"audiences": [AUDIENCE], "expirationSeconds": TOKEN_SECONDS}
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        try:
            answer = await self._api.request("POST", path, body=body)
        except ApiError as error:
            if error.status == 403:
                why = "your rights don't let you create one (verb create on serviceaccounts/token)"
            elif error.status == 404:
                why = f"there is no such namespace, or no ServiceAccount {_SERVICE_ACCOUNT!r} in it"
            else:
                why = str(error)
            message = f"no token for namespace {self.namespace!r}, by which the operator knows us:"
            raise ClusterError(f"{message} {why}") from error
        except _PROBLEMS as error:
            raise ClusterError(f"the API server can't be reached: {error}") from error
        return str(answer["status"]["token"])

    def _proxy_problem(self, error: ApiError) -> str:
        where = f"operator {self._operator}"
        if error.answer.startswith('{"error"'):
            return _message_in(error.answer)
        if error.status == 403:
            return f"{where}: your rights don't reach it (verb get on services/proxy)"
        if error.status in {404, 503}:
            why = f"no such Service, or nothing behind it ({_status_message(error.answer)})"
            return f"{where}: {why}; name it by --operator"
        return f"{where}: {error}"


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[Cluster]:
    """Open the user's cluster for the length of the block.

    Raises:
        ClusterError: There is no kubeconfig, or it makes no sense.
    """
    configuration = client.Configuration()
    _check_kubeconfig(place)
    file = None if place.kubeconfig is None else str(place.kubeconfig)
    try:
        await load_kube_config(  # type: ignore[no-untyped-call]
            file, context=place.context, client_configuration=configuration
        )
        contexts, current = list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
    except (ConfigException, OSError) as error:
        message = f"the kubeconfig can't be used: {error}"
        raise ClusterError(message) from error
    named = {one["name"]: one for one in contexts}
    context = current if place.context is None else named[place.context]
    namespace = place.namespace or context["context"].get("namespace") or "default"
    api = KubeApi(configuration)
    try:
        yield Cluster(api, namespace=namespace, operator=place.operator)
    finally:
        await api.close()


def _check_kubeconfig(place: Place) -> None:
    """Complain by ourselves where there is no file: the library would also print."""
    names = KUBE_CONFIG_DEFAULT_LOCATION.split(os.pathsep)
    files = [place.kubeconfig] if place.kubeconfig is not None else list(map(Path, names))
    if not any(file.expanduser().is_file() for file in files):
        tried = ", ".join(map(str, files))
        raise ClusterError(f"no kubeconfig: there is no {tried}; set KUBECONFIG, or --kubeconfig")


def _place_of(metadata: Mapping[str, Any]) -> tuple[str, str]:
    return metadata.get("namespace", ""), metadata["name"]


def _listing_problem(error: ApiError, plural: str, where: str) -> str:
    if error.status == 404:
        return f"this cluster has no {plural}: Tidegate's custom resources are not installed"
    if error.status == 403:
        return f"your rights don't let you list {plural} in {where}"
    return str(error)


def _message_in(content: str) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content.strip() or "an empty answer"


def _status_message(content: str) -> str:
    """Return what the API server says in a Status, or the text as it is."""
    try:
        return str(json.loads(content)["message"])
    except (ValueError, KeyError, TypeError):
        return content.strip()
