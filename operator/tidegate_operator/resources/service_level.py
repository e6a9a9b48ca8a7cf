"""ServiceLevel: latency targets and limits of requests."""

import enum
from typing import Annotated, ClassVar

from pydantic import Field

from tidegate_operator.resources.base import (
    AGE,
    Column,
    Definition,
    Model,
    Resource,
    Status,
    condition_column,
)
from tidegate_operator.resources.fields import TimeLimit


class OnOverload(enum.StrEnum):
    """What happens to a request that is predicted to miss its target."""

    SHED = "Shed"
    QUEUE = "Queue"


class LatencyTarget(Model):
    """A latency that a given percentile of requests has to meet."""

    target: Annotated[
        TimeLimit, Field(description="Latency to stay at or below, as a duration up to 24h.")
    ]
    percentile: Annotated[
        int,
        Field(
            ge=1,
            le=99,
            description="Percent of the requests (ttft), or of the times between two tokens (itl), "
            "that have to meet it; default 99.",
        ),
    ] = 99


class ServiceLevelSpec(Model):
    """Latency targets, limits, and what to do when they can't be met."""

    ttft: Annotated[
        LatencyTarget | None,
        Field(
            description="Target of the time to the first token, seen at the server and queueing "
            "included; default none."
        ),
    ] = None
    itl: Annotated[
        LatencyTarget | None,
        Field(
            description="Target of the time between two tokens; it bounds prefill chunks and the "
            "batch, and how long streams may pause for the prompts of a higher tier (without a "
            "target 1s); default none."
        ),
    ] = None
    queue_timeout: Annotated[
        TimeLimit | None,
        Field(
            description="Longest wait, up to 24h, from a request's arrival until a first token of "
            "it is scheduled, then it is answered 504; default none."
        ),
    ] = None
    request_timeout: Annotated[
        TimeLimit | None,
        Field(
            description="Longest time, up to 24h, from a request's arrival to its end, then it is "
            "cancelled; default none."
        ),
    ] = None
    on_overload: Annotated[
        OnOverload,
        Field(
            description="What happens to an arriving request that is predicted to miss its ttft: "
            "Shed answers 429, Queue lets it wait; default Queue."
        ),
    ] = OnOverload.QUEUE
    window: Annotated[
        TimeLimit,
        Field(
            description="Window, up to 24h, over which status reports the attainment; default 5m."
        ),
    ] = "5m"


class ServiceLevelStatus(Status):
    """Whether the service level is valid."""


class ServiceLevel(Resource):
    """Latency that the tenants that refer to it are promised, and the limits of a request."""

    definition: ClassVar[Definition] = Definition(
        kind="ServiceLevel",
        plural="servicelevels",
        short_name="slo",
        columns=(
            Column("TTFT", ".spec.ttft.target", description="Target of the time to first token."),
            Column("ITL", ".spec.itl.target", description="Target of the inter-token latency."),
            Column("Overload", ".spec.onOverload", description="Shed or Queue."),
            condition_column("Accepted"),
            AGE,
            Column("Queue-Timeout", ".spec.queueTimeout", is_wide=True),
            Column("Request-Timeout", ".spec.requestTimeout", is_wide=True),
        ),
    )

    spec: Annotated[
        ServiceLevelSpec, Field(description="Latency targets, limits and what overload does.")
    ]
    status: Annotated[
        ServiceLevelStatus, Field(description="What the operator found; written by it alone.")
    ] = ServiceLevelStatus()
