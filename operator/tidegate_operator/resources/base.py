"""What every custom resource is made of: model rules, declarative marks, metadata, conditions."""

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

GROUP = "tidegate.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
CATEGORY = "tidegate"

# JSON numbers are exact up to here in every client; CRD bounds are stored as float64 as well.
MAX_COUNT = 2**53 - 1

RULES_KEY = "x-kubernetes-validations"
STORED_DEFAULT_KEY = "x-tidegate-stored-default"


@dataclass(frozen=True, slots=True)
class CelRule:
    """A rule that the API server checks, on a model (`cel_rules`) or on one field (metadata).

    Attributes:
        rule: CEL expression; `self` is the value that carries the rule.
        message: What must hold, with the limit; the API server puts the field's path before it.
        field_path: The field to blame, relative to `self` (`.selector`). None blames `self`.
    """

    rule: str
    message: str
    field_path: str | None = None

    def as_json(self) -> dict[str, str]:
        """Return the rule as an entry of `x-kubernetes-validations`."""
        entry = {"rule": self.rule, "message": self.message}
        return entry | ({"fieldPath": self.field_path} if self.field_path else {})

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        return {**schema, RULES_KEY: [*schema.get(RULES_KEY, ()), self.as_json()]}


@dataclass(frozen=True, slots=True)
class SchemaKey:
    """One keyword added to the JSON schema of the field that carries it."""

    key: str
    value: object

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(core_schema), self.key: self.value}


# The API server writes the default into the object, so that a printer column can show it. Only
# for defaults that never change: a stored default outlives the release that chose it.
STORED_DEFAULT = SchemaKey(STORED_DEFAULT_KEY, value=True)

# A list whose entries are distinct values.
LIST_SET = SchemaKey("x-kubernetes-list-type", "set")


class Model(BaseModel):
    """A frozen value whose JSON names are camelCase.

    Unknown fields are ignored when reading, so that an older operator reads newer objects.
    """

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True
    )

    cel_rules: ClassVar[tuple[CelRule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        if cls.cel_rules:
            target = handler.resolve_ref_schema(schema)
            target[RULES_KEY] = [rule.as_json() for rule in cls.cel_rules]
        return schema

    def as_json(self) -> dict[str, Any]:
        """Return the JSON form, with exactly the fields that were set and are not None."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)


Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Percent = Annotated[int, Field(ge=0, le=100)]
Timestamp = Annotated[AwareDatetime, SchemaKey("maxLength", 64)]


class ObjectMeta(Model):
    """The part of `metadata` that Tidegate reads; all but the name come from the API server."""

    name: str
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    creation_timestamp: AwareDatetime | None = None
    labels: dict[str, str] = {}
    resource_version: str = ""

    @cached_property
    def qualified_name(self) -> str:
        """`namespace/name`, or the name alone where the kind is cluster-scoped."""
        return f"{self.namespace}/{self.name}" if self.namespace else self.name

    @cached_property
    def seniority(self) -> tuple[datetime, str]:
        """Sort key that puts the oldest object first; objects not stored yet come last."""
        return (self.creation_timestamp or datetime.max.replace(tzinfo=UTC), self.qualified_name)


class ConditionStatus(enum.StrEnum):
    """The three states that the Kubernetes API conventions allow."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Model):
    """One aspect of the object's state, in the common Kubernetes form."""

    type: Annotated[
        str,
        Field(
            min_length=1,
            max_length=316,
            pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?$",
            description="Aspect of the object that this condition speaks about.",
        ),
    ]
    status: Annotated[
        ConditionStatus, Field(description="Whether the aspect holds: True, False or Unknown.")
    ]
    reason: Annotated[
        str,
        Field(
            min_length=1,
            max_length=1024,
            pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            description="Cause of the status, one word for programs.",
        ),
    ]
    message: Annotated[
        str, Field(max_length=32768, description="Explanation that a person can act on.")
    ] = ""
    observed_generation: Annotated[
        Count | None, Field(description="Generation of the object that this verdict is about.")
    ] = None
    last_transition_time: Annotated[
        Timestamp, Field(description="When the status last changed from one value to another.")
    ]


class Status(Model):
    """What every kind reports."""

    observed_generation: Annotated[
        Count | None, Field(description="Generation of the spec that this status is about.")
    ] = None
    conditions: Annotated[
        tuple[Condition, ...],
        SchemaKey("x-kubernetes-list-type", "map"),
        SchemaKey("x-kubernetes-list-map-keys", ("type",)),
        Field(max_length=16, description="Verdicts on the object, one per type."),
    ] = ()

    def condition(self, condition_type: str) -> Condition | None:
        """Return the condition of that type, None when there is none."""
        return next((c for c in self.conditions if c.type == condition_type), None)


@dataclass(frozen=True, slots=True)
class Column:
    """One column of `kubectl get`; wide ones appear with `-o wide` only."""

    name: str
    json_path: str
    type: str = "string"
    description: str = ""
    is_wide: bool = False


AGE = Column("Age", ".metadata.creationTimestamp", "date")


def condition_column(
    condition_type: str, *, name: str | None = None, is_wide: bool = False
) -> Column:
    """Return the column that shows the status of one condition."""
    path = f".status.conditions[?(@.type=='{condition_type}')].status"
    description = f"Status of the condition {condition_type}."
    return Column(name or condition_type, path, description=description, is_wide=is_wide)


@dataclass(frozen=True, slots=True)
class Definition:
    """How a kind is known to the API server, apart from its schema."""

    kind: str
    plural: str
    short_name: str
    columns: tuple[Column, ...]
    is_namespaced: bool = True
    has_scale: bool = False

    @property
    def crd_name(self) -> str:
        """The name of the CustomResourceDefinition."""
        return f"{self.plural}.{GROUP}"


class Resource(Model):
    """One object of a kind as the API server stores it; each kind adds `spec` and `status`."""

    definition: ClassVar[Definition]

    metadata: ObjectMeta

    def as_json(self) -> dict[str, Any]:
        """Return the manifest, with exactly the fields that were set and are not None."""
        return {
            "apiVersion": API_VERSION,
            "kind": self.definition.kind,
            **super().as_json(),
        }
