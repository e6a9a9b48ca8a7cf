"""What a TenantPolicy or an EnginePool refers to: looked up, and the gaps named.

Everything here is the same in every pool of a policy, so that it is looked up once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tidegate_operator.cluster import ClusterView, pool_keys
from tidegate_operator.resources import EnginePool, SecretKeyRef, TenantPolicy
from tidegate_operator.rules import preemption_rule, service_rule, tier_rule
from tidegate_operator.verdicts import Flaw, Reason
from tidegate_policies.rules import PreemptionRule, ServiceRule, TierRule

IMPLICIT_TIER = TierRule(name="_default", value=0)
"""Tier of policies that name none while no tier is the global default.

No PriorityTier can have the name: Kubernetes allows no underscore in it.
"""

# Thousands of policies share them.
_PLAIN_PREEMPTION = PreemptionRule()
_NO_SERVICE_LEVEL = ServiceRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What an object's references lead to.

    Attributes:
        tier: In force; the default where none is named or the named one doesn't exist.
        allowed_tiers: Those below it that requests may ask for, by name.
        preemption: Likewise.
        service: Likewise.
        key_digests: SHA-256 (hex) of the API keys that could be read, sorted.
        missing: One flaw per reference that leads nowhere.
        forbidden: One flaw per tier that its namespace may not use.
        misplaced: One flaw per tier that it allows and that isn't below its own.
    """

    tier: TierRule
    allowed_tiers: tuple[TierRule, ...] = ()
    preemption: PreemptionRule = _PLAIN_PREEMPTION
    service: ServiceRule = _NO_SERVICE_LEVEL
    key_digests: tuple[str, ...] = ()
    missing: tuple[Flaw, ...] = ()
    forbidden: tuple[Flaw, ...] = ()
    misplaced: tuple[Flaw, ...] = ()


def default_tier(view: ClusterView) -> TierRule:
    """Return the tier of everything that names none."""
    return tier_rule(view.default_tiers[0]) if view.default_tiers else IMPLICIT_TIER


def policy_references(view: ClusterView, policy: TenantPolicy) -> References:
    """Look up everything that `policy` refers to."""
    tier = _tier_or_default(view, policy.spec.priority_tier)
    named = _named_tiers(view, policy)
    keys = [_key_digest(view, policy, ref) for ref in policy.spec.api_key_secret_refs]
    return References(
        tier=tier,
        allowed_tiers=tuple(t for t in named if t.value < tier.value),
        preemption=_preemption(view, policy),
        service=_service(view, policy),
        key_digests=tuple(sorted({key for key in keys if isinstance(key, str)})),
        missing=(
            *_missing_of_policy(view, policy),
            *(key for key in keys if isinstance(key, Flaw)),
        ),
        forbidden=tuple(_forbidden_tiers(view, policy)),
        misplaced=tuple(_misplaced_tiers(named, own=tier)),
    )


def reference_surroundings(view: ClusterView) -> tuple[object, ...]:
    """Return all that `policy_references` looks at besides the policy itself."""
    return (
        view.pools.keys(),
        view.tiers,
        view.preemption_policies,
        view.service_levels,
        view.secrets,
        view.namespaces,
    )


def pool_references(view: ClusterView, pool: EnginePool) -> References:
    """Look up everything that `pool` refers to."""
    name = pool.spec.unknown_tenants.priority_tier
    where = "spec.unknownTenants.priorityTier"
    return References(
        tier=_tier_or_default(view, name), missing=tuple(_missing_tier(view, where, name))
    )


def _forbidden_tiers(view: ClusterView, policy: TenantPolicy) -> Iterator[Flaw]:
    """Yield a flaw for each tier that `policy` names and its namespace may not use."""
    namespace = policy.metadata.namespace
    labels = view.namespaces.get(namespace, {})
    named = (policy.spec.priority_tier, *policy.spec.allowed_tiers)
    for name in dict.fromkeys(named):
        tier = view.tiers.get(name) if name else None
        if tier is not None and not tier.spec.allowed_namespaces.allows(
            namespace=namespace, own_namespace="", labels=labels
        ):
            yield Flaw(
                Reason.NAMESPACE_NOT_ALLOWED,
                f"PriorityTier {tier.metadata.name!r} doesn't allow policies of namespace"
                f" {namespace!r} (its spec.allowedNamespaces)",
            )


def _misplaced_tiers(named: Iterable[TierRule], *, own: TierRule) -> Iterator[Flaw]:
    """Yield a flaw for each named tier that isn't below a policy's own."""
    for tier in named:
        if tier.value >= own.value:
            yield Flaw(
                Reason.INVALID,
                f"spec.allowedTiers: PriorityTier {tier.name!r} of value {tier.value} is not lower"
                f" than the tenant's own, {own.name!r} of value {own.value}; requests can't ask for"
                " it",
                is_partial=True,
            )


def _named_tiers(view: ClusterView, policy: TenantPolicy) -> list[TierRule]:
    """Return the tiers that `policy` allows, of those that exist, by name."""
    names = sorted(set(policy.spec.allowed_tiers))
    return [tier_rule(view.tiers[name]) for name in names if name in view.tiers]


def _missing_of_policy(view: ClusterView, policy: TenantPolicy) -> Iterator[Flaw]:
    spec, namespace = policy.spec, policy.metadata.namespace
    for key in pool_keys(policy):
        if key not in view.pools:
            yield Flaw(Reason.POOL_NOT_FOUND, f"spec.poolRefs: there is no EnginePool {key!r}")
    yield from _missing_tier(view, "spec.priorityTier", spec.priority_tier)
    for name in spec.allowed_tiers:
        if name not in view.tiers:
            yield Flaw(
                Reason.TIER_NOT_FOUND,
                f"spec.allowedTiers: there is no PriorityTier {name!r}; requests can't ask for it",
            )
    ppol, slo = spec.preemption_policy_ref, spec.service_level_ref
    if ppol is not None and f"{namespace}/{ppol.name}" not in view.preemption_policies:
        yield Flaw(
            Reason.PREEMPTION_POLICY_NOT_FOUND,
            f"spec.preemptionPolicyRef: there is no PreemptionPolicy {ppol.name!r} in namespace"
            f" {namespace!r}; the defaults apply",
        )
    if slo is not None and f"{namespace}/{slo.name}" not in view.service_levels:
        yield Flaw(
            Reason.SERVICE_LEVEL_NOT_FOUND,
            f"spec.serviceLevelRef: there is no ServiceLevel {slo.name!r} in namespace"
            f" {namespace!r}; no service level applies",
        )


def _missing_tier(view: ClusterView, where: str, name: str | None) -> Iterator[Flaw]:
    if name is not None and name not in view.tiers:
        yield Flaw(
            Reason.TIER_NOT_FOUND,
            f"{where}: there is no PriorityTier {name!r}; the default tier"
            f" {default_tier(view).name!r} applies",
        )


def _tier_or_default(view: ClusterView, name: str | None) -> TierRule:
    tier = view.tiers.get(name) if name else None
    return tier_rule(tier) if tier is not None else default_tier(view)


def _preemption(view: ClusterView, policy: TenantPolicy) -> PreemptionRule:
    spec, ref = policy.spec.preemption, policy.spec.preemption_policy_ref
    if spec is None and ref is not None:
        found = view.preemption_policies.get(f"{policy.metadata.namespace}/{ref.name}")
        spec = found.spec if found is not None else None
    return preemption_rule(spec) if spec is not None else _PLAIN_PREEMPTION


def _service(view: ClusterView, policy: TenantPolicy) -> ServiceRule:
    spec, ref = policy.spec.service_level, policy.spec.service_level_ref
    if spec is None and ref is not None:
        found = view.service_levels.get(f"{policy.metadata.namespace}/{ref.name}")
        spec = found.spec if found is not None else None
    return service_rule(spec) if spec is not None else _NO_SERVICE_LEVEL


def _key_digest(view: ClusterView, policy: TenantPolicy, ref: SecretKeyRef) -> str | Flaw:
    namespace = policy.metadata.namespace
    secret = view.secrets.get(f"{namespace}/{ref.name}")
    if secret is None:
        return Flaw(
            Reason.SECRET_NOT_FOUND,
            f"spec.apiKeySecretRefs: namespace {namespace!r} has no Secret {ref.name!r} with the"
            ' label tidegate.io/api-keys: "true"; without the label it is not read',
        )
    digest = secret.get(ref.key)
    if digest is None:
        return Flaw(
            Reason.SECRET_KEY_NOT_FOUND,
            f"spec.apiKeySecretRefs: Secret {ref.name!r} holds nothing under {ref.key!r}",
        )
    return digest
