"""PriorityTier: a priority level of the whole cluster."""

import enum
from typing import Annotated, ClassVar

from pydantic import Field

from tidegate_operator.resources.base import (
    AGE,
    CelRule,
    Column,
    Definition,
    Model,
    Resource,
    Status,
    condition_column,
)
from tidegate_operator.resources.fields import AllowedNamespaces, HoldTime, NamespacesFrom


class TierPreemption(enum.StrEnum):
    """May requests of a tier take running requests of lower tiers out."""

    PREEMPT_LOWER = "PreemptLower"
    NEVER = "Never"


class PriorityTierSpec(Model):
    """What the tier is worth and who may use it."""

    value: Annotated[
        int,
        Field(
            ge=-(2**31),
            le=2**31 - 1,
            description="Rank of the tier: higher goes first, negative may be shed under "
            "overload; default 0.",
        ),
    ] = 0
    reserved_share_percent: Annotated[
        int,
        Field(
            ge=0,
            le=90,
            description="Percent of the charged service kept for this tier while it has work, so "
            "that it never starves; where the tiers of a pool want more than 90 together, the "
            "newest beyond get 0; default 0.",
        ),
    ] = 0
    preemption: Annotated[
        TierPreemption,
        Field(
            description="Whether requests of this tier may take running requests of lower tiers "
            "out; default PreemptLower."
        ),
    ] = TierPreemption.PREEMPT_LOWER
    wait_window: Annotated[
        HoldTime | None,
        Field(
            description="Longest time, at most 60s, that a first arrival is held to fill a batch "
            "while the engine has room; default is the pool's."
        ),
    ] = None
    allowed_namespaces: Annotated[
        AllowedNamespaces,
        Field(
            description="Namespaces whose TenantPolicies may name this tier: All or a Selector; "
            "default All."
        ),
        CelRule(
            "self.from != 'Same'",
            "must be All or Selector: a cluster-scoped tier has no namespace to be the Same as",
            ".from",
        ),
    ] = AllowedNamespaces(from_=NamespacesFrom.ALL)
    global_default: Annotated[
        bool,
        Field(
            description="Makes this the tier of policies that name none; the oldest of several "
            "wins; default false."
        ),
    ] = False
    description: Annotated[
        str, Field(max_length=1024, description="Free text shown by `kubectl get ptier -o wide`.")
    ] = ""


class PriorityTierStatus(Status):
    """Whether the tier is in force."""


class PriorityTier(Resource):
    """A priority level: requests of a higher tier are served before those of a lower one."""

    definition: ClassVar[Definition] = Definition(
        kind="PriorityTier",
        plural="prioritytiers",
        short_name="ptier",
        is_namespaced=False,
        columns=(
            Column("Value", ".spec.value", "integer", "Rank of the tier; higher goes first."),
            Column("Default", ".spec.globalDefault", "boolean", "Tier of policies that name none."),
            condition_column("Accepted"),
            AGE,
            Column("Description", ".spec.description", is_wide=True),
        ),
    )

    spec: Annotated[PriorityTierSpec, Field(description="What the tier is worth and to whom.")]
    status: Annotated[
        PriorityTierStatus, Field(description="What the operator found; written by it alone.")
    ] = PriorityTierStatus()
