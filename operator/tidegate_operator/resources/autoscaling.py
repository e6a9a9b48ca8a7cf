"""The autoscaling part of an EnginePool; `behavior` has the shape that HPA and KEDA take."""

import enum
from typing import Annotated, ClassVar

from pydantic import Field

from tidegate_operator.resources.base import CelRule, Model
from tidegate_operator.resources.fields import TimeLimit


class AutoscalingDriver(enum.StrEnum):
    """Which autoscaler the operator writes an object for."""

    KEDA = "KEDA"
    HPA = "HPA"
    NONE = "None"


class PolicySelection(enum.StrEnum):
    """Which of several scaling policies counts."""

    MAX = "Max"
    MIN = "Min"
    DISABLED = "Disabled"


class ScalingPolicyType(enum.StrEnum):
    """What the value of a scaling policy counts."""

    PODS = "Pods"
    PERCENT = "Percent"


class ScalingPolicy(Model):
    """How much may change within a period."""

    type: Annotated[
        ScalingPolicyType, Field(description="What the value counts: Pods, or Percent of them.")
    ]
    value: Annotated[int, Field(ge=1, le=10_000, description="Largest change within the period.")]
    period_seconds: Annotated[
        int, Field(ge=1, le=1800, description="Length of the period in seconds.")
    ]


class ScalingRules(Model):
    """How fast replicas may change in one direction."""

    stabilization_window_seconds: Annotated[
        int | None,
        Field(
            ge=0,
            le=3600,
            description="Seconds of past recommendations that are looked at; default is the "
            "autoscaler's.",
        ),
    ] = None
    select_policy: Annotated[
        PolicySelection | None,
        Field(
            description="Which policy counts: Max, Min, or Disabled for no change at all; default "
            "is the autoscaler's."
        ),
    ] = None
    policies: Annotated[
        tuple[ScalingPolicy, ...],
        Field(max_length=16, description="Speed limits; default is the autoscaler's."),
    ] = ()
    tolerance: Annotated[
        str | None,
        Field(
            max_length=16,
            pattern=r"^[0-9]{1,4}(\.[0-9]{1,3})?$",
            description="Relative deviation that is left alone, as text such as 0.05; default is "
            "the autoscaler's.",
        ),
    ] = None


class ScalingBehavior(Model):
    """How fast replicas may change."""

    scale_up: Annotated[
        ScalingRules | None, Field(description="Speed of growing; default is the autoscaler's.")
    ] = None
    scale_down: Annotated[
        ScalingRules | None, Field(description="Speed of shrinking; default is the autoscaler's.")
    ] = None


class Autoscaling(Model):
    """The bounds and the signals by which the pool is scaled."""

    cel_rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "self.?minReplicas.orValue(1) <= self.maxReplicas",
            "minReplicas (default 1) must be at most maxReplicas",
            ".minReplicas",
        ),
    )

    min_replicas: Annotated[
        int, Field(ge=0, le=10_000, description="Fewest replicas; default 1.")
    ] = 1
    max_replicas: Annotated[int, Field(ge=1, le=10_000, description="Most replicas.")]
    kv_utilization_percent: Annotated[
        int | None,
        Field(ge=1, le=100, description="Percent of KV blocks in use to aim at; default none."),
    ] = None
    queue_time_p99: Annotated[
        TimeLimit | None,
        Field(description="99th percentile of the waiting time to aim at; default none."),
    ] = None
    slo_attainment_percent: Annotated[
        int | None,
        Field(
            ge=1,
            le=100,
            description="Percent of requests that have to meet their targets; default none.",
        ),
    ] = None
    driver: Annotated[
        AutoscalingDriver,
        Field(
            description="Autoscaler that the operator writes an object for: KEDA, HPA, or None "
            "to write none; default None."
        ),
    ] = AutoscalingDriver.NONE
    behavior: Annotated[
        ScalingBehavior | None,
        Field(description="How fast replicas may change; default is the autoscaler's."),
    ] = None
