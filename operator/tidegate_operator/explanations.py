"""Tells people why requests wait: asks the engines, whose admin ports nobody else may reach.

Who asks is known by a short-lived token of a ServiceAccount, made for this purpose alone: whoever
may create one in a namespace may know what concerns that namespace. In a pool's own one that is
everything; elsewhere it is the requests of the tenants whose policies stand there, and of others
only their tiers. The token is good for nothing else, so that it may travel through the API server's
proxy, which takes away what it was itself asked with.

Any replica answers, the leader or not: all that is needed is read anew.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web
from pydantic import ValidationError

from tidegate_operator.kube import PODS, POOLS, ApiError, KubeApi
from tidegate_operator.resources.fields import LabelSelector
from tidegate_operator.selectors import selector_text

_LOG = logging.getLogger(__name__)

TOKEN_HEADER = "X-Tidegate-Token"
AUDIENCE = "tidegate.io"
ADMIN_PORT = "admin"
"""Name of the container port of the admin API in an engine's pod."""

ENGINE_SECONDS = 5.0
"""How long an engine may take to answer: it does at the end of a step."""

MAX_ASKING = 16
"""Questions that are worked on at a time."""

_USER_PREFIX = "system:serviceaccount:"
_DECISION_QUERY = ("tenant", "request_id", "limit")


@dataclass(frozen=True, slots=True)
class Engine:
    """Where an engine's admin API answers."""

    pod: str
    url: str


class RefusedError(Exception):
    """A question gets no answer.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    """What the engines of a pool said.

    Attributes:
        found: JSON by pod, of those that know something.
        unreachable: Why, by pod.
    """

    found: Mapping[str, Any]
    unreachable: Mapping[str, str]


class Explanations:
    """Finds the engines of pools and asks them on behalf of namespaces."""

    def __init__(
        self, api: KubeApi, session: aiohttp.ClientSession, *, engine_token_file: Path
    ) -> None:
        """Ask nobody yet.

        Args:
            api: To find pods, and to learn whose a token is.
            session: To ask engines.
            engine_token_file: Holds the admin token of the engines; read anew each time.
        """
        self._api = api
        self._session = session
        self._engine_token_file = engine_token_file

    async def namespace_of(self, token: str) -> str:
        """Return the namespace that a token speaks for.

        Raises:
            RefusedError: It is nobody's, or was made for something else.
        """
        problem = (
            f"{TOKEN_HEADER} holds no valid token of a ServiceAccount for the audience {AUDIENCE!r}"
        )
        if not token:
            raise RefusedError(401, problem)
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        path = "/apis/authentication.k8s.io/v1/tokenreviews"
        status = (await self._api.request("POST", path, body=body)).get("status", {})
        user = status.get("user", {}).get("username", "")
        is_ours = status.get("authenticated") and AUDIENCE in status.get("audiences", ())
        if not is_ours or not user.startswith(_USER_PREFIX):
            raise RefusedError(401, problem)
        return str(user.removeprefix(_USER_PREFIX).partition(":")[0])

    async def engines(self, namespace: str, pool: str) -> list[Engine]:
        """Return the engines of a pool that have an address, by the names of their pods.

        Raises:
            RefusedError: There is no such pool.
        """
        try:
            found = await self._api.request(
                "GET", f"{POOLS.path(namespace)}/{quote(pool, safe='')}"
            )
            selector = LabelSelector.model_validate(found["spec"]["selector"])
            query = [("labelSelector", selector_text(selector))]
            pods = await self._api.request("GET", PODS.path(namespace), query=query)
        except (ApiError, ValidationError) as error:
            if isinstance(error, ApiError) and error.status not in {403, 404}:
                raise
            message = f"this operator serves no EnginePool {namespace}/{pool}"
            raise RefusedError(404, message) from error
        engines = [engine for pod in pods["items"] if (engine := _engine(pod)) is not None]
        return sorted(engines, key=lambda engine: engine.pod)

    async def ask(
        self, engines: Sequence[Engine], path: str, query: Mapping[str, str]
    ) -> EngineAnswers:
        """Ask all engines the same; one that knows nothing (404) is left out."""
        token = (await asyncio.to_thread(self._engine_token_file.read_text)).strip()
        headers = {"Authorization": f"Bearer {token}"}
        found: dict[str, Any] = {}
        unreachable: dict[str, str] = {}

        async def ask_one(engine: Engine) -> None:
            url = engine.url + path
            try:
                async with self._session.get(url, params=query, headers=headers) as answer:
                    if answer.status == 404:
                        return
                    if answer.status == 400:
                        raise RefusedError(400, (await answer.json())["error"]["message"])
                    answer.raise_for_status()
                    found[engine.pod] = await answer.json()
            except (aiohttp.ClientError, TimeoutError) as error:
                unreachable[engine.pod] = str(error) or type(error).__name__

        await asyncio.gather(*map(ask_one, engines))
        return EngineAnswers(found, unreachable)

    async def explain(self, scope: str, namespace: str, pool: str, request: str) -> object:
        """Return what all engines of a pool know of a request.

        Args:
            scope: The namespace that asks.
            namespace: Of the pool.
            pool: Its name.
            request: An id, or what its client calls it.

        Raises:
            RefusedError: Nothing is known of it.
        """
        engines = await self.engines(namespace, pool)
        path = f"/admin/requests/{quote(request, safe='')}"
        answers = await self.ask(engines, path, _view(scope, namespace))
        requests = [
            {"engine": pod, **one}
            for pod, answer in sorted(answers.found.items())
            for one in answer["requests"]
        ]
        if not requests:
            raise _unknown(request, f"{namespace}/{pool}", engines, answers)
        return {
            "pool": f"{namespace}/{pool}",
            "id": request,
            "requests": requests,
            "unreachable": answers.unreachable,
        }

    async def decisions(
        self, scope: str, namespace: str, pool: str, query: Mapping[str, str]
    ) -> object:
        """Return the newest decisions of all engines of a pool, the oldest first."""
        engines = await self.engines(namespace, pool)
        answers = await self.ask(engines, "/admin/decisions", {**query, **_view(scope, namespace)})
        decisions = [
            {"engine": pod, **one}
            for pod, answer in answers.found.items()
            for one in answer["data"]
        ]
        decisions.sort(key=lambda one: (one["time"], one["engine"]))
        limit = int(query.get("limit", len(decisions)))
        return {
            "pool": f"{namespace}/{pool}",
            "decisions": decisions[-limit:] if decisions else [],
            "unreachable": answers.unreachable,
        }


@asynccontextmanager
async def serving_explanations(
    api: KubeApi, *, engine_token_file: Path, host: str, port: int
) -> AsyncIterator[None]:
    """Serve `/explain/…` and `/decisions/…` for the length of the block."""
    timeout = aiohttp.ClientTimeout(total=ENGINE_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        explanations = Explanations(api, session, engine_token_file=engine_token_file)
        runner = web.AppRunner(_app(explanations), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            yield
        finally:
            await runner.cleanup()


def _app(explanations: Explanations) -> web.Application:
    asking = asyncio.Semaphore(MAX_ASKING)

    async def answer(
        request: web.Request, find: Callable[[str], Awaitable[object]]
    ) -> web.Response:
        try:
            async with asking:
                scope = await explanations.namespace_of(request.headers.get(TOKEN_HEADER, ""))
                return web.json_response(await find(scope))
        except RefusedError as error:
            return _refusal(error.status, str(error))
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            _LOG.warning("the API server can't be asked: %s", error)
            return _refusal(502, "the operator can't ask the API server")
        except OSError as error:
            _LOG.error("the engines' admin token can't be read: %s", error)
            return _refusal(500, "the operator has no admin token of the engines")

    async def explain(request: web.Request) -> web.Response:
        part = request.match_info
        return await answer(
            request,
            lambda scope: explanations.explain(
                scope, part["namespace"], part["pool"], part["request"]
            ),
        )

    async def decisions(request: web.Request) -> web.Response:
        part = request.match_info
        query = {name: request.query[name] for name in _DECISION_QUERY if name in request.query}
        return await answer(
            request,
            lambda scope: explanations.decisions(scope, part["namespace"], part["pool"], query),
        )

    app = web.Application()
    app.add_routes(
        [
            web.get("/explain/{namespace}/{pool}/{request}", explain),
            web.get("/decisions/{namespace}/{pool}", decisions),
        ]
    )
    return app


def _view(scope: str, namespace: str) -> dict[str, str]:
    """Return the query by which engines show no more than the namespace that asks may see."""
    return {} if scope == namespace else {"namespace": scope}


def _engine(pod: Mapping[str, Any]) -> Engine | None:
    address = pod.get("status", {}).get("podIP")
    ports = [
        port["containerPort"]
        for container in pod["spec"]["containers"]
        for port in container.get("ports") or ()
        if port.get("name") == ADMIN_PORT
    ]
    if not address or not ports:
        return None
    host = f"[{address}]" if ":" in address else address
    return Engine(pod["metadata"]["name"], f"http://{host}:{ports[0]}")


def _unknown(
    request: str, pool: str, engines: Sequence[Engine], answers: EngineAnswers
) -> RefusedError:
    if answers.unreachable:
        problems = "; ".join(f"{pod}: {why}" for pod, why in sorted(answers.unreachable.items()))
        message = f"no engine of {pool} that answers knows a request {request!r}; {problems}"
        return RefusedError(502, message)
    if not engines:
        message = f"pool {pool} has no pod with an address and a container port {ADMIN_PORT!r}"
        return RefusedError(404, message)
    return RefusedError(404, f"no engine of {pool} knows a request {request!r} of yours")


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
