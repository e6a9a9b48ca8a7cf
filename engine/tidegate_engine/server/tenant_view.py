"""What a tenant may see of this engine with its key: its own numbers and its own queue."""

from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from tidegate_engine.core.request import SchedulerStats, TenantStats
from tidegate_engine.core.standings import Line
from tidegate_engine.server.answers import QueueAnswer, UsageAnswer
from tidegate_engine.server.caller import Caller
from tidegate_engine.server.errors import InvalidApiKeyError
from tidegate_engine.server.explanation import describe_standing
from tidegate_engine.server.json_response import JsonResponse
from tidegate_engine.server.openapi import answers
from tidegate_engine.server.service import Service
from tidegate_engine.server.shared_call import SharedCall
from tidegate_policies.attainment import measured, num_counted
from tidegate_policies.rules import ServiceRule, TenantRule
from tidegate_policies.wire import Attainment, LatencyCounts

SHOWN_REQUESTS = 100
"""Requests of each tier in the answer to one who asks for its queue."""


def add_tenant_view(
    app: FastAPI, service: Service, identify: Callable[[Request], Awaitable[Caller]]
) -> None:
    """Add the routes; `identify` finds who calls."""
    lines = _Lines(service)

    async def rule_of(caller: Annotated[Caller, Depends(identify)]) -> TenantRule:
        rule = service.identities.rule_of(caller.tenant)
        if rule is None:
            # Strangers share a tenant, but not what they may know of each other.
            raise InvalidApiKeyError
        return rule

    @app.get("/v1/tidegate/usage", responses=answers(UsageAnswer, 400, 401, 403, 500, 503))
    async def usage(rule: Annotated[TenantRule, Depends(rule_of)]) -> Response:
        stats = await service.count()
        return JsonResponse(_describe_usage(service, rule, stats.scheduler))

    @app.get("/v1/tidegate/queue", responses=answers(QueueAnswer, 400, 401, 403, 500, 503))
    async def queue(rule: Annotated[TenantRule, Depends(rule_of)]) -> Response:
        line, now = await lines.of(rule.tenant)
        shown = [
            {"id": one.request_id, **describe_standing(service, one, now)} for one in line.first
        ]
        return JsonResponse(
            {"object": "list", "tenant": rule.tenant, "length": line.length, "data": shown}
        )


class _Lines:
    """Asks the engine for a tenant's queue, once for all of the tenant who ask meanwhile."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._asking: dict[str, SharedCall[tuple[Line, float]]] = {}

    async def of(self, tenant: str) -> tuple[Line, float]:
        """Return what waits, and the clock when it did."""
        asking = self._asking.get(tenant)
        if asking is None:
            asking = self._asking[tenant] = SharedCall(lambda: self._ask(tenant))
        return await asking()

    async def _ask(self, tenant: str) -> tuple[Line, float]:
        try:
            return await self._service.look(
                lambda book, now: (book.line(tenant, now, most=SHOWN_REQUESTS), now)
            )
        finally:
            del self._asking[tenant]


def _describe_usage(service: Service, rule: TenantRule, stats: SchedulerStats) -> dict[str, object]:
    tenant = rule.tenant
    own = stats.tenants.get(tenant, TenantStats())
    return {
        "object": "usage",
        "tenant": tenant,
        "tier": rule.tier,
        "weight": rule.weight,
        "requests": {
            "running": own.running,
            "waiting": own.waiting,
            "swapped": own.swapped,
            "finished": own.finished,
            "cancelled": own.cancelled,
            "expired": own.expired,
            "preempted": own.preempted,
            "shed": service.metrics.shed().get(tenant, 0),
        },
        "tokens": {
            "prompt": own.prompt_tokens,
            "cached": own.cached_tokens,
            "output": own.output_tokens,
            "recomputed": own.recomputed_tokens,
        },
        "kv": {
            "blocks": own.kv_used_blocks,
            "percent": _percent(own.kv_used_blocks, stats.kv_blocks),
            "borrowed_blocks": own.kv_borrowed_blocks,
            "nominal_percent": rule.kv_nominal_percent,
            "block_seconds": round(own.kv_seconds, 3),
        },
        "service": {
            "charged": own.service,
            "share_percent": _percent(own.service, _service_of_tier(service, rule, stats)),
        },
        "attainment": _describe_attainment(service, rule),
    }


def _service_of_tier(service: Service, rule: TenantRule, stats: SchedulerStats) -> float:
    """Return what all tenants whose own tier is the same have got, in cost units."""
    rules = service.board.in_force.snapshot.tenants if service.board.in_force else ()
    peers = (one.tenant for one in rules if one.tier == rule.tier)
    return sum(stats.tenants[name].service for name in peers if name in stats.tenants)


def _describe_attainment(service: Service, rule: TenantRule) -> dict[str, object] | None:
    window = service.levels.window(rule.tenant)
    found = None if window is None else window.attainment(service.clock())
    if found is None:
        return None
    return _attainment(found, rule.service)


def _attainment(found: Attainment, rule: ServiceRule) -> dict[str, object]:
    return {
        "window_seconds": rule.window_seconds,
        "requests": found.requests,
        "met": found.met,
        "percent": _percent(found.met, found.requests),
        "ttft": _latency(found.ttft, rule.ttft_percentile),
        "itl": _latency(found.itl, rule.itl_percentile),
    }


def _latency(counts: LatencyCounts | None, percentile: int) -> dict[str, object] | None:
    if counts is None:
        return None
    seconds = measured(counts, percentile)
    return {
        "target_seconds": counts.target_seconds,
        "percentile": percentile,
        # What never came has no length.
        "measured_seconds": None if seconds in {None, float("inf")} else seconds,
        "met_percent": _percent(counts.met, num_counted(counts)),
    }


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2) if whole else 0.0
