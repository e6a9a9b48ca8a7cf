"""Verdicts on objects, and how they become the conditions in their status.

Conditions are JSON objects as the API server stores them, because they are compared with what is
stored: equal means that nothing is written.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]

MAX_MESSAGE_CHARACTERS = 4096


class ConditionType(enum.StrEnum):
    """The conditions that the operator writes, in the order in which they are judged."""

    ACCEPTED = "Accepted"
    RESOLVED_REFS = "ResolvedRefs"
    PROGRAMMED = "Programmed"
    SERVICE_LEVEL_MET = "ServiceLevelMet"
    DEGRADED = "Degraded"
    READY = "Ready"


class Reason(enum.StrEnum):
    """Why a condition has its status."""

    ACCEPTED = "Accepted"
    INVALID = "Invalid"
    NAMESPACE_NOT_ALLOWED = "NamespaceNotAllowed"
    TENANT_CONFLICT = "TenantConflict"
    TOO_MANY_TENANTS = "TooManyTenants"
    QUOTA_OVERSUBSCRIBED = "QuotaOversubscribed"
    KEY_CONFLICT = "KeyConflict"
    TIER_CONFLICT = "TierConflict"
    REPLICAS_CONFLICT = "ReplicasConflict"

    RESOLVED_REFS = "ResolvedRefs"
    POOL_NOT_FOUND = "PoolNotFound"
    TIER_NOT_FOUND = "TierNotFound"
    PREEMPTION_POLICY_NOT_FOUND = "PreemptionPolicyNotFound"
    SERVICE_LEVEL_NOT_FOUND = "ServiceLevelNotFound"
    SECRET_NOT_FOUND = "SecretNotFound"
    SECRET_KEY_NOT_FOUND = "SecretKeyNotFound"
    WORKLOAD_NOT_FOUND = "WorkloadNotFound"

    PROGRAMMED = "Programmed"
    PENDING = "Pending"
    ENGINES_LAGGING = "EnginesLagging"
    NO_ENGINES = "NoEngines"
    ENGINE_REFUSED = "EngineRefused"

    SERVICE_LEVEL_MET = "ServiceLevelMet"
    MISSED = "Missed"

    POLICY_CURRENT = "PolicyCurrent"
    REDIS_UNREACHABLE = "RedisUnreachable"

    READY = "Ready"


# A policy with one of these flaws has no rule in the snapshot; the other flaws cost it a part.
OUT_OF_FORCE = frozenset(
    {
        Reason.INVALID,
        Reason.NAMESPACE_NOT_ALLOWED,
        Reason.TENANT_CONFLICT,
        Reason.TOO_MANY_TENANTS,
    }
)


@dataclass(frozen=True, slots=True)
class Flaw:
    """One thing that is wrong with an object, and what a person can do about it.

    Attributes:
        is_partial: Whether the object is in force but for the part in question, though its reason
            is one of `OUT_OF_FORCE`.
    """

    reason: Reason
    message: str
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one condition says, before it is compared with what it said before."""

    type: ConditionType
    _: KW_ONLY
    holds: bool
    reason: Reason
    message: str


def accepted(flaws: Sequence[Flaw]) -> Verdict:
    """Judge whether a spec is valid and in conflict with nothing.

    Args:
        flaws: What is wrong, the gravest first.
    """
    message = _messages(flaws) if flaws else "The specification is valid."
    reason = flaws[0].reason if flaws else Reason.ACCEPTED
    return Verdict(ConditionType.ACCEPTED, holds=not flaws, reason=reason, message=message)


def resolved_refs(flaws: Sequence[Flaw]) -> Verdict:
    """Judge whether everything that an object refers to exists."""
    if not flaws:
        message = "Everything that it refers to exists."
        return Verdict(
            ConditionType.RESOLVED_REFS, holds=True, reason=Reason.RESOLVED_REFS, message=message
        )
    return Verdict(
        ConditionType.RESOLVED_REFS, holds=False, reason=flaws[0].reason, message=_messages(flaws)
    )


def ready(verdicts: Iterable[Verdict]) -> Verdict:
    """Sum up: the first of `verdicts` that is not good names the reason."""
    for verdict in verdicts:
        if verdict.holds is (verdict.type is ConditionType.DEGRADED):
            return Verdict(
                ConditionType.READY, holds=False, reason=verdict.reason, message=verdict.message
            )
    return Verdict(
        ConditionType.READY, holds=True, reason=Reason.READY, message="All conditions are good."
    )


def merge_conditions(
    known: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Verdict],
    *,
    generation: int,
    now: datetime,
) -> list[Json]:
    """Return the conditions to store: those of `verdicts` alone, in the order of `known`.

    The transition time is kept while the status stays the same. A condition that is about a newer
    generation is kept as it is. One that no verdict is about any more is left out.

    Args:
        known: The conditions as stored.
        verdicts: One for each condition that applies.
        generation: The generation of the spec that the verdicts are about.
        now: Becomes the transition time of what flips.
    """
    new = {str(verdict.type): verdict for verdict in verdicts}
    old = {str(condition.get("type")): condition for condition in known}
    order = [name for name in old if name in new] + [name for name in new if name not in old]
    return [_condition(old.get(name), new[name], generation=generation, now=now) for name in order]


def timestamp(moment: datetime) -> str:
    """Write a time as Kubernetes does: RFC 3339 in UTC, whole seconds."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _condition(
    old: Mapping[str, Any] | None, verdict: Verdict, *, generation: int, now: datetime
) -> Json:
    if old is not None and int(old.get("observedGeneration") or 0) > generation:
        return dict(old)
    status = "True" if verdict.holds else "False"
    since = old["lastTransitionTime"] if old and old.get("status") == status else timestamp(now)
    return {
        "type": str(verdict.type),
        "status": status,
        "reason": str(verdict.reason),
        "message": _shortened(verdict.message),
        "observedGeneration": generation,
        "lastTransitionTime": since,
    }


def _messages(flaws: Sequence[Flaw]) -> str:
    return "; ".join(dict.fromkeys(flaw.message for flaw in flaws))


def _shortened(message: str) -> str:
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    return message[: MAX_MESSAGE_CHARACTERS - 4] + " ..."
