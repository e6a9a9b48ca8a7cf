"""Every rule of every kind, broken once: kubectl names the field and the limit; nothing is stored.

Most rows are derived from the generated schema, so that a new field can't be forgotten. Rules
between fields (CEL) and the limits that the design promises are written by hand.
"""

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from tidegate_devcluster.kubectl import Kubectl
from tidegate_operator.crds import structural_schema
from tidegate_operator.resources import KINDS
from tidegate_testing.manifests import (
    REMOVED,
    changed,
    full_manifest,
    minimal_manifest,
    policy_with_references,
)
from tidegate_testing.violations import rules, violations

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

SCHEMAS = {
    kind.definition.kind: structural_schema(kind, leave_out=["metadata"])["properties"]["spec"]
    for kind in KINDS
}
PLURALS = {kind.definition.kind: kind.definition.plural for kind in KINDS}


@dataclass(frozen=True)
class Row:
    """One bad object and what the refusal has to say.

    Attributes:
        says: The field's path, then whatever else the message has to contain.
        rule: The CEL rule that is broken, as `violations.rules` names it; None for other rules.
    """

    name: str
    manifest: dict[str, Any] = field(repr=False)
    says: tuple[str, ...]
    rule: str | None = None

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])


def derived_rows() -> Iterator[Row]:
    for kind, schema in SCHEMAS.items():
        examples = [full_manifest(kind)]
        if kind == "TenantPolicy":
            examples.append(policy_with_references())
        seen: set[str] = set()
        for manifest in examples:
            for violation in violations(schema, manifest["spec"]):
                if violation.rule in seen:
                    continue
                seen.add(violation.rule)
                yield Row(
                    f"{kind} {violation.rule}",
                    changed(manifest, {violation.path: violation.value}),
                    (f"{violation.blamed}: ", *violation.says),
                )


def cel_row(
    kind: str, path: str, *, message: str, blamed: str, changes: Mapping[str, object]
) -> Row:
    detail = ", ".join(f"{where} = {str(value)[:60]}" for where, value in changes.items())
    return Row(
        f"{kind} {blamed} {message} ({detail})",
        changed(full_manifest(kind), changes),
        (f"{blamed}: Invalid value", message),
        rule=f"{kind} {path}: {message}",
    )


SELECTORS = (
    ("PriorityTier", "spec.allowedNamespaces.selector"),
    ("EnginePool", "spec.allowedNamespaces.selector"),
    ("EnginePool", "spec.selector"),
)


def selector_rows() -> Iterator[Row]:
    for kind, selector in SELECTORS:
        labels = f"{selector}.matchLabels"
        message = "every label key must have 1 to 317 characters"
        for key in ("", "k" * 318):
            yield cel_row(
                kind, labels, message=message, blamed=labels, changes={labels: {key: "x"}}
            )
        requirement = f"{selector}.matchExpressions"
        message = (
            "values must be given with In and NotIn, and left out with Exists and DoesNotExist"
        )
        for operator, values in (("Exists", ["a"]), ("DoesNotExist", ["a"]), ("NotIn", [])):
            yield cel_row(
                kind,
                f"{requirement}.*",
                message=message,
                blamed=f"{requirement}[0].values",
                changes={f"{requirement}.0.operator": operator, f"{requirement}.0.values": values},
            )


def namespace_rows() -> Iterator[Row]:
    path = "spec.allowedNamespaces"
    message = "selector must be given with from: Selector, and left out otherwise"
    for kind in ("PriorityTier", "EnginePool"):
        for changes in ({f"{path}.from": "All"}, {f"{path}.selector": REMOVED}):
            yield cel_row(kind, path, message=message, blamed=f"{path}.selector", changes=changes)
    yield cel_row(
        "PriorityTier",
        path,
        message="must be All or Selector: a cluster-scoped tier has no namespace to be the Same as",
        blamed=f"{path}.from",
        changes={path: {"from": "Same"}},
    )


def rows_between_fields() -> Iterator[Row]:
    for inline in ("preemption", "serviceLevel"):
        reference = "preemptionPolicyRef" if inline == "preemption" else "serviceLevelRef"
        yield cel_row(
            "TenantPolicy",
            "spec",
            message=f"{inline} and {reference} exclude each other: give at most one",
            blamed=f"spec.{inline}",
            changes={f"spec.{reference}": {"name": "other"}},
        )
    for twice in ({"name": "llama"}, {"name": "llama", "namespace": "shared"}):
        yield cel_row(
            "TenantPolicy",
            "spec.poolRefs",
            message="must name each pool only once",
            blamed="spec.poolRefs",
            changes={"spec.poolRefs": [twice, {"name": "other"}, twice]},
        )
    yield cel_row(
        "EnginePool",
        "spec",
        message="replicas needs workloadRef: without it there is nothing to scale",
        blamed="spec.replicas",
        changes={"spec.workloadRef": REMOVED},
    )
    yield cel_row(
        "EnginePool",
        "spec",
        message="driver needs workloadRef: without it there is nothing to scale",
        blamed="spec.autoscaling",
        changes={"spec.workloadRef": REMOVED, "spec.replicas": REMOVED},
    )
    takes_all: tuple[dict[str, object], ...] = ({}, {"matchLabels": {}, "matchExpressions": []})
    for empty in takes_all:
        yield cel_row(
            "EnginePool",
            "spec.selector",
            message="must not be empty: it would take every pod of the namespace",
            blamed="spec.selector",
            changes={"spec.selector": empty},
        )
    yield cel_row(
        "EnginePool",
        "spec.batching.prefillChunk",
        message="min must be at most max",
        blamed="spec.batching.prefillChunk.min",
        changes={"spec.batching.prefillChunk": {"min": 65, "max": 64}},
    )
    for prefill in ({"min": 2049}, {"max": 2049}, {"min": 1, "max": 2049}):
        yield cel_row(
            "EnginePool",
            "spec.batching",
            message="prefillChunk must not exceed maxBatchedTokens",
            blamed="spec.batching.prefillChunk",
            changes={"spec.batching.prefillChunk": prefill},
        )
    for watermarks in (
        {"lowPercent": 90, "highPercent": 90},
        {"lowPercent": 92},
        {"highPercent": 80},
    ):
        yield cel_row(
            "EnginePool",
            "spec.kv.watermarks",
            message="lowPercent (default 80) must be below highPercent (default 92)",
            blamed="spec.kv.watermarks.lowPercent",
            changes={"spec.kv.watermarks": watermarks},
        )
    yield cel_row(
        "EnginePool",
        "spec.autoscaling",
        message="minReplicas (default 1) must be at most maxReplicas",
        blamed="spec.autoscaling.minReplicas",
        changes={"spec.autoscaling": {"minReplicas": 9, "maxReplicas": 8}},
    )


# The limits that users were promised, whatever the models say: kind, field, bad values.
PROMISED: tuple[tuple[str, str, tuple[object, ...]], ...] = (
    ("PriorityTier", "spec.value", (2**31, -(2**31) - 1)),
    ("PriorityTier", "spec.reservedSharePercent", (-1, 91)),
    ("PriorityTier", "spec.waitWindow", ("5 minutes", "-1s", "61s", "1d", "")),
    ("PreemptionPolicy", "spec.maxPreemptionsPerRequest", (0, 101)),
    ("ServiceLevel", "spec.ttft.target", ("0s", "0ms", "24h1ms", "500", "1.5s")),
    ("TenantPolicy", "spec.poolRefs", ([], [{"name": f"pool-{n}"} for n in range(33)])),
    ("TenantPolicy", "spec.weight", (-1, 1_000_001, 1.5)),
    ("TenantPolicy", "spec.kv.nominalPercent", (-1, 101)),
    ("TenantPolicy", "spec.kv.borrowingLimitPercent", (-1, 101)),
    ("TenantPolicy", "spec.kv.lendablePercent", (-1, 101)),
    ("TenantPolicy", "spec.priorityTier", ("a" * 254, "Gold", "gold_tier")),
    ("TenantPolicy", "spec.tenant", ("a" * 508, "two words", "bell\x07", "line\nbreak", "\x85")),
    ("EnginePool", "spec.kv.watermarks.lowPercent", (0,)),
    ("EnginePool", "spec.kv.watermarks.highPercent", (100,)),
)


def promised_rows() -> Iterator[Row]:
    for kind, path, values in PROMISED:
        for value in values:
            manifest = changed(full_manifest(kind), {path: value})
            yield Row(f"{kind} {path} = {str(value)[:20]!r}", manifest, (f"{path}: ",))


ROWS = (
    *derived_rows(),
    *selector_rows(),
    *namespace_rows(),
    *rows_between_fields(),
    *promised_rows(),
)


@dataclass(frozen=True)
class Answer:
    message: str
    is_stored: bool


@pytest.fixture(scope="module")
def answers(kubectl: Kubectl) -> dict[str, Answer]:
    """What happened to each row, by its name; one kubectl call for all objects of a kind."""
    run = uuid.uuid4().hex[:8]
    kubectl("create", "namespace", f"bad-{run}", check=True)
    found: dict[str, Answer] = {}
    for kind, plural in PLURALS.items():
        rows = {f"bad-{run}-{n}": row for n, row in enumerate(ROWS) if row.kind == kind}
        manifests = [changed(row.manifest, {"metadata.name": name}) for name, row in rows.items()]
        where = f"--namespace=bad-{run}"
        refused = kubectl("create", where, "-f", "-", input=yaml.safe_dump_all(manifests)).stderr
        messages = dict(re.findall(r'^.*? "(bad-\S+)" is invalid: (.*)$', refused, re.MULTILINE))
        stored = kubectl("get", plural, where, "-o", "name", check=True).stdout.split()
        for name, row in rows.items():
            is_stored = f"{kind.lower()}.tidegate.io/{name}" in stored
            found[row.name] = Answer(messages.get(name, ""), is_stored)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_bad_object_is_refused_by_field_and_rule(row: Row, answers: dict[str, Answer]) -> None:
    answer = answers[row.name]

    assert not answer.is_stored
    assert [words for words in row.says if words not in answer.message] == [], answer.message


def test_every_rule_between_fields_is_broken_by_a_row() -> None:
    declared = {f"{kind} {rule}" for kind, schema in SCHEMAS.items() for rule in rules(schema)}
    # The rules on single durations are broken by the rows that are derived from the schema.
    of_durations = {rule for rule in declared if "must be a duration" in rule}

    assert {row.rule for row in ROWS if row.rule} == declared - of_durations
    for rule in of_durations:
        assert any(rule == f"{row.kind} {row.says[0]}{row.says[-1]}" for row in ROWS), (
            f"no row breaks {rule}"
        )


def test_names_of_rows_are_unique() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_unknown_field_is_refused_by_name(kubectl: Kubectl, namespace: str) -> None:
    manifest = changed(minimal_manifest("TenantPolicy"), {"spec.wieght": 3})

    refused = kubectl("create", f"--namespace={namespace}", "-f", "-", input=yaml.dump(manifest))

    assert refused.returncode != 0
    assert 'unknown field "spec.wieght"' in refused.stderr


def test_pool_without_workload_refuses_to_be_scaled(kubectl: Kubectl, namespace: str) -> None:
    where = f"--namespace={namespace}"
    kubectl("create", where, "-f", "-", input=yaml.dump(minimal_manifest("EnginePool")), check=True)

    refused = kubectl("scale", "epool/minimal", "--replicas=3", where)

    assert refused.returncode != 0
    assert "spec.replicas" in refused.stderr
    assert "replicas needs workloadRef" in refused.stderr
