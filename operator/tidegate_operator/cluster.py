"""What the operator has seen of the cluster, frozen for one compilation.

Objects are keyed by `namespace/name`, cluster-scoped ones by their name alone. Pools, policies and
the rest are in no particular order: whoever needs one sorts by seniority.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tidegate_operator.resources import (
    EnginePool,
    ObjectMeta,
    PoolRef,
    PreemptionPolicy,
    PriorityTier,
    Resource,
    ServiceLevel,
    TenantPolicy,
)

DRAINING_ANNOTATION = "tidegate.io/draining"
"""On a pod: its engine takes no new work while this has a value, whoever set it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvalidObject:
    """A custom resource that is stored but that the models can't read.

    Attributes:
        model: The model of its kind.
        problem: The field and what is wrong with it.
    """

    model: type[Resource]
    metadata: ObjectMeta
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """The part of a Pod that decides whether an engine counts.

    Attributes:
        is_ready: The Ready condition is True and the pod isn't being deleted.
        is_terminating: Its deletion was asked for.
        draining: Why its engine is to take no new work, from `DRAINING_ANNOTATION`; empty = it may.
        created: RFC 3339 in UTC: sorts by age.
    """

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    is_ready: bool = False
    is_terminating: bool = False
    draining: str = ""
    created: str = ""


@dataclass(frozen=True, kw_only=True)
class ClusterView:
    """Everything that a compilation may look at.

    Attributes:
        secrets: For each labelled Secret, the SHA-256 (hex) of the API key under each of its keys;
            None where the value is empty. The keys themselves never get this far.
        namespaces: Labels by namespace.
        invalid: Objects that exist but can't be read.
    """

    pools: Mapping[str, EnginePool] = field(default_factory=dict)
    policies: Mapping[str, TenantPolicy] = field(default_factory=dict)
    tiers: Mapping[str, PriorityTier] = field(default_factory=dict)
    preemption_policies: Mapping[str, PreemptionPolicy] = field(default_factory=dict)
    service_levels: Mapping[str, ServiceLevel] = field(default_factory=dict)
    secrets: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    pods: Mapping[str, PodView] = field(default_factory=dict)
    invalid: tuple[InvalidObject, ...] = ()

    @cached_property
    def policies_by_pool(self) -> Mapping[str, tuple[TenantPolicy, ...]]:
        """The policies that refer to each pool, oldest first; the pool may not exist."""
        found: dict[str, list[TenantPolicy]] = {}
        for policy in sorted(self.policies.values(), key=lambda p: p.metadata.seniority):
            for pool in pool_keys(policy):
                found.setdefault(pool, []).append(policy)
        return {pool: tuple(policies) for pool, policies in found.items()}

    @cached_property
    def default_tiers(self) -> tuple[PriorityTier, ...]:
        """The tiers that claim to be the global default, oldest first: the first one is."""
        claims = (tier for tier in self.tiers.values() if tier.spec.global_default)
        return tuple(sorted(claims, key=lambda tier: tier.metadata.seniority))

    def pods_of(self, pool: EnginePool) -> tuple[PodView, ...]:
        """Return the pods that `pool` selects, by name, ready or not."""
        selector = pool.spec.selector
        selected = (
            pod
            for pod in self.pods.values()
            if pod.namespace == pool.metadata.namespace and selector.matches(pod.labels)
        )
        return tuple(sorted(selected, key=lambda pod: pod.name))


def pool_key(ref: PoolRef, *, namespace: str) -> str:
    """Return the key of the pool that a policy in `namespace` refers to."""
    return f"{ref.namespace or namespace}/{ref.name}"


def pool_keys(policy: TenantPolicy) -> tuple[str, ...]:
    """Return the keys of the pools that `policy` refers to, in its own order, each once."""
    namespace = policy.metadata.namespace
    keys = (pool_key(ref, namespace=namespace) for ref in policy.spec.pool_refs)
    return tuple(dict.fromkeys(keys))
