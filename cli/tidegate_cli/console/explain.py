"""Looks requests up through the operator, as `tidegate explain` does."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from tidegate_cli.cluster_access import ClusterError, opened
from tidegate_cli.console.requests import Json
from tidegate_cli.place import Place
from tidegate_cli.request_view import explain_request

Explain = Callable[[str], Awaitable[Sequence[Json]]]
"""Returns what all engines know of a request, by its id or by what its client called it.

Raises `ClusterError` where nobody knows it, or nobody can be asked.
"""


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
            raise ClusterError("There is no pool whose engines could know a request.")
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
