"""The generator of CustomResourceDefinitions, and the ones that are committed."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field

from tidegate_operator.crds import (
    SchemaError,
    crd_files,
    custom_resource_definition,
    main,
    structural_schema,
)
from tidegate_operator.resources import (
    KINDS,
    CelRule,
    EnginePool,
    Model,
    PriorityTier,
    TenantPolicy,
)
from tidegate_operator.resources.base import LIST_SET, STORED_DEFAULT, SchemaKey
from tidegate_testing.manifests import KIND_NAMES, full_manifest, policy_with_references

Schema = dict[str, Any]

CRDS = Path(__file__).parents[2] / "crds"
Bounded = Annotated[int, Field(ge=0, le=9)]
Text = Annotated[str, Field(max_length=9)]


class Inner(Model):
    """Something inside."""

    cel_rules = (CelRule("self.low <= self.high", "low must be at most high", ".low"),)

    low: Bounded
    high: Bounded


class Open(BaseModel):
    """Keeps whatever it is given."""

    model_config = ConfigDict(extra="allow")

    low: Bounded


class Node(Model):
    """Refers to itself."""

    next: "Node | None" = None


def field_schema(annotation: object, **keywords: object) -> Schema:
    """The schema of a field `it` of that type, in a model `Outer`."""
    outer = type("Outer", (Model,), {"__annotations__": {"it": annotation}, **keywords})
    schema: Schema = structural_schema(outer)["properties"]["it"]
    return schema


def nodes(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield from nodes(schema[keyword], f"{path}.*")


def root(kind: str) -> Schema:
    (crd,) = (custom_resource_definition(k) for k in KINDS if k.definition.kind == kind)
    schema: Schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


ALL_NODES = [
    (f"{kind}{path}", schema) for kind in KIND_NAMES for path, schema in nodes(root(kind), "")
]


def test_committed_crds_are_the_generated_ones() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in CRDS.iterdir()}

    assert committed == crd_files()


def test_generating_removes_the_file_of_a_kind_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "tidegate.io_gones.yaml").write_text("old", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")

    main([str(tmp_path / ".")])

    written = {path.name for path in tmp_path.iterdir()}
    assert written == {*crd_files(), "notes.txt"}


@pytest.mark.parametrize("name", sorted(crd_files()))
def test_crd_fits_into_the_annotation_of_client_side_apply(name: str) -> None:
    assert len(crd_files()[name].encode()) < 256 * 1024


def test_every_value_is_bounded_status_included() -> None:
    def is_unbounded(schema: Schema) -> bool:
        match schema["type"]:
            case "string":
                return "maxLength" not in schema and "enum" not in schema
            case "array":
                return "maxItems" not in schema
            case "integer":
                return not {"minimum", "maximum"} <= schema.keys()
            case "object":
                return "properties" not in schema and "maxProperties" not in schema
        return False

    assert [path for path, schema in ALL_NODES if is_unbounded(schema)] == []


def test_every_field_explains_itself() -> None:
    fields = [(path, schema) for path, schema in ALL_NODES if not path.endswith("*")]

    assert [path for path, schema in fields if not schema.get("description")] == []


def test_weight_is_the_only_stored_default_beside_the_status_of_what_nobody_has_seen() -> None:
    stored = {path: schema["default"] for path, schema in ALL_NODES if "default" in schema}

    unseen = {f"{kind}.status": {"observedGeneration": 0} for kind in KIND_NAMES}
    assert stored == {"TenantPolicy.spec.weight": 100, **unseen}


def test_choices_are_those_of_the_design() -> None:
    offered = {path: schema["enum"] for path, schema in ALL_NODES if "enum" in schema}

    namespaces = ["Same", "All", "Selector"]
    expected = {
        "PriorityTier.spec.preemption": ["PreemptLower", "Never"],
        "PriorityTier.spec.allowedNamespaces.from": namespaces,
        "PreemptionPolicy.spec.mode": ["Auto", "Swap", "Recompute"],
        "PreemptionPolicy.spec.reclaim": ["Never", "Always"],
        "ServiceLevel.spec.onOverload": ["Shed", "Queue"],
        "TenantPolicy.spec.prefixCache": ["Private", "Shared"],
        "TenantPolicy.spec.stopPolicy": ["None", "Hold", "Drain", "Cancel"],
        "EnginePool.spec.workloadRef.kind": ["Deployment", "StatefulSet"],
        "EnginePool.spec.kv.estimate": ["Predicted", "WorstCase", "Optimistic"],
        "EnginePool.spec.unknownTenants.action": ["Reject", "Admit"],
        "EnginePool.spec.allowedNamespaces.from": namespaces,
        "EnginePool.spec.autoscaling.driver": ["KEDA", "HPA", "None"],
        "EnginePool.spec.drain.victim": ["FewestTokens", "Oldest"],
    }
    assert {path: offered.get(path) for path in expected} == expected


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_full_manifest_sets_every_field(kind: str) -> None:
    def paths(value: object, path: str) -> Iterator[str]:
        yield path
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from paths(inner, f"{path}.{name}")
        if isinstance(value, list):
            for inner in value:
                yield from paths(inner, f"{path}.*")

    specs = [full_manifest(kind)["spec"]]
    if kind == "TenantPolicy":
        specs.append(policy_with_references()["spec"])
    declared = {path for path, _ in nodes(root(kind)["properties"]["spec"], "spec")}
    given = {path for spec in specs for path in paths(spec, "spec")}

    assert {path for path in declared - given if not path.endswith("matchLabels.*")} == set()


def test_pool_has_a_scale_subresource_and_no_other_kind() -> None:
    subresources = {
        kind.definition.kind: custom_resource_definition(kind)["spec"]["versions"][0][
            "subresources"
        ]
        for kind in KINDS
    }

    assert {kind for kind, each in subresources.items() if "scale" in each} == {"EnginePool"}
    assert all("status" in each for each in subresources.values())


def test_only_the_tier_is_cluster_scoped() -> None:
    scopes = {kind: custom_resource_definition(kind)["spec"]["scope"] for kind in KINDS}

    assert {kind for kind, scope in scopes.items() if scope == "Cluster"} == {PriorityTier}
    assert scopes[TenantPolicy] == scopes[EnginePool] == "Namespaced"


def test_text_of_a_crd_has_no_yaml_aliases() -> None:
    for text in crd_files().values():
        anchors = [e for e in yaml.parse(text) if getattr(e, "anchor", None)]
        assert anchors == []


def test_reference_is_inlined_and_the_field_describes_itself() -> None:
    schema = field_schema(Annotated[Inner, Field(description="Mine.")])

    assert schema["description"] == "Mine."
    assert schema["properties"]["low"] == {
        "type": "integer",
        "format": "int64",
        "minimum": 0,
        "maximum": 9,
    }


def test_rules_of_a_model_and_of_its_field_are_joined() -> None:
    rule = CelRule("self.high < 9", "high must be below 9")

    schema = field_schema(Annotated[Inner, rule])

    assert schema["x-kubernetes-validations"] == [
        {
            "rule": "self.low <= self.high",
            "message": "low must be at most high",
            "fieldPath": ".low",
        },
        {"rule": "self.high < 9", "message": "high must be below 9"},
    ]


def test_optional_field_is_its_type_without_a_default() -> None:
    assert field_schema(Text | None, it=None) == {"type": "string", "maxLength": 9}


def test_default_is_stored_only_where_marked() -> None:
    assert "default" not in field_schema(Bounded, it=3)
    assert field_schema(Annotated[Bounded, STORED_DEFAULT], it=3)["default"] == 3


def test_exclusive_bounds_become_flags() -> None:
    schema = field_schema(Annotated[int, Field(gt=0, lt=9)])

    assert (schema["minimum"], schema["exclusiveMinimum"]) == (0, True)
    assert (schema["maximum"], schema["exclusiveMaximum"]) == (9, True)


def test_constant_becomes_an_enumeration() -> None:
    assert field_schema(Literal["v1"]) == {"type": "string", "enum": ["v1"]}


def test_list_of_distinct_values_is_a_set() -> None:
    schema = field_schema(Annotated[tuple[Text, ...], LIST_SET, Field(max_length=4)])

    assert schema == {
        "type": "array",
        "items": {"type": "string", "maxLength": 9},
        "maxItems": 4,
        "x-kubernetes-list-type": "set",
    }


MAP_LIST = SchemaKey("x-kubernetes-list-type", "map")
MAP_KEYS = SchemaKey("x-kubernetes-list-map-keys", ("name",))


class Optionally(Model):
    """Has a name, perhaps."""

    name: Text | None = None


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [
        (float, "is a float"),
        (Text | Bounded, "is a union"),
        (Any, "no single type"),
        (object, "no single type"),
        (timedelta, "format duration"),
        (str, "has no maxLength"),
        (Annotated[int, Field(ge=0)], "has no maximum"),
        (dict, "is an object without a schema"),
        (tuple[Text, ...], "has no maxItems"),
        (dict[str, Text], "has no maxProperties"),
        (Annotated[tuple[str, ...], Field(max_length=2)], r"it\.\*: has no maxLength"),
        (tuple[Text, Text], "uses prefixItems"),
        (Annotated[dict[Text, Text], Field(max_length=2)], "uses propertyNames"),
        (Annotated[set[Text], Field(max_length=2)], "uses uniqueItems"),
        (Annotated[Text, SchemaKey("pattern", "^(?!x)")], "RE2"),
        (Annotated[Text, SchemaKey("pattern", r"(a)\1")], "RE2"),
        (Annotated[Bounded, STORED_DEFAULT], "store its default, but has none"),
        (Annotated[tuple[Inner, ...], LIST_SET, Field(max_length=2)], "set of objects"),
        (
            Annotated[tuple[Optionally, ...], MAP_LIST, MAP_KEYS, Field(max_length=2)],
            "map key name, which is neither required nor defaulted",
        ),
    ],
)
def test_what_a_structural_schema_cannot_say_is_refused(annotation: object, problem: str) -> None:
    with pytest.raises(SchemaError, match=problem) as caught:
        field_schema(annotation)

    assert caught.value.model == "Outer"
    assert caught.value.field.startswith("it")


def test_model_that_keeps_unknown_fields_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"^Open: allows other properties than its own$"):
        structural_schema(Open)


def test_recursive_model_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"Node\.next: refers to Node again"):
        field_schema(Node)
