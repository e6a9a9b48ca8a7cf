"""The admin API of one engine: for operators, on a port of its own, with a token.

A drain that is begun here is never undone: the engine finishes what it has, refuses everything new,
and then stays as it is, so that whoever began it finds an engine to ask; a restart inside the same
pod would be ready again at once. It exits with SIGTERM, as ever.
"""

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, TypeVar

from fastapi import Depends, FastAPI
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.server.answers import (
    DecisionsAnswer,
    DrainAnswer,
    ExplanationAnswer,
    PolicyAnswer,
)
from tidegate_engine.server.caller import header_of
from tidegate_engine.server.decision_ring import KEPT_DECISIONS
from tidegate_engine.server.edge import edged_app
from tidegate_engine.server.errors import InvalidAdminTokenError, from_validation
from tidegate_engine.server.explanation import describe_decision, explain, is_of
from tidegate_engine.server.identity import AUTHORIZATION_HEADER, bearer_key
from tidegate_engine.server.json_response import JsonResponse
from tidegate_engine.server.openapi import answers, describe_bodies
from tidegate_engine.server.service import Service
from tidegate_policies.snapshot import PolicySnapshot

DEFAULT_DECISIONS = 100
"""Decisions in an answer that asks for no number of them."""


_Query = TypeVar("_Query", bound=BaseModel)


class _Wish(BaseModel):
    """Which decisions are wanted."""

    model_config = ConfigDict(extra="forbid")

    request_id: str | None = None
    tenant: str | None = None
    namespace: str | None = None
    limit: Annotated[int, Field(ge=1, le=KEPT_DECISIONS)] = DEFAULT_DECISIONS


class _View(BaseModel):
    """As whom a request is looked at."""

    model_config = ConfigDict(extra="forbid")

    namespace: str | None = None


def create_admin_app(service: Service, *, token: str) -> FastAPI:
    """Build the admin API over `service`.

    Args:
        service: Also served by the API proper.
        token: What callers present as `Authorization: Bearer TOKEN`.
    """
    app = edged_app("Tidegate engine, admin", service.clock)
    guarded = [Depends(_guard(token))]

    @app.get("/admin/policy", dependencies=guarded, responses=answers(PolicyAnswer, 400, 401))
    async def policy() -> Response:
        return JsonResponse(_describe_policy(service, service.board.in_force))

    @app.post("/admin/drain", dependencies=guarded, responses=answers(DrainAnswer, 400, 401))
    async def drain() -> Response:
        service.generations.begin_drain()
        running = len(service.generations.running_ids)
        return JsonResponse({"draining": True, "running": running, "drained": running == 0})

    @app.get(
        "/admin/decisions",
        dependencies=guarded,
        responses=answers(DecisionsAnswer, 400, 401),
        openapi_extra={"parameters": _query_parameters(_Wish)},
    )
    async def decisions(request: Request) -> Response:
        wish = _query(_Wish, request)
        found = service.decisions.newest(
            wish.limit,
            request_id=wish.request_id,
            tenant=wish.tenant,
            counts=lambda tenant: is_of(service, tenant, wish.namespace),
        )
        hides_others = wish.namespace is not None
        data = [describe_decision(service, entry, hides_others=hides_others) for entry in found]
        return JsonResponse({"object": "list", "data": data})

    @app.get(
        "/admin/requests/{request_id}",
        dependencies=guarded,
        responses=answers(ExplanationAnswer, 400, 401, 404, 500),
        openapi_extra={"parameters": _query_parameters(_View)},
    )
    async def request(request_id: str, request: Request) -> Response:
        view = _query(_View, request)
        return JsonResponse(await explain(service, request_id, namespace=view.namespace))

    describe_bodies(app, {})
    return app


def _guard(token: str) -> Callable[[Request], Awaitable[None]]:
    expected = token.encode()

    async def check(request: Request) -> None:
        given = bearer_key(header_of(request, AUTHORIZATION_HEADER))
        # In constant time, or its duration would tell how much of a guess is right.
        if not hmac.compare_digest(given, expected):
            raise InvalidAdminTokenError

    return check


def _query(shape: type[_Query], request: Request) -> _Query:
    try:
        return shape.model_validate(dict(request.query_params))
    except ValidationError as error:
        raise from_validation(error) from error


def _query_parameters(shape: type[BaseModel]) -> list[dict[str, object]]:
    schemas = shape.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in schemas.items()]


def _describe_policy(service: Service, policy: PolicyInForce | None) -> dict[str, object]:
    if policy is None:
        return {"revision": 0, "digest": "", "step": 0, "since": None, "snapshot": None}
    return {
        "revision": policy.revision,
        "digest": policy.digest,
        "step": policy.step,
        "since": service.date_of(policy.at),
        "snapshot": _summarise(policy.snapshot),
    }


def _summarise(snapshot: PolicySnapshot) -> dict[str, object]:
    return {
        "batching": asdict(snapshot.batching),
        "watermarks": asdict(snapshot.watermarks),
        "kv_estimate": snapshot.kv_estimate,
        "unknown_tenants": snapshot.unknown_tenants.action,
        "tiers": [asdict(tier) for tier in snapshot.tiers],
        "tenants": [
            {
                "tenant": rule.tenant,
                "policy": rule.policy,
                "tier": rule.tier,
                "weight": rule.weight,
                "kv_nominal_percent": rule.kv_nominal_percent,
                "stop": rule.stop,
            }
            for rule in snapshot.tenants
        ],
    }
