"""Looks requests up: through the operator, as `tidegate explain` does, or as the operator does."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import aiohttp
from kubernetes.aio.config import ConfigException

from tidegate_cli.cluster_access import ClusterError, opened
from tidegate_cli.console.requests import Json
from tidegate_cli.place import Place
from tidegate_cli.request_view import explain_request
from tidegate_operator.explanations import ENGINE_SECONDS, Explanations, RefusedError
from tidegate_operator.kube import ApiError, KubeApi

Explain = Callable[[str], Awaitable[Sequence[Json]]]
"""Returns what all engines know of a request, by its id or by what its client called it.

Raises `ClusterError` where nobody knows it, or nobody can be asked.
"""

NO_POOL = "There is no pool whose engines could know a request."


class RequestLookup:
    """Asks the operator about the pools that are shown, each on behalf of its own namespace."""

    def __init__(
        self, pools: Callable[[], Sequence[str]], *, kubeconfig: Path | None, operator: str
    ) -> None:
        """Ask nobody yet.

        Args:
            pools: Returns `namespace/name` of each.
            kubeconfig: None = as kubectl finds it.
            operator: As in `Place`.
        """
        self._pools = pools
        self._kubeconfig = kubeconfig
        self._operator = operator

    async def __call__(self, request: str) -> Sequence[Json]:
        """Return what is known of a request, from the first namespace that knows it.

        Raises:
            ClusterError: None does; the message says what each said.
        """
        by_namespace: dict[str, list[str]] = {}
        for pool in self._pools():
            by_namespace.setdefault(pool.partition("/")[0], []).append(pool)
        if not by_namespace:
            raise ClusterError(NO_POOL)
        problems = []
        for namespace, pools in by_namespace.items():
            place = Place(kubeconfig=self._kubeconfig, namespace=namespace, operator=self._operator)
            try:
                async with opened(place) as cluster:
                    answer = await explain_request(cluster, quote(request, safe=""), pools=pools)
            except ClusterError as error:
                problems.append(str(error))
            else:
                found: Sequence[Json] = answer["requests"]
                return found
        raise ClusterError("; ".join(dict.fromkeys(problems)))


class EngineLookup:
    """Asks the engines of the pools that are shown, by the token of their admin API."""

    def __init__(
        self, pools: Callable[[], Sequence[str]], *, kubeconfig: Path | None, token_file: Path
    ) -> None:
        """Ask nobody yet.

        Args:
            pools: Returns `namespace/name` of each.
            kubeconfig: None = the service account of the pod.
            token_file: Holds the admin token of all engines; read anew each time.
        """
        self._pools = pools
        self._kubeconfig = kubeconfig
        self._token_file = token_file

    async def __call__(self, request: str) -> Sequence[Json]:
        """Return what is known of a request, from the first pool that knows it.

        Raises:
            ClusterError: None does; the message says what each said.
        """
        problems = []
        timeout = aiohttp.ClientTimeout(total=ENGINE_SECONDS)
        try:
            async with (
                KubeApi.connected(self._kubeconfig) as api,
                aiohttp.ClientSession(timeout=timeout) as session,
            ):
                engines = Explanations(api, session, engine_token_file=self._token_file)
                for pool in self._pools():
                    namespace, _, name = pool.partition("/")
                    try:
                        answer = await engines.explain(namespace, namespace, name, request)
                    except RefusedError as error:
                        problems.append(str(error))
                    else:
                        return cast("Sequence[Json]", cast("dict[str, Any]", answer)["requests"])
        except (ApiError, aiohttp.ClientError, ConfigException, OSError) as error:
            raise ClusterError(f"the engines can't be found or asked: {error}") from error
        raise ClusterError("; ".join(dict.fromkeys(problems)) or NO_POOL)
