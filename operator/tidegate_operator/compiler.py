"""The decision of the control plane: from what is in the cluster to the policy of one pool.

Pure and total: no clock, no I/O, and a bad object costs only itself. The result depends on the
content of the view alone, not on the order in which objects were seen.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidegate_operator.cluster import ClusterView
from tidegate_operator.references import (
    References,
    forbidden_tiers,
    misplaced_tiers,
    policy_references,
    pool_references,
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
        return not any(f.reason in OUT_OF_FORCE and not f.is_partial for f in self.flaws)


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
    """

    pool: str
    pool_uid: str
    generation: int
    snapshot: PolicySnapshot
    verdicts: Mapping[str, PolicyVerdict]
    flaws: tuple[Flaw, ...] = ()
    missing: tuple[Flaw, ...] = ()
    tier_flaws: Mapping[str, Flaw] = field(default_factory=dict)

    def differing_verdicts(self, other: "CompiledPool") -> set[str]:
        """Return the policies about which `other` says something else, or nothing."""
        return {name for name, own in self.verdicts.items() if other.verdicts.get(name) != own}


def compile_pool(view: ClusterView, pool: EnginePool) -> CompiledPool:
    """Compile the policy of `pool`; cost is linear in the policies that refer to it."""
    key = pool.metadata.qualified_name
    policies = view.policies_by_pool.get(key, ())
    references = {p.metadata.qualified_name: policy_references(view, p) for p in policies}
    flaws = _judge(view, pool, policies, references)
    verdicts = {
        policy.metadata.qualified_name: PolicyVerdict(
            policy=policy.metadata.qualified_name,
            uid=policy.metadata.uid,
            generation=policy.metadata.generation,
            tier=references[policy.metadata.qualified_name].tier.name,
            flaws=tuple(flaws.get(policy.metadata.qualified_name, ())),
            missing=references[policy.metadata.qualified_name].missing,
        )
        for policy in policies
    }
    in_force = [p for p in policies if verdicts[p.metadata.qualified_name].is_in_force]
    own = pool_references(view, pool)
    tiers = _used_tiers(pool, [references[p.metadata.qualified_name] for p in in_force], own=own)
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
            tenants=_tenant_rules(in_force, references, flaws),
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
    )


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


def _judge(
    view: ClusterView,
    pool: EnginePool,
    policies: Sequence[TenantPolicy],
    references: Mapping[str, References],
) -> _Flaws:
    """Find the flaws of `policies`, oldest first; each step looks only at what is still in force.

    The gravest flaws come first, so that a policy that isn't in force takes no tenant name, no
    quota and no key away from one that is.
    """
    flaws: _Flaws = {}
    owners: dict[str, str] = {}
    remaining: list[TenantPolicy] = []
    for policy in policies:
        key = policy.metadata.qualified_name
        found = [*_reserved_name(policy), *_forbidden(view, pool, policy)]
        if not found and (owner := owners.get(policy.tenant)) is not None:
            message = f"tenant {policy.tenant!r} belongs to the older TenantPolicy {owner!r}"
            found = [Flaw(Reason.TENANT_CONFLICT, f"pool {_name(pool)!r}: {message}")]
        if not found and len(remaining) >= MAX_TENANTS:
            message = f"pool {_name(pool)!r} has {MAX_TENANTS} older tenants, the most it can have"
            found = [Flaw(Reason.TOO_MANY_TENANTS, message)]
        if found:
            flaws[key] = found
        else:
            owners[policy.tenant] = key
            remaining.append(policy)
    _judge_quotas(pool, remaining, flaws)
    _judge_keys(pool, remaining, references, flaws)
    for policy in remaining:
        key = policy.metadata.qualified_name
        if misplaced := [*misplaced_tiers(view, policy, own=references[key].tier)]:
            flaws.setdefault(key, []).extend(misplaced)
    return flaws


def _reserved_name(policy: TenantPolicy) -> list[Flaw]:
    if policy.tenant != UNKNOWN_TENANT:
        return []
    message = f"spec.tenant: {UNKNOWN_TENANT!r} is reserved for requests of no known tenant"
    return [Flaw(Reason.INVALID, message)]


def _forbidden(view: ClusterView, pool: EnginePool, policy: TenantPolicy) -> list[Flaw]:
    namespace = policy.metadata.namespace
    flaws = list(forbidden_tiers(view, policy))
    if not pool.spec.allowed_namespaces.allows(
        namespace=namespace,
        own_namespace=pool.metadata.namespace,
        labels=view.namespaces.get(namespace, {}),
    ):
        message = (
            f"EnginePool {_name(pool)!r} doesn't allow policies of namespace {namespace!r}"
            " (its spec.allowedNamespaces)"
        )
        flaws.insert(0, Flaw(Reason.NAMESPACE_NOT_ALLOWED, message))
    return flaws


def _judge_quotas(pool: EnginePool, policies: Sequence[TenantPolicy], flaws: _Flaws) -> None:
    """Refuse each nominal that doesn't fit into what the older policies left."""
    low = watermark_rule(pool).low_percent
    taken = 0
    for policy in policies:
        nominal = policy.spec.kv.nominal_percent
        if taken + nominal <= low:
            taken += nominal
            continue
        message = (
            f"spec.kv.nominalPercent: {nominal} doesn't fit into pool {_name(pool)!r}: older"
            f" policies have {taken} of the {low} percent below its low watermark; 0 applies"
        )
        flaws.setdefault(policy.metadata.qualified_name, []).append(
            Flaw(Reason.QUOTA_OVERSUBSCRIBED, message)
        )


def _judge_keys(
    pool: EnginePool,
    policies: Sequence[TenantPolicy],
    references: Mapping[str, References],
    flaws: _Flaws,
) -> None:
    """Blame every policy that holds a key which another one holds too."""
    holders: dict[str, list[str]] = {}
    for policy in policies:
        key = policy.metadata.qualified_name
        for digest in references[key].key_digests:
            holders.setdefault(digest, []).append(key)
    for policy in policies:
        key = policy.metadata.qualified_name
        # A few names are enough: all of them, for each holder, would be quadratic.
        others = {
            other
            for digest in references[key].key_digests
            for other in holders[digest][:4]
            if other != key
        }
        if others:
            message = (
                f"spec.apiKeySecretRefs: in pool {_name(pool)!r} an API key is also one of"
                f" {', '.join(sorted(others)[:3])}; it identifies neither"
            )
            flaws.setdefault(key, []).append(Flaw(Reason.KEY_CONFLICT, message))


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
    policies: Sequence[TenantPolicy],
    references: Mapping[str, References],
    flaws: Mapping[str, Sequence[Flaw]],
) -> Iterator[TenantRule]:
    count = Counter(
        digest
        for policy in policies
        for digest in references[policy.metadata.qualified_name].key_digests
    )
    for policy in policies:
        key = policy.metadata.qualified_name
        found = references[key]
        reasons = {flaw.reason for flaw in flaws.get(key, ())}
        yield tenant_rule(
            policy,
            tier=found.tier.name,
            allowed_tiers=[tier.name for tier in found.allowed_tiers],
            preemption=found.preemption,
            service=found.service,
            key_digests=[digest for digest in found.key_digests if count[digest] == 1],
            has_quota=Reason.QUOTA_OVERSUBSCRIBED not in reasons,
        )


def _name(pool: EnginePool) -> str:
    return pool.metadata.qualified_name
