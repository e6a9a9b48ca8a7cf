"""TenantPolicy: what one tenant may use of which pools, and in which order."""

import enum
from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import Field

from tidegate_operator.resources.base import (
    AGE,
    LIST_SET,
    STORED_DEFAULT,
    CelRule,
    Column,
    Definition,
    Model,
    Percent,
    Resource,
    SchemaKey,
    condition_column,
)
from tidegate_operator.resources.fields import LocalRef, Name, Namespace, Tokens, Weight
from tidegate_operator.resources.preemption_policy import PreemptionPolicySpec
from tidegate_operator.resources.service_level import ServiceLevelSpec
from tidegate_operator.resources.tenant_policy_status import TenantPolicyStatus

# Printable and without white space: the identity ends up in metric labels, logs and headers.
TenantName = Annotated[
    str, Field(min_length=1, max_length=2 * 253 + 1, pattern=r"^[^\s\x00-\x1f\x7f-\x9f]+$")
]


class PrefixCache(enum.StrEnum):
    """With whom KV blocks of equal prefixes are shared."""

    PRIVATE = "Private"
    SHARED = "Shared"


class StopPolicy(enum.StrEnum):
    """The tenant's kill switch."""

    NONE = "None"
    HOLD = "Hold"
    DRAIN = "Drain"
    CANCEL = "Cancel"


class PoolRef(Model):
    """Reference to an EnginePool."""

    name: Annotated[Name, Field(description="Name of the EnginePool.")]
    namespace: Annotated[
        Namespace | None,
        Field(
            description="Namespace of the EnginePool, which has to allow this one; default is the "
            "policy's own."
        ),
    ] = None


class KvShare(Model):
    """The tenant's part of each engine's KV blocks."""

    nominal_percent: Annotated[
        Percent,
        Field(
            description="Percent of each engine's KV blocks that is this tenant's and that nobody "
            "takes from it; default 0."
        ),
    ] = 0
    borrowing_limit_percent: Annotated[
        Percent | None,
        Field(
            description="Percent of each engine's KV blocks that the tenant may use above its "
            "nominal; 0 for none; default no limit."
        ),
    ] = None
    lendable_percent: Annotated[
        Percent,
        Field(description="Percent of its unused nominal that others may borrow; default 100."),
    ] = 100


class RateLimit(Model):
    """Token buckets over the whole pool."""

    requests_per_minute: Annotated[
        int | None,
        Field(
            ge=1,
            le=1_000_000_000,
            description="Requests per minute over the whole pool; default no limit.",
        ),
    ] = None
    tokens_per_minute: Annotated[
        int | None,
        Field(
            ge=1,
            le=1_000_000_000_000,
            description="Uncached prompt tokens plus output tokens per minute over the whole "
            "pool; default no limit.",
        ),
    ] = None
    burst_percent: Annotated[
        int,
        Field(
            ge=1,
            le=10_000,
            description="Depth of the token bucket in percent of the limit; default 100.",
        ),
    ] = 100


class ConcurrencyLimit(Model):
    """Requests of the tenant that one engine holds at a time."""

    max_running: Annotated[
        int | None,
        Field(ge=1, le=100_000, description="Requests running in one engine; default no limit."),
    ] = None
    max_queued: Annotated[
        int | None,
        Field(ge=1, le=1_000_000, description="Requests waiting in one engine; default no limit."),
    ] = None
    max_queued_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            le=1_000_000_000,
            description="Prompt tokens of the requests waiting in one engine; default no limit.",
        ),
    ] = None


class RequestLimits(Model):
    """What a single request may ask for."""

    max_prompt_tokens: Annotated[
        Tokens | None,
        Field(description="Tokens of the prompt; default only the model's own limit."),
    ] = None
    max_output_tokens: Annotated[
        Tokens | None,
        Field(description="Tokens of the answer; default only the model's own limit."),
    ] = None


class SecretKeyRef(Model):
    """One key of a Secret in the policy's namespace."""

    name: Annotated[Name, Field(description="Name of the Secret, in the policy's namespace.")]
    key: Annotated[
        str,
        Field(
            min_length=1,
            max_length=253,
            pattern=r"^[-._a-zA-Z0-9]+$",
            description="Key inside the Secret whose value is an API key.",
        ),
    ]


class TenantPolicySpec(Model):
    """Who the tenant is, which pools it uses and how much of them."""

    cel_rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!(has(self.preemptionPolicyRef) && has(self.preemption))",
            "preemption and preemptionPolicyRef exclude each other: give at most one",
            ".preemption",
        ),
        CelRule(
            "!(has(self.serviceLevelRef) && has(self.serviceLevel))",
            "serviceLevel and serviceLevelRef exclude each other: give at most one",
            ".serviceLevel",
        ),
    )

    tenant: Annotated[
        TenantName | None,
        Field(
            description="Identity of the tenant in engines and metrics, without spaces; default "
            "is namespace/name of the policy. What is before a slash has to be the policy's "
            "namespace."
        ),
    ] = None
    pool_refs: Annotated[
        tuple[PoolRef, ...],
        Field(min_length=1, max_length=32, description="EnginePools that the policy is for."),
        CelRule(
            # `has` instead of a default: the cost of comparing a default counts as unbounded.
            "self.all(a, self.exists_one(b, a.name == b.name"
            " && has(a.__namespace__) == has(b.__namespace__)"
            " && (!has(a.__namespace__) || a.__namespace__ == b.__namespace__)))",
            "must name each pool only once",
        ),
    ]
    priority_tier: Annotated[
        Name | None,
        Field(description="Name of the tenant's PriorityTier; default is the global default tier."),
    ] = None
    allowed_tiers: Annotated[
        tuple[Name, ...],
        LIST_SET,
        Field(
            max_length=16,
            description="Lower tiers that a request may ask for in x-tidegate-tier; default none.",
        ),
    ] = ()
    weight: Annotated[
        Weight,
        STORED_DEFAULT,
        Field(
            description="Share among the tenants of the tier; 0 is served only when nobody else in "
            "the tier wants service; default 100."
        ),
    ] = 100
    kv: Annotated[KvShare, Field(description="Part of each engine's KV blocks.")] = KvShare()
    rate: Annotated[
        RateLimit | None,
        Field(description="Limits per minute over the whole pool; default none."),
    ] = None
    concurrency: Annotated[
        ConcurrencyLimit | None,
        Field(description="Limits on the requests that one engine holds; default none."),
    ] = None
    limits: Annotated[
        RequestLimits, Field(description="Limits on a single request; default none.")
    ] = RequestLimits()
    preemption_policy_ref: Annotated[
        LocalRef | None,
        Field(description="PreemptionPolicy to use; not together with preemption; default none."),
    ] = None
    preemption: Annotated[
        PreemptionPolicySpec | None,
        Field(description="Preemption rules given here; not together with preemptionPolicyRef."),
    ] = None
    service_level_ref: Annotated[
        LocalRef | None,
        Field(description="ServiceLevel to use; not together with serviceLevel; default none."),
    ] = None
    service_level: Annotated[
        ServiceLevelSpec | None,
        Field(description="Service level given here; not together with serviceLevelRef."),
    ] = None
    cancel_on_disconnect: Annotated[
        bool,
        Field(description="Whether a request ends when its client hangs up; default true."),
    ] = True
    prefix_cache: Annotated[
        PrefixCache,
        Field(
            description="Private never shares KV blocks with another tenant, so that timing tells "
            "nothing; Shared shares them with the other tenants of the pool that are Shared, and "
            "each pays for what it holds; default Private."
        ),
    ] = PrefixCache.PRIVATE
    api_key_secret_refs: Annotated[
        tuple[SecretKeyRef, ...],
        SchemaKey("x-kubernetes-list-type", "map"),
        SchemaKey("x-kubernetes-list-map-keys", ("name", "key")),
        Field(
            max_length=64,
            description="API keys whose holder is this tenant, in Secrets labelled "
            "tidegate.io/api-keys=true; default none.",
        ),
    ] = ()
    stop_policy: Annotated[
        StopPolicy,
        Field(
            description="None serves; Hold queues and admits nothing new; Drain refuses new "
            "requests and lets others finish; Cancel ends all; default None."
        ),
    ] = StopPolicy.NONE


class TenantPolicy(Resource):
    """What one tenant may use of which pools, in which order, and which keys are its own."""

    definition: ClassVar[Definition] = Definition(
        kind="TenantPolicy",
        plural="tenantpolicies",
        short_name="tp",
        columns=(
            Column("Tenant", ".status.tenant", description="Identity in engines and metrics."),
            Column("Tier", ".status.tier", description="PriorityTier in force."),
            Column("Weight", ".spec.weight", "integer", "Share among the tenants of the tier."),
            condition_column("Programmed"),
            condition_column("Ready"),
            condition_column("ServiceLevelMet", name="SLO"),
            AGE,
            Column(
                "Revision",
                ".status.pools[0].revision",
                "integer",
                "First revision of the first pool that holds this generation.",
                is_wide=True,
            ),
            Column(
                "KV",
                ".status.usage.kvPercent",
                "integer",
                "Percent of all KV blocks.",
                is_wide=True,
            ),
            Column(
                "Share",
                ".status.usage.sharePercent",
                "integer",
                "Percent of the service received in the tier.",
                is_wide=True,
            ),
        ),
    )

    spec: Annotated[
        TenantPolicySpec,
        Field(description="Who the tenant is, and what it may use."),
    ]
    status: Annotated[
        TenantPolicyStatus, Field(description="What the operator found; written by it alone.")
    ] = TenantPolicyStatus()

    @cached_property
    def tenant(self) -> str:
        """The tenant's identity in engines and metrics."""
        return self.spec.tenant or self.metadata.qualified_name
