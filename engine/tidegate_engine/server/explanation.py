"""Why a request is where it is: its place, its decisions, and who was put before it."""

from collections.abc import Sequence

from tidegate_engine.core.standings import Standing
from tidegate_engine.server.decision_ring import KEPT_DECISIONS, REFUSED, DecisionEntry
from tidegate_engine.server.error_codes import ErrorCode
from tidegate_engine.server.errors import ApiError
from tidegate_engine.server.service import Service

_LIVES_ON = frozenset({"admitted", "resumed", "held", "preempted"})
_RATE = "rate_limited"


async def explain(service: Service, name: str, *, namespace: str | None) -> dict[str, object]:
    """Describe the requests that `name` means.

    Args:
        service: Of the engine.
        name: The id of a response or of one of its choices, or what clients called their request:
            several may have done so.
        namespace: Only requests of tenants whose policies stand in it; None = all.

    Raises:
        ApiError: There is none, or it is longer gone than decisions are kept.
    """
    live = service.generations.request_ids(name)
    standings, now = await service.look(lambda book, now: (book.of(live, now), now))
    decided = service.decisions.newest(KEPT_DECISIONS, request_id=name)
    by_id: dict[str, list[DecisionEntry]] = {one.request_id: [] for one in standings}
    for entry in decided:
        by_id.setdefault(entry.request_id, []).append(entry)
    standing = {one.request_id: one for one in standings}
    found = [
        _describe(service, request_id, entries, standing=standing.get(request_id), now=now)
        for request_id, entries in by_id.items()
        if is_of(service, _tenant(standing.get(request_id), entries), namespace)
    ]
    if not found:
        raise ApiError(ErrorCode.REQUEST_NOT_FOUND, f"Nothing is known of a request {name!r} here.")
    return {"object": "explanation", "id": name, "requests": found}


def is_of(service: Service, tenant: str, namespace: str | None) -> bool:
    """Tell whether a tenant's policy stands in a namespace; None is all of them."""
    if namespace is None:
        return True
    rule = service.identities.rule_of(tenant)
    return rule is not None and rule.policy.partition("/")[0] == namespace


def describe_decision(
    service: Service, entry: DecisionEntry, *, hides_others: bool
) -> dict[str, object]:
    """Describe a decision; of other tenants than its own, only the tier may be told."""
    is_own = entry.beneficiary_tenant == entry.tenant
    names = {}
    if hides_others and not is_own:
        names = {"beneficiary": None, "beneficiary_tenant": None}
    return {
        **entry._asdict(),
        "time": service.date_of(entry.time),
        "beneficiary": entry.beneficiary or None,
        "beneficiary_tenant": entry.beneficiary_tenant or None,
        "beneficiary_tier": entry.beneficiary_tier or None,
        **names,
    }


def describe_standing(service: Service, standing: Standing, now: float) -> dict[str, object]:
    """Describe where a request stands; `now` is when it stood there."""
    ahead = standing.first_token_seconds
    waited = now - standing.queued_at
    return {
        "state": standing.phase.value,
        "tier": standing.tier,
        "queued_since": service.date_of(standing.queued_at),
        "position": standing.position,
        "waits_for": standing.waits_for,
        "reason": standing.reason,
        "first_token_in_seconds": None if ahead is None else round(ahead, 3),
        "predicted_ttft_seconds": None if ahead is None else round(waited + ahead, 3),
    }


def _tenant(standing: Standing | None, entries: Sequence[DecisionEntry]) -> str:
    return entries[0].tenant if standing is None else standing.tenant


def _describe(
    service: Service,
    request_id: str,
    entries: Sequence[DecisionEntry],
    *,
    standing: Standing | None,
    now: float,
) -> dict[str, object]:
    decisions = [describe_decision(service, entry, hides_others=True) for entry in entries]
    preempted = [
        {
            "time": decision["time"],
            "cause": decision["reason"],
            "request_id": decision["beneficiary"],
            "tenant": decision["beneficiary_tenant"],
            "tier": decision["beneficiary_tier"],
        }
        for decision in decisions
        if decision["verdict"] == "preempted"
    ]
    place = _ended(entries) if standing is None else describe_standing(service, standing, now)
    return {
        "id": request_id,
        "tenant": _tenant(standing, entries),
        **place,
        "preempted": preempted,
        "decisions": decisions,
    }


def _ended(entries: Sequence[DecisionEntry]) -> dict[str, object]:
    last = entries[-1]
    # Who is complete leaves without a decision.
    state = "finished" if last.verdict in _LIVES_ON else last.verdict
    is_over_rate = last.verdict == REFUSED and last.reason == _RATE
    return {
        "state": state,
        "tier": None,
        "queued_since": None,
        "position": None,
        "waits_for": "rate" if is_over_rate else None,
        "reason": None if state == "finished" else last.reason,
        "first_token_in_seconds": None,
        "predicted_ttft_seconds": None,
    }
