"""EnginePool: the engine pods that serve one model under common rules."""

import enum
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tidegate_operator.resources.autoscaling import Autoscaling
from tidegate_operator.resources.base import (
    AGE,
    CelRule,
    Column,
    Definition,
    Model,
    Resource,
    condition_column,
)
from tidegate_operator.resources.engine_pool_status import EnginePoolStatus
from tidegate_operator.resources.fields import (
    AllowedNamespaces,
    HoldTime,
    LabelSelector,
    Name,
    NamespacesFrom,
    TimeLimit,
    Weight,
)


class WorkloadKind(enum.StrEnum):
    """The kinds of workload that a pool can scale."""

    DEPLOYMENT = "Deployment"
    STATEFUL_SET = "StatefulSet"


class WorkloadRef(Model):
    """The workload whose replicas the pool's `/scale` sets."""

    api_version: Annotated[
        Literal["apps/v1"], Field(description="API version of the workload: apps/v1.")
    ]
    kind: Annotated[WorkloadKind, Field(description="Deployment or StatefulSet.")]
    name: Annotated[Name, Field(description="Name of the workload, in the pool's namespace.")]


class PrefillChunk(Model):
    """How many prompt tokens of one request a step may take."""

    cel_rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!has(self.min) || !has(self.max) || self.min <= self.max",
            "min must be at most max",
            ".min",
        ),
    )

    min: Annotated[
        int | None,
        Field(ge=1, le=1_048_576, description="Fewest tokens; default is the engine's."),
    ] = None
    max: Annotated[
        int | None,
        Field(ge=1, le=1_048_576, description="Most tokens; default is the engine's."),
    ] = None


class Batching(Model):
    """How engines form the batch of a step; live, and lowering drains down."""

    cel_rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!has(self.maxBatchedTokens) || !has(self.prefillChunk)"
            " || (self.prefillChunk.?min.orValue(1) <= self.maxBatchedTokens"
            " && self.prefillChunk.?max.orValue(1) <= self.maxBatchedTokens)",
            "prefillChunk must not exceed maxBatchedTokens",
            ".prefillChunk",
        ),
    )

    max_num_seqs: Annotated[
        int | None,
        Field(ge=1, le=65_536, description="Requests in one step; default is the engine's."),
    ] = None
    max_batched_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            le=1_048_576,
            description="Tokens computed in one step; default is the engine's.",
        ),
    ] = None
    wait_window: Annotated[
        HoldTime | None,
        Field(
            description="Longest time, at most 60s, that a first arrival is held to fill a batch; "
            "default is the engine's."
        ),
    ] = None
    prefill_chunk: Annotated[
        PrefillChunk | None,
        Field(description="Prompt tokens of one request in one step; default is the engine's."),
    ] = None
    max_partial_prefills: Annotated[
        int | None,
        Field(
            ge=1,
            le=65_536,
            description="Prompts that may be half read at a time; default is the engine's.",
        ),
    ] = None


class Watermarks(Model):
    """KV usage that closes and opens admission."""

    cel_rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "self.?lowPercent.orValue(80) < self.?highPercent.orValue(92)",
            "lowPercent (default 80) must be below highPercent (default 92)",
            ".lowPercent",
        ),
    )

    low_percent: Annotated[
        int,
        Field(
            ge=1,
            le=98,
            description="Percent of KV blocks in use below which admission opens again; default "
            "80.",
        ),
    ] = 80
    high_percent: Annotated[
        int,
        Field(
            ge=2,
            le=99,
            description="Percent of KV blocks in use that closes admission and starts "
            "preemption; default 92.",
        ),
    ] = 92


class KvEstimate(enum.StrEnum):
    """How the KV that a request will need is estimated at admission."""

    PREDICTED = "Predicted"
    WORST_CASE = "WorstCase"
    OPTIMISTIC = "Optimistic"


class PoolKv(Model):
    """How engines spend their KV blocks; live."""

    watermarks: Annotated[
        Watermarks, Field(description="KV usage that closes and opens admission.")
    ] = Watermarks()
    estimate: Annotated[
        KvEstimate,
        Field(
            description="KV that admission expects a request to need: Predicted, WorstCase or "
            "Optimistic; default Predicted."
        ),
    ] = KvEstimate.PREDICTED


class UnknownAction(enum.StrEnum):
    """What happens to a request of no known tenant."""

    REJECT = "Reject"
    ADMIT = "Admit"


class UnknownTenants(Model):
    """Requests without a known identity."""

    action: Annotated[
        UnknownAction,
        Field(description="Reject answers 401, Admit serves as set here; default Reject."),
    ] = UnknownAction.REJECT
    priority_tier: Annotated[
        Name | None,
        Field(description="PriorityTier of these requests; default is the global default tier."),
    ] = None
    weight: Annotated[
        Weight, Field(description="Share of these requests together in the tier; default 100.")
    ] = 100
    max_running: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000,
            description="Such requests running in one engine; default no limit.",
        ),
    ] = None


class DrainVictim(enum.StrEnum):
    """Which engine goes first when the pool shrinks."""

    FEWEST_TOKENS = "FewestTokens"
    OLDEST = "Oldest"


class Drain(Model):
    """How engines leave."""

    timeout: Annotated[
        TimeLimit | None,
        Field(description="Longest time, up to 24h, to finish requests; default the engine's."),
    ] = None
    victim: Annotated[
        DrainVictim,
        Field(
            description="Engine that leaves first: the one with the FewestTokens in KV, or the "
            "Oldest; default FewestTokens."
        ),
    ] = DrainVictim.FEWEST_TOKENS


class EnginePoolSpec(Model):
    """Which pods belong to the pool, and the rules that they run under."""

    cel_rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!has(self.replicas) || has(self.workloadRef)",
            "replicas needs workloadRef: without it there is nothing to scale",
            ".replicas",
        ),
        CelRule(
            "has(self.workloadRef) || self.?autoscaling.?driver.orValue('None') == 'None'",
            "driver needs workloadRef: without it there is nothing to scale",
            ".autoscaling",
        ),
    )

    selector: Annotated[
        LabelSelector,
        Field(description="Labels of the pool's pods, in the pool's namespace."),
        CelRule(
            "(has(self.matchLabels) && size(self.matchLabels) > 0) || "
            "(has(self.matchExpressions) && size(self.matchExpressions) > 0)",
            "must not be empty: it would take every pod of the namespace",
        ),
    ]
    workload_ref: Annotated[
        WorkloadRef | None,
        Field(description="Workload that `/scale` scales; without it the pool is attach-only."),
    ] = None
    replicas: Annotated[
        int | None,
        Field(
            ge=0,
            le=10_000,
            description="Engines wanted; set by `kubectl scale` and autoscalers; default is what "
            "the workload has.",
        ),
    ] = None
    batching: Annotated[Batching, Field(description="How engines form the batch of a step.")] = (
        Batching()
    )
    kv: Annotated[PoolKv, Field(description="How engines spend their KV blocks.")] = PoolKv()
    unknown_tenants: Annotated[
        UnknownTenants, Field(description="What happens to requests of no known tenant.")
    ] = UnknownTenants()
    allowed_namespaces: Annotated[
        AllowedNamespaces,
        Field(description="Namespaces whose TenantPolicies may name this pool; default Same."),
    ] = AllowedNamespaces(from_=NamespacesFrom.SAME)
    autoscaling: Annotated[
        Autoscaling | None,
        Field(description="Bounds and signals of autoscaling; default none."),
    ] = None
    drain: Annotated[
        Drain,
        Field(description="How engines leave at scale-down and shutdown."),
    ] = Drain()


class EnginePool(Resource):
    """The engine pods that serve one model, and the rules that they run under."""

    definition: ClassVar[Definition] = Definition(
        kind="EnginePool",
        plural="enginepools",
        short_name="epool",
        has_scale=True,
        columns=(
            Column("Ready", ".status.engines.summary", description="Ready engines of all."),
            condition_column("Programmed"),
            Column("Revision", ".status.policy.revision", "integer", "Newest policy revision."),
            Column("KV", ".status.usage.kvPercent", "integer", "Percent of KV blocks in use."),
            Column("Waiting", ".status.usage.waiting", "integer", "Requests waiting."),
            AGE,
        ),
    )

    spec: Annotated[
        EnginePoolSpec, Field(description="Which pods belong to the pool, under which rules.")
    ]
    status: Annotated[
        EnginePoolStatus, Field(description="What the operator found; written by it alone.")
    ] = EnginePoolStatus()
