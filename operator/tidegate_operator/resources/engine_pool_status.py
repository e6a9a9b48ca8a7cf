"""The status of an EnginePool."""

from typing import Annotated

from pydantic import Field

from tidegate_operator.resources.base import (
    LIST_SET,
    Count,
    Model,
    Percent,
    Status,
    Timestamp,
)
from tidegate_operator.resources.fields import Duration, Name


class PublishedPolicy(Model):
    """The newest policy snapshot of the pool."""

    revision: Annotated[Count | None, Field(description="Number of the snapshot; only grows.")] = (
        None
    )
    digest: Annotated[str | None, Field(max_length=128, description="SHA-256 of the snapshot.")] = (
        None
    )
    published_time: Annotated[
        Timestamp | None, Field(description="When the snapshot was handed to the engines.")
    ] = None


class EngineCounts(Model):
    """How many engines there are, and how many run the newest snapshot."""

    ready: Annotated[Count | None, Field(description="Engines that are ready.")] = None
    programmed: Annotated[
        Count | None, Field(description="Ready engines that run the newest revision.")
    ] = None
    summary: Annotated[
        str | None,
        Field(max_length=64, description="Ready engines of all engines, such as 5/5."),
    ] = None


class PoolCapacity(Model):
    """What the ready engines have together."""

    kv_blocks: Annotated[Count | None, Field(description="KV blocks on the devices.")] = None
    host_blocks: Annotated[
        Count | None, Field(description="KV blocks on the hosts, for swapped requests.")
    ] = None


class PoolUsage(Model):
    """What the ready engines are doing."""

    running: Annotated[Count | None, Field(description="Requests running.")] = None
    waiting: Annotated[Count | None, Field(description="Requests waiting.")] = None
    swapped: Annotated[
        Count | None, Field(description="Requests preempted, with their KV on the host.")
    ] = None
    kv_percent: Annotated[Percent | None, Field(description="Percent of all KV blocks in use.")] = (
        None
    )
    queue_time_p99: Annotated[
        Duration | None, Field(description="99th percentile of the time spent waiting.")
    ] = None
    batch_size_mean: Annotated[
        Count | None, Field(description="Mean number of requests in a step, rounded.")
    ] = None


class EnginePoolStatus(Status):
    """What the operator found, and what the engines report."""

    replicas: Annotated[
        Count | None, Field(description="Replicas of the workload; read by autoscalers.")
    ] = None
    selector: Annotated[
        str | None,
        Field(
            max_length=32768,
            description="The pods of the pool, as a selector in text form; read by autoscalers.",
        ),
    ] = None
    policy: Annotated[PublishedPolicy | None, Field(description="The newest policy snapshot.")] = (
        None
    )
    engines: Annotated[EngineCounts | None, Field(description="Engines, counted.")] = None
    capacity: Annotated[
        PoolCapacity | None, Field(description="KV blocks of the ready engines together.")
    ] = None
    usage: Annotated[PoolUsage | None, Field(description="What the ready engines are doing.")] = (
        None
    )
    laggards: Annotated[
        tuple[Name, ...],
        LIST_SET,
        Field(
            max_length=10,
            description="Pods that are ready and don't run the newest revision, at most 10.",
        ),
    ] = ()
