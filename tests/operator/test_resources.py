"""The custom resources as values."""

import json
from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from tidegate_operator.resources import (
    KINDS,
    AllowedNamespaces,
    EnginePoolSpec,
    LabelSelector,
    NamespacesFrom,
    ObjectMeta,
    StopPolicy,
    TenantPolicy,
    TenantPolicySpec,
    duration_seconds,
    duration_text,
)
from tidegate_testing.manifests import (
    KIND_NAMES,
    Manifest,
    changed,
    full_manifest,
    minimal_manifest,
    policy_with_references,
)

MODELS = {kind.definition.kind: kind for kind in KINDS}


@pytest.mark.parametrize(
    "manifest",
    [*map(full_manifest, KIND_NAMES), *map(minimal_manifest, KIND_NAMES), policy_with_references()],
    ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}",
)
def test_manifest_survives_reading_and_writing(manifest: Manifest) -> None:
    resource = MODELS[manifest["kind"]].model_validate(manifest)

    assert json.loads(json.dumps(resource.as_json())) == manifest


def test_python_names_and_json_names_are_both_taken() -> None:
    spec = TenantPolicySpec.model_validate({"poolRefs": [{"name": "a"}], "stop_policy": "Hold"})

    assert spec.stop_policy is StopPolicy.HOLD


def test_fields_of_a_newer_version_are_ignored() -> None:
    manifest = changed(minimal_manifest("TenantPolicy"), {"spec.colour": "blue"})

    assert "colour" not in TenantPolicy.model_validate(manifest).as_json()["spec"]


def test_values_are_frozen() -> None:
    spec = TenantPolicySpec.model_validate({"poolRefs": [{"name": "a"}]})

    with pytest.raises(ValidationError, match="frozen"):
        spec.weight = 3  # type: ignore[misc]


def test_tenant_defaults_to_where_the_policy_lives() -> None:
    manifest = changed(minimal_manifest("TenantPolicy", "chat"), {"metadata.namespace": "acme"})

    assert TenantPolicy.model_validate(manifest).tenant == "acme/chat"
    named = changed(manifest, {"spec.tenant": "acme"})
    assert TenantPolicy.model_validate(named).tenant == "acme"


def test_unset_pool_settings_have_the_documented_defaults() -> None:
    spec = EnginePoolSpec.model_validate({"selector": {}})

    assert (spec.kv.watermarks.low_percent, spec.kv.watermarks.high_percent) == (80, 92)
    assert spec.unknown_tenants.action == "Reject"
    assert spec.allowed_namespaces.from_ is NamespacesFrom.SAME
    assert spec.batching.max_num_seqs is None


@pytest.mark.parametrize("field", ["maxRunning", "maxQueued", "maxQueuedTokens"])
def test_no_limit_keeps_every_request_of_a_tenant_out(field: str) -> None:
    manifest = changed(full_manifest("TenantPolicy"), {f"spec.concurrency.{field}": 0})

    with pytest.raises(ValidationError, match=f"{field}\n.*greater than or equal to 1"):
        TenantPolicy.model_validate(manifest)


def test_oldest_object_is_the_most_senior_and_names_break_ties() -> None:
    def stored(name: str, second: int) -> ObjectMeta:
        created = datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC)
        return ObjectMeta(name=name, namespace="ns", creation_timestamp=created)

    unstored = ObjectMeta(name="a", namespace="ns")
    metas = [unstored, stored("b", 1), stored("z", 0), stored("a", 1)]

    ranked = sorted(metas, key=lambda meta: meta.seniority)

    assert ranked == [stored("z", 0), stored("a", 1), stored("b", 1), unstored]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("30s", 30), ("5m", 300), ("1h30m", 5400), ("1m1s1ms", 61.001), ("0s", 0)],
)
def test_duration_in_seconds(text: str, seconds: float) -> None:
    assert duration_seconds(text) == seconds


def test_equal_durations_are_one_number_however_they_are_written() -> None:
    assert all(
        duration_seconds(f"{ms // 1000}s{ms % 1000}ms") == duration_seconds(f"{ms}ms")
        for ms in range(10_000)
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.00001, "1ms"),
        (0.25, "250ms"),
        (1.0, "1s"),
        (1.001, "1001ms"),
        (99.9991, "1m40s"),
        (300.0, "5m"),
        (5400.0, "1h30m"),
        (86_400.5, "24h1s"),
    ],
)
def test_duration_as_text(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_text_of_a_duration_is_read_as_the_same_duration() -> None:
    lengths = [*range(1, 100_000, 7), *range(100_000, 90_000_000, 61_000)]
    assert all(duration_seconds(duration_text(ms / 1000)) == ms / 1000 for ms in lengths)


@pytest.mark.parametrize("text", ["", "5", "1.5s", "-1s", "5 s", "s", "1d", "1s ", "100000s", "५s"])
def test_other_formats_are_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="is not like 250ms"):
        duration_seconds(text)


@pytest.mark.parametrize(
    ("operator", "values", "labels", "expected"),
    [
        ("In", ["a", "b"], {"zone": "a"}, True),
        ("In", ["a", "b"], {"zone": "c"}, False),
        ("In", ["a"], {}, False),
        ("NotIn", ["a"], {"zone": "b"}, True),
        ("NotIn", ["a"], {"zone": "a"}, False),
        ("NotIn", ["a"], {}, True),
        ("Exists", [], {"zone": ""}, True),
        ("Exists", [], {}, False),
        ("DoesNotExist", [], {}, True),
        ("DoesNotExist", [], {"zone": ""}, False),
    ],
)
def test_label_requirement(
    operator: str, values: list[str], labels: dict[str, str], *, expected: bool
) -> None:
    requirement = {"key": "zone", "operator": operator, "values": values}
    selector = LabelSelector.model_validate({"matchExpressions": [requirement]})

    assert selector.matches(labels) is expected


def test_selector_needs_every_label_and_an_empty_one_takes_all() -> None:
    selector = LabelSelector(match_labels={"app": "engine", "tier": "gold"})

    assert selector.matches({"app": "engine", "tier": "gold", "more": "x"})
    assert not selector.matches({"app": "engine"})
    assert LabelSelector().matches({})


@pytest.mark.parametrize(
    ("allowed", "namespace", "expected"),
    [
        ({"from": "All"}, "other", True),
        ({"from": "Same"}, "own", True),
        ({"from": "Same"}, "other", False),
        ({"from": "Selector", "selector": {"matchLabels": {"team": "a"}}}, "other", True),
        ({"from": "Selector", "selector": {"matchLabels": {"team": "b"}}}, "own", False),
        ({"from": "Selector"}, "own", False),
    ],
)
def test_namespaces_let_in(allowed: dict[str, object], namespace: str, *, expected: bool) -> None:
    rule = AllowedNamespaces.model_validate(allowed)

    is_allowed = rule.allows(namespace=namespace, own_namespace="own", labels={"team": "a"})

    assert is_allowed is expected
