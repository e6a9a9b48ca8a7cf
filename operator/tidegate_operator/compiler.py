"""The decision of the control plane: from what is in the cluster to the policy of one pool.

Pure and total: no clock, no I/O, and a bad object costs only itself. The result depends on the
content of the view alone, not on the order in which objects were seen.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from tidegate_operator.cluster import ClusterView
from tidegate_operator.references import (
    References,
    policy_references,
    pool_references,
    reference_surroundings,
)
from tidegate_operator.resources import EnginePool, TenantPolicy
from tidegate_operator.rules import (
    batching_rule,
    drain_rule,
    kv_estimate,
    pool_flaws,
    tenant_rule,
    unknown_tenants_rule,
    watermark_rule,
)
from tidegate_operator.verdicts import OUT_OF_FORCE, Flaw, Reason
from tidegate_policies.rules import (
    MAX_RESERVED_PERCENT,
    UNKNOWN_TENANT,
    TenantRule,
    TierRule,
    UnknownAction,
)
from tidegate_policies.snapshot import PolicySnapshot

MAX_TENANTS = 10_000
"""Most tenants of one pool; the newest beyond are not in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVerdict:
    """What became of one TenantPolicy in one pool.

    Attributes:
        flaws: What is wrong with it in this pool, the gravest first.
        missing: Its references that lead nowhere. With them, equal verdicts mean equal statuses
            as long as engines and usage are the same.
    """

    policy: str
    uid: str
    generation: int
    tier: str
    flaws: tuple[Flaw, ...] = ()
    missing: tuple[Flaw, ...] = ()

    @property
    def is_in_force(self) -> bool:
        """Whether the snapshot holds a rule for the policy."""
        return not self.flaws or not any(
            flaw.reason in OUT_OF_FORCE and not flaw.is_partial for flaw in self.flaws
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy that refers to a pool, by its `namespace/name`, and what it refers to itself."""

    key: str
    policy: TenantPolicy
    references: References


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPool:
    """The policy of one pool, and what had to be left out of it.

    Attributes:
        pool: `namespace/name`.
        pool_uid: A pool that was deleted and created again is another one.
        generation: Of the pool's spec.
        verdicts: For every policy that refers to the pool, by `namespace/name`.
        flaws: What is wrong with the pool's own spec.
        missing: The pool's own references that lead nowhere.
        tier_flaws: What is wrong with PriorityTiers in this pool, by their names.
        candidates: What it was compiled from, by the policies' `namespace/name`.
        surroundings: What else the candidates' references were looked up in.
    """

    pool: str
    pool_uid: str
    generation: int
    snapshot: PolicySnapshot
    verdicts: Mapping[str, PolicyVerdict]
    flaws: tuple[Flaw, ...] = ()
    missing: tuple[Flaw, ...] = ()
    tier_flaws: Mapping[str, Flaw] = field(default_factory=dict)
    candidates: Mapping[str, Candidate] = field(default_factory=dict, repr=False, compare=False)
    surroundings: tuple[object, ...] = field(default=(), repr=False, compare=False)

    def differing_verdicts(self, other: "CompiledPool") -> set[str]:
        """Return the policies about which `other` says something else, or nothing."""
        return {name for name, own in self.verdicts.items() if other.verdicts.get(name) != own}


def compile_pool(
    view: ClusterView, pool: EnginePool, *, before: CompiledPool | None = None
) -> CompiledPool:
    """Compile the policy of `pool`; cost is linear in the policies that refer to it.

    Args:
        view: The cluster.
        pool: One of its pools.
        before: An earlier result for any pool. What it has in common with this one is taken over,
            which changes nothing but the time that it takes.
    """
    key = pool.metadata.qualified_name
    candidates = _candidates(view, key, before)
    flaws = _judge(view, pool, candidates)
    verdicts = {one.key: _verdict(one, tuple(flaws.get(one.key, ())), before) for one in candidates}
    in_force = [one for one in candidates if verdicts[one.key].is_in_force]
    own = pool_references(view, pool)
    tiers = _used_tiers(pool, [one.references for one in in_force], own=own)
    oversubscribed = _judge_reserved_shares(view, pool, tiers)
    return CompiledPool(
        pool=key,
        pool_uid=pool.metadata.uid,
        generation=pool.metadata.generation,
        snapshot=PolicySnapshot.of(
            key,
            tiers=[
                replace(tier, reserved_share_percent=0) if tier.name in oversubscribed else tier
                for tier in tiers
            ],
            tenants=_tenant_rules(in_force, flaws, before),
            batching=batching_rule(pool),
            watermarks=watermark_rule(pool),
            kv_estimate=kv_estimate(pool),
            unknown_tenants=unknown_tenants_rule(pool, own.tier.name),
            drain=drain_rule(pool, view.pods_of(pool)),
        ),
        verdicts=verdicts,
        flaws=tuple(pool_flaws(pool)),
        missing=own.missing,
        tier_flaws=oversubscribed,
        candidates={one.key: one for one in candidates},
        surroundings=reference_surroundings(view),
    )


def _candidates(view: ClusterView, pool: str, before: CompiledPool | None) -> list[Candidate]:
    """Return the policies of a pool, oldest first.

    Nearly always one object has changed and all others are the very ones that were compiled
    before, so that their references need not be looked up again.
    """
    known: Mapping[str, Candidate] = {}
    if before is not None and before.surroundings == reference_surroundings(view):
        known = before.candidates
    found = []
    for policy in view.policies_by_pool.get(pool, ()):
        key = policy.metadata.qualified_name
        one = known.get(key)
        if one is None or one.policy is not policy:
            one = Candidate(key, policy, policy_references(view, policy))
        found.append(one)
    return found


def _verdict(one: Candidate, flaws: tuple[Flaw, ...], before: CompiledPool | None) -> PolicyVerdict:
    if _has_same(before, one) and (old := before.verdicts[one.key]).flaws == flaws:
        return old
    return PolicyVerdict(
        policy=one.key,
        uid=one.policy.metadata.uid,
        generation=one.policy.metadata.generation,
        tier=one.references.tier.name,
        flaws=flaws,
        missing=one.references.missing,
    )


def _has_same(before: CompiledPool | None, one: Candidate) -> TypeGuard[CompiledPool]:
    return before is not None and before.candidates.get(one.key) is one


def tier_flaws(
    view: ClusterView, tier: str, compiled: Iterable[CompiledPool] = ()
) -> tuple[Flaw, ...]:
    """Return what is wrong with a PriorityTier, for the whole cluster and in each pool.

    Args:
        view: Where an older tier may be the global default.
        tier: The tier's name.
        compiled: All pools.
    """
    in_pools = [flaw for pool in compiled if (flaw := pool.tier_flaws.get(tier)) is not None]
    in_pools.sort(key=lambda flaw: flaw.message)
    claims = [claim.metadata.name for claim in view.default_tiers]
    if tier not in claims[1:]:
        return tuple(in_pools)
    message = (
        f"spec.globalDefault: PriorityTier {claims[0]!r} is older and is the global default;"
        " this tier can be named but is not the default"
    )
    return (Flaw(Reason.TIER_CONFLICT, message), *in_pools)


_Flaws = dict[str, list[Flaw]]


def _judge(view: ClusterView, pool: EnginePool, candidates: Sequence[Candidate]) -> _Flaws:
    """Find the flaws of policies, oldest first; each step looks only at what is still in force.

    The gravest flaws come first, so that a policy that isn't in force takes no tenant name, no
    quota and no key away from one that is.
    """
    flaws: _Flaws = {}
    owners: dict[str, str] = {}
    remaining: list[Candidate] = []
    allowed = {
        namespace: _allows(view, pool, namespace)
        for namespace in dict.fromkeys(one.policy.metadata.namespace for one in candidates)
    }
    for one in candidates:
        policy, tenant = one.policy, one.policy.tenant
        found = _foreign_name(policy)
        if not allowed[policy.metadata.namespace]:
            found.append(_namespace_flaw(pool, policy))
        found += one.references.forbidden
        if not found and (owner := owners.get(tenant)) is not None:
            message = f"tenant {tenant!r} belongs to the older TenantPolicy {owner!r}"
            found = [Flaw(Reason.TENANT_CONFLICT, f"pool {_name(pool)!r}: {message}")]
        if not found and len(remaining) >= MAX_TENANTS:
            message = f"pool {_name(pool)!r} has {MAX_TENANTS} older tenants, the most it can have"
            found = [Flaw(Reason.TOO_MANY_TENANTS, message)]
        if found:
            flaws[one.key] = found
        else:
            owners[tenant] = one.key
            remaining.append(one)
    _judge_quotas(pool, remaining, flaws)
    _judge_keys(pool, remaining, flaws)
    for one in remaining:
        if misplaced := one.references.misplaced:
            flaws.setdefault(one.key, []).extend(misplaced)
    return flaws


def _foreign_name(policy: TenantPolicy) -> list[Flaw]:
    """Find out whether a policy calls its tenant what only others may be called."""
    own, tenant = policy.metadata.namespace, policy.tenant
    namespace, slash, _ = tenant.partition("/")
    if tenant == UNKNOWN_TENANT:
        problem = f"{UNKNOWN_TENANT!r} is reserved for requests of no known tenant"
    elif slash and namespace != own:
        # Who gets another's name when its policy goes would see what that one has done.
        problem = f"{tenant!r} may be a tenant of namespace {namespace!r} alone, not of {own!r}"
    else:
        return []
    return [Flaw(Reason.INVALID, f"spec.tenant: {problem}")]


def _allows(view: ClusterView, pool: EnginePool, namespace: str) -> bool:
    return pool.spec.allowed_namespaces.allows(
        namespace=namespace,
        own_namespace=pool.metadata.namespace,
        labels=view.namespaces.get(namespace, {}),
    )


def _namespace_flaw(pool: EnginePool, policy: TenantPolicy) -> Flaw:
    return Flaw(
        Reason.NAMESPACE_NOT_ALLOWED,
        f"EnginePool {_name(pool)!r} doesn't allow policies of namespace"
        f" {policy.metadata.namespace!r} (its spec.allowedNamespaces)",
    )


def _judge_quotas(pool: EnginePool, candidates: Sequence[Candidate], flaws: _Flaws) -> None:
    """Refuse each nominal that doesn't fit into what the older policies left."""
    low = watermark_rule(pool).low_percent
    taken = 0
    for one in candidates:
        nominal = one.policy.spec.kv.nominal_percent
        if taken + nominal <= low:
            taken += nominal
            continue
        message = (
            f"spec.kv.nominalPercent: {nominal} doesn't fit into pool {_name(pool)!r}: older"
            f" policies have {taken} of the {low} percent below its low watermark; 0 applies"
        )
        flaws.setdefault(one.key, []).append(Flaw(Reason.QUOTA_OVERSUBSCRIBED, message))


def _judge_keys(pool: EnginePool, candidates: Sequence[Candidate], flaws: _Flaws) -> None:
    """Blame every policy that holds a key which another one holds too."""
    holders: dict[str, list[str]] = {}
    for one in candidates:
        for digest in one.references.key_digests:
            holders.setdefault(digest, []).append(one.key)
    for one in candidates:
        # A few names are enough: all of them, for each holder, would be quadratic.
        others = {
            other
            for digest in one.references.key_digests
            if len(holders[digest]) > 1
            for other in holders[digest][:4]
            if other != one.key
        }
        if others:
            message = (
                f"spec.apiKeySecretRefs: in pool {_name(pool)!r} an API key is also one of"
                f" {', '.join(sorted(others)[:3])}; it identifies neither"
            )
            flaws.setdefault(one.key, []).append(Flaw(Reason.KEY_CONFLICT, message))


def _judge_reserved_shares(
    view: ClusterView, pool: EnginePool, tiers: Sequence[TierRule]
) -> dict[str, Flaw]:
    """Refuse each reserved share that doesn't fit into what the older tiers of the pool left."""
    claims = [tier for tier in tiers if tier.reserved_share_percent]
    claims.sort(key=lambda tier: view.tiers[tier.name].metadata.seniority)
    flaws: dict[str, Flaw] = {}
    kept: list[TierRule] = []
    for tier in claims:
        taken = sum(other.reserved_share_percent for other in kept)
        if taken + tier.reserved_share_percent <= MAX_RESERVED_PERCENT:
            kept.append(tier)
            continue
        older = ", ".join(f"{other.name} {other.reserved_share_percent}" for other in kept)
        message = (
            f"spec.reservedSharePercent: {tier.reserved_share_percent} doesn't fit into pool"
            f" {_name(pool)!r}: of the {MAX_RESERVED_PERCENT} percent that tiers can reserve, older"
            f" ones have {taken} ({older}); 0 applies there"
        )
        flaws[tier.name] = Flaw(Reason.TIER_CONFLICT, message)
    return flaws


def _used_tiers(
    pool: EnginePool, references: Iterable[References], *, own: References
) -> list[TierRule]:
    """Return the tiers that somebody's requests have in the pool, or may ask for."""
    tiers = {tier.name: tier for found in references for tier in (found.tier, *found.allowed_tiers)}
    if UnknownAction(pool.spec.unknown_tenants.action) is UnknownAction.ADMIT:
        tiers[own.tier.name] = own.tier
    return list(tiers.values())


def _tenant_rules(
    candidates: Sequence[Candidate],
    flaws: Mapping[str, Sequence[Flaw]],
    before: CompiledPool | None,
) -> Iterator[TenantRule]:
    count = Counter(digest for one in candidates for digest in one.references.key_digests)
    for one in candidates:
        found = flaws.get(one.key, ())
        if not found and _has_same(before, one) and not before.verdicts[one.key].flaws:
            yield before.snapshot.tenant_rules[one.policy.tenant]
            continue
        references = one.references
        yield tenant_rule(
            one.policy,
            tier=references.tier.name,
            allowed_tiers=[tier.name for tier in references.allowed_tiers],
            preemption=references.preemption,
            service=references.service,
            key_digests=[digest for digest in references.key_digests if count[digest] == 1],
            has_quota=all(flaw.reason != Reason.QUOTA_OVERSUBSCRIBED for flaw in found),
        )


def _name(pool: EnginePool) -> str:
    return pool.metadata.qualified_name
