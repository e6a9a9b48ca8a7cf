"""From a compiled cluster and its engines to the status of every object; pure.

The status that is stored (or about to be) is the planner's only memory: what it returns is that
status, changed as little as possible, so that "equal" means that there is nothing to write.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tidegate_operator.cluster import ClusterView, InvalidObject, pool_keys
from tidegate_operator.compiler import CompiledPool, PolicyVerdict
from tidegate_operator.progress import (
    MAX_NAMED,
    Engines,
    Published,
    degraded,
    pending,
    programmed,
)
from tidegate_operator.references import policy_references
from tidegate_operator.resources import EnginePool, Resource, TenantPolicy
from tidegate_operator.selectors import selector_text
from tidegate_operator.service_levels import standing
from tidegate_operator.usage import ActivityInForce, PoolActivity, pool_usage, tenant_usage
from tidegate_operator.verdicts import (
    ConditionType,
    Flaw,
    Json,
    Reason,
    Verdict,
    accepted,
    merge_conditions,
    ready,
    resolved_refs,
    timestamp,
)

# The most telling reason first: a refusal needs a person, lagging engines mostly need a moment.
_URGENCY = (Reason.ENGINE_REFUSED, Reason.PENDING, Reason.ENGINES_LAGGING, Reason.NO_ENGINES)
_GRAVITY = {reason: rank for rank, reason in enumerate(Reason)}

# The fields of an EnginePool's status that come from what engines report.
_FROM_ENGINES = ("engines", "capacity", "laggards")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """One pool: what its policy is, what was published of it, and what its engines do.

    Attributes:
        is_redis_reachable: Also False where Redis takes no policy of this pool.
        activity: Of the last sampling window; None until the first one is over.
        flaws: What is wrong with how it is scaled.
        missing: References for that which lead nowhere.
    """

    pool: EnginePool
    compiled: CompiledPool
    engines: Engines
    is_redis_reachable: bool = True
    activity: PoolActivity | None = None
    flaws: tuple[Flaw, ...] = ()
    missing: tuple[Flaw, ...] = ()

    @property
    def published(self) -> Published | None:
        """The newest revision; None until Redis has one."""
        return self.engines.published

    @property
    def is_published(self) -> bool:
        """Whether the published policy is the compiled one."""
        return self.published is not None and (
            self.published.digest == self.compiled.snapshot.digest
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusUpdate:
    """The status that an object should have.

    Attributes:
        status: All of it; a field that is left out is removed.
        is_settled: False while engines may be just about to acknowledge.
    """

    model: type[Resource]
    namespace: str
    name: str
    uid: str
    status: Json
    is_settled: bool = True


def plan_policy_status(
    view: ClusterView,
    policy: TenantPolicy,
    states: Mapping[str, PoolState],
    *,
    known: Json,
    now: datetime,
) -> StatusUpdate:
    """Return the status of a TenantPolicy, over all pools that it refers to.

    Args:
        view: What its references are looked up in.
        policy: The object.
        states: The pools by `namespace/name`; those that don't exist are absent.
        known: Its status so far.
        now: Stamped on what changes.
    """
    own = {
        key: (states[key], verdict)
        for key in pool_keys(policy)
        if key in states
        and (verdict := states[key].compiled.verdicts.get(policy.metadata.qualified_name))
    }
    flaws = [flaw for _, verdict in own.values() for flaw in verdict.flaws]
    references = policy_references(view, policy)
    verdicts = [
        accepted(_gravest_first(flaws)),
        resolved_refs(references.missing),
    ]
    entries, progress = _policy_pools(policy, own, known=known, now=now)
    if progress:
        verdicts.append(_worst(progress))
    activities = _activities(policy, own.values())
    reported = None if activities is None else [one for a in activities for one in a.attainments]
    level = standing(references.service, reported, known=known)
    if level.verdict is not None:
        verdicts.append(level.verdict)
    verdicts.append(ready(verdicts))
    status: Json = {
        **_common(known, verdicts, generation=policy.metadata.generation, now=now),
        "tenant": policy.tenant,
        "tier": references.tier.name,
        "pools": entries,
    }
    usage = known.get("usage") if activities is None else tenant_usage(activities)
    if usage:
        status["usage"] = usage
    if level.figures is not None:
        status["serviceLevel"] = level.figures
    return _update(policy, status, is_settled=_is_settled(verdicts))


def plan_pool_status(state: PoolState, *, known: Json, now: datetime) -> StatusUpdate:
    """Return the status of an EnginePool."""
    pool, engines = state.pool, state.engines
    revision = state.published.revision if state.published is not None else 0
    key = pool.metadata.qualified_name
    # Without Redis no engine can be heard: then what was last heard of them still stands.
    is_cut_off = not state.is_redis_reachable
    was_programmed = is_cut_off and _holds(known, ConditionType.PROGRAMMED)
    verdicts = [
        accepted((*state.compiled.flaws, *state.flaws)),
        resolved_refs((*state.compiled.missing, *state.missing)),
        programmed(key, engines, revision, was_programmed=was_programmed)
        if state.is_published
        else pending(key),
        degraded(engines, revision, is_redis_reachable=state.is_redis_reachable),
    ]
    verdicts.append(ready(verdicts))
    status: Json = {
        **_common(known, verdicts, generation=pool.metadata.generation, now=now),
        "replicas": engines.total,
        "selector": selector_text(pool.spec.selector),
    }
    if state.activity is not None:
        status["usage"] = pool_usage(state.activity)
    elif "usage" in known:
        status["usage"] = known["usage"]
    if state.published is not None:
        published = state.published
        status["policy"] = {
            "revision": published.revision,
            "digest": published.digest,
            "publishedTime": published.time,
        }
    if is_cut_off:
        status |= {name: known[name] for name in _FROM_ENGINES if name in known}
    else:
        status |= _engine_counts(engines, revision)
    return _update(pool, status, is_settled=_is_settled(verdicts))


def _engine_counts(engines: Engines, revision: int) -> Json:
    counts: Json = {
        "engines": {
            "ready": len(engines.ready),
            "programmed": len(engines.programmed(revision)) if revision else 0,
            "summary": f"{len(engines.ready)}/{engines.total}",
        }
    }
    reports = engines.ready_reports
    if kv_blocks := sum(report.kv_blocks for report in reports):
        host_blocks = sum(report.host_blocks for report in reports)
        counts["capacity"] = {"kvBlocks": kv_blocks, "hostBlocks": host_blocks}
    if laggards := engines.lagging(revision):
        counts["laggards"] = list(laggards[:MAX_NAMED])
    return counts


def plan_plain_status(
    resource: Resource, flaws: Sequence[Flaw], *, known: Json, now: datetime
) -> StatusUpdate:
    """Return the status of an object that no engine sees by itself: Accepted and Ready."""
    verdicts = [accepted(flaws)]
    verdicts.append(ready(verdicts))
    generation = resource.metadata.generation
    return _update(resource, _common(known, verdicts, generation=generation, now=now))


def plan_invalid_status(invalid: InvalidObject, *, known: Json, now: datetime) -> StatusUpdate:
    """Return the status of an object that can't be read."""
    verdicts = [accepted([Flaw(Reason.INVALID, invalid.problem)])]
    verdicts.append(ready(verdicts))
    metadata = invalid.metadata
    # The pool is as it was to its engines and to `/scale`, and its revision must not be forgotten.
    kept = {name: known[name] for name in ("policy", "replicas", "selector") if name in known}
    return StatusUpdate(
        model=invalid.model,
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        status=_common(known, verdicts, generation=metadata.generation, now=now) | kept,
    )


def _policy_pools(
    policy: TenantPolicy,
    own: Mapping[str, tuple[PoolState, PolicyVerdict]],
    *,
    known: Json,
    now: datetime,
) -> tuple[list[Json], list[Verdict]]:
    """Return `status.pools` and the progress in each pool in which the policy is in force."""
    before = {}
    if known.get("observedGeneration") == policy.metadata.generation:
        before = {f"{e['namespace']}/{e['name']}": e for e in known.get("pools", ())}
    entries, progress = [], []
    for key in pool_keys(policy):
        namespace, name = key.split("/")
        entry: Json = {"name": name, "namespace": namespace, "accepted": False}
        entries.append(entry)
        if key not in own:
            entry["reason"] = str(Reason.POOL_NOT_FOUND)
            continue
        state, verdict = own[key]
        flaws = _gravest_first(verdict.flaws)
        entry["accepted"] = not flaws
        entry["reason"] = str(flaws[0].reason if flaws else Reason.ACCEPTED)
        if verdict.is_in_force:
            progress.append(_program(entry, key, state, before=before.get(key, {}), now=now))
    return entries, progress


def _program(
    entry: Json, key: str, state: PoolState, *, before: Mapping[str, Any], now: datetime
) -> Verdict:
    """Fill in from which revision on a pool holds a policy, and whether its engines are there."""
    published = state.published
    if published is None:
        return pending(key)
    revision = int(before.get("revision") or 0)
    if not 0 < revision <= published.revision:
        # Equal content has no new revision: then the current one already holds this generation.
        revision = published.revision if state.is_published else 0
    if not revision:
        return pending(key)
    entry["revision"] = revision
    is_same = before.get("revision") == revision
    since = before.get("programmedTime") if is_same else None
    verdict = programmed(key, state.engines, revision, was_programmed=since is not None)
    if verdict.holds:
        entry["programmedTime"] = since or timestamp(now)
    return verdict


def _worst(progress: Sequence[Verdict]) -> Verdict:
    failed = [verdict for verdict in progress if not verdict.holds]
    if failed:
        return min(failed, key=lambda verdict: _URGENCY.index(verdict.reason))
    if len(progress) == 1:
        return progress[0]
    message = f"Every ready engine of all {len(progress)} pools runs this policy."
    return Verdict(ConditionType.PROGRAMMED, holds=True, reason=Reason.PROGRAMMED, message=message)


def _holds(known: Json, condition_type: str) -> bool:
    return any(
        condition.get("type") == condition_type and condition.get("status") == "True"
        for condition in known.get("conditions", ())
    )


def _gravest_first(flaws: Sequence[Flaw]) -> list[Flaw]:
    return sorted(flaws, key=lambda flaw: _GRAVITY[flaw.reason])


def _is_settled(verdicts: Sequence[Verdict]) -> bool:
    in_transit = (Reason.PENDING, Reason.ENGINES_LAGGING)
    return not any(
        verdict.type is ConditionType.PROGRAMMED and verdict.reason in in_transit
        for verdict in verdicts
    )


def _common(
    known: Json, verdicts: Sequence[Verdict], *, generation: int, now: datetime
) -> dict[str, Any]:
    conditions = known.get("conditions", ())
    return {
        "observedGeneration": generation,
        "conditions": merge_conditions(conditions, verdicts, generation=generation, now=now),
    }


def _update(resource: Resource, status: Json, *, is_settled: bool = True) -> StatusUpdate:
    metadata = resource.metadata
    return StatusUpdate(
        model=type(resource),
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        status=status,
        is_settled=is_settled,
    )


def _activities(
    policy: TenantPolicy, own: Iterable[tuple[PoolState, PolicyVerdict]]
) -> list[ActivityInForce] | None:
    """Return what its tenant does where the policy is in force; None until that is measured."""
    activities = []
    for state, verdict in own:
        if state.activity is None:
            return None
        if verdict.is_in_force and policy.tenant in state.activity.tenants:
            rules = state.compiled.snapshot.tenant_rules
            activities.append(ActivityInForce(state.activity, rules, policy.tenant))
    return activities
