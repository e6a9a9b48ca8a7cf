"""PreemptionPolicy: whether and how running requests may be taken out."""

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


class PreemptionMode(enum.StrEnum):
    """What becomes of a victim's KV."""

    AUTO = "Auto"
    SWAP = "Swap"
    RECOMPUTE = "Recompute"


class Reclaim(enum.StrEnum):
    """May a tenant below its nominal KV take back what others borrowed."""

    NEVER = "Never"
    ALWAYS = "Always"


class PreemptionPolicySpec(Model):
    """When a request may be a victim, and what happens to its KV then."""

    preemptible: Annotated[
        bool,
        Field(
            description="Whether running requests may be taken out; false admits only what fits "
            "in the tenant's nominal KV at its worst; default true."
        ),
    ] = True
    mode: Annotated[
        PreemptionMode,
        Field(
            description="What becomes of a victim's KV: Swap to the host, Recompute later, or "
            "Auto for the cheaper; default Auto."
        ),
    ] = PreemptionMode.AUTO
    max_preemptions_per_request: Annotated[
        int,
        Field(
            ge=1,
            le=100,
            description="Number of preemptions after which a request is no longer a victim; "
            "default 3.",
        ),
    ] = 3
    min_quantum_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="Tokens a request may produce after each admission before it can be a "
            "victim; default 16.",
        ),
    ] = 16
    reclaim: Annotated[
        Reclaim,
        Field(
            description="Whether the tenant, while below its nominal KV, takes back blocks that "
            "others borrowed: Always or Never; default Always."
        ),
    ] = Reclaim.ALWAYS


class PreemptionPolicyStatus(Status):
    """Whether the policy is valid."""


class PreemptionPolicy(Resource):
    """How requests of the tenants that refer to it are preempted when memory runs short."""

    definition: ClassVar[Definition] = Definition(
        kind="PreemptionPolicy",
        plural="preemptionpolicies",
        short_name="ppol",
        columns=(
            Column("Preemptible", ".spec.preemptible", "boolean", "May requests be taken out."),
            Column("Mode", ".spec.mode", description="What becomes of a victim's KV."),
            condition_column("Accepted"),
            AGE,
            Column(
                "Max",
                ".spec.maxPreemptionsPerRequest",
                "integer",
                "Preemptions after which a request is no longer a victim.",
                is_wide=True,
            ),
            Column("Reclaim", ".spec.reclaim", is_wide=True),
        ),
    )

    spec: Annotated[
        PreemptionPolicySpec, Field(description="When a request may be a victim, and how.")
    ]
    status: Annotated[
        PreemptionPolicyStatus, Field(description="What the operator found; written by it alone.")
    ] = PreemptionPolicyStatus()
