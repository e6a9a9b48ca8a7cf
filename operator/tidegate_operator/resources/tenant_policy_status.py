"""The status of a TenantPolicy."""

from typing import Annotated

from pydantic import Field

from tidegate_operator.resources.base import Count, Model, Percent, SchemaKey, Status, Timestamp
from tidegate_operator.resources.fields import Duration, Name, Namespace


class PoolVerdict(Model):
    """What became of the policy in one pool."""

    name: Annotated[Name, Field(description="Name of the EnginePool.")]
    namespace: Annotated[Namespace, Field(description="Namespace of the EnginePool.")]
    accepted: Annotated[
        bool | None, Field(description="Whether this pool takes the policy as it is written.")
    ] = None
    reason: Annotated[
        str | None, Field(max_length=1024, description="Why it is, or is not, one word.")
    ] = None
    revision: Annotated[
        Count | None,
        Field(description="First policy revision of the pool that holds this generation."),
    ] = None
    programmed_time: Annotated[
        Timestamp | None,
        Field(description="When every ready engine of the pool ran that revision."),
    ] = None


class TenantUsage(Model):
    """What the tenant uses now, over all its pools; totals run since the engines started."""

    running: Annotated[Count | None, Field(description="Requests running.")] = None
    waiting: Annotated[Count | None, Field(description="Requests waiting.")] = None
    swapped: Annotated[
        Count | None, Field(description="Requests preempted, with their KV on the host.")
    ] = None
    kv_percent: Annotated[
        Percent | None, Field(description="Percent of the KV blocks that the tenant holds.")
    ] = None
    borrowed_percent: Annotated[
        Percent | None, Field(description="Percent of the KV blocks held above the nominal.")
    ] = None
    output_tokens_per_second: Annotated[
        Count | None, Field(description="Tokens produced per second.")
    ] = None
    share_percent: Annotated[
        Percent | None, Field(description="Percent of its tier's service that the tenant got.")
    ] = None
    prompt_tokens: Annotated[Count | None, Field(description="Prompt tokens computed.")] = None
    cached_tokens: Annotated[
        Count | None, Field(description="Prompt tokens found in the prefix cache.")
    ] = None
    output_tokens: Annotated[Count | None, Field(description="Tokens produced.")] = None
    recomputed_tokens: Annotated[
        Count | None, Field(description="Tokens computed again after preemptions.")
    ] = None
    kv_seconds: Annotated[
        Count | None, Field(description="KV blocks times the seconds that they were held.")
    ] = None
    shed: Annotated[Count | None, Field(description="Requests refused under overload.")] = None
    stop_time: Annotated[
        Duration | None,
        Field(
            description="Longest time that an engine took from the arrival of stopPolicy Drain or "
            "Cancel to the tenant's last KV block free; absent while that isn't so."
        ),
    ] = None
    preempted: Annotated[Count | None, Field(description="Preemptions suffered.")] = None
    cancelled: Annotated[Count | None, Field(description="Requests cancelled.")] = None


class ServiceLevelAttainment(Model):
    """Latency as measured, against the tenant's targets."""

    ttft: Annotated[
        Duration | None, Field(description="Time to first token at the target's percentile.")
    ] = None
    itl: Annotated[
        Duration | None, Field(description="Inter-token latency at the target's percentile.")
    ] = None
    attainment_percent: Annotated[
        Percent | None, Field(description="Percent of the requests that met every target.")
    ] = None
    window: Annotated[Duration | None, Field(description="Window that the figures are about.")] = (
        None
    )


class TenantPolicyStatus(Status):
    """What the operator found, and what the engines report."""

    tenant: Annotated[
        str | None, Field(max_length=507, description="Identity in force, the default included.")
    ] = None
    tier: Annotated[
        str | None,
        Field(max_length=253, description="Tier in force, the default included."),
    ] = None
    pools: Annotated[
        tuple[PoolVerdict, ...],
        SchemaKey("x-kubernetes-list-type", "map"),
        SchemaKey("x-kubernetes-list-map-keys", ("namespace", "name")),
        Field(max_length=32, description="What became of the policy, pool by pool."),
    ] = ()
    usage: Annotated[
        TenantUsage | None, Field(description="What the tenant uses now, and has used.")
    ] = None
    service_level: Annotated[
        ServiceLevelAttainment | None,
        Field(description="Latency measured in the window; absent without traffic."),
    ] = None
