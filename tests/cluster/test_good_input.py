"""Valid objects are stored as written; status, scale and columns work with the real kubectl."""

import json

import pytest
import yaml

from tidegate_devcluster.kubectl import Kubectl
from tidegate_operator.crds import UNSEEN
from tidegate_operator.resources import (
    KINDS,
    Condition,
    ConditionStatus,
    EngineCounts,
    EnginePoolStatus,
    PoolUsage,
    PoolVerdict,
    PublishedPolicy,
    TenantPolicyStatus,
    TenantUsage,
)
from tidegate_testing.manifests import (
    KIND_NAMES,
    Manifest,
    changed,
    full_manifest,
    minimal_manifest,
    policy_with_references,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

MODELS = {kind.definition.kind: kind for kind in KINDS}
NOW = "2026-11-30T12:00:00Z"
LONG = "a" * 253
DOTTED = "team.example.com"


def named(manifest: Manifest, namespace: str) -> Manifest:
    """The same under a name that no other test uses, even where the kind is cluster-scoped."""
    return changed(manifest, {"metadata.name": f"{manifest['metadata']['name']}.{namespace}"})


def create(kubectl: Kubectl, namespace: str, manifest: Manifest) -> Manifest:
    done = kubectl(
        *("create", f"--namespace={namespace}", "-f", "-", "-o", "json"),
        input=yaml.dump(manifest),
        check=True,
    )
    stored: Manifest = json.loads(done.stdout)
    return stored


def write_status(
    kubectl: Kubectl, namespace: str, kind: str, status: TenantPolicyStatus | EnginePoolStatus
) -> None:
    patch = json.dumps({"status": status.as_json()})
    kubectl(
        *("patch", kind, "full", f"--namespace={namespace}", "--subresource=status"),
        *("--type=merge", "-p", patch),
        check=True,
    )


def programmed() -> Condition:
    return Condition.model_validate(
        {
            "type": "Programmed",
            "status": ConditionStatus.TRUE,
            "reason": "Programmed",
            "lastTransitionTime": NOW,
        }
    )


def row(kubectl: Kubectl, namespace: str, kind: str) -> dict[str, str]:
    """What `kubectl get -o wide` shows of the object `full`, by column."""
    shown = kubectl("get", kind, "full", f"--namespace={namespace}", "-o", "wide", check=True)
    header, values = shown.stdout.splitlines()
    return dict(zip(header.split(), values.split(), strict=True))


@pytest.mark.parametrize(
    "manifest",
    [*map(full_manifest, KIND_NAMES), policy_with_references()],
    ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}",
)
def test_object_with_every_field_set_is_stored_as_written(
    manifest: Manifest, kubectl: Kubectl, namespace: str
) -> None:
    stored = create(kubectl, namespace, named(manifest, namespace))

    assert stored["spec"] == manifest["spec"]
    resource = MODELS[manifest["kind"]].model_validate(stored)
    assert resource.as_json()["spec"] == manifest["spec"]


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_object_without_choices_stores_no_choices(
    kind: str, kubectl: Kubectl, namespace: str
) -> None:
    manifest = minimal_manifest(kind)

    stored = create(kubectl, namespace, named(manifest, namespace))

    # The weight is there for its column; any other default could never be changed again.
    defaults = {"weight": 100} if kind == "TenantPolicy" else {}
    assert stored["spec"] == manifest["spec"] | defaults


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("name", ["x" * 230, "dots.in.a.name"], ids=["long", "dotted"])
def test_names_may_be_long_and_dotted(
    kind: str, name: str, kubectl: Kubectl, namespace: str
) -> None:
    # Together with the namespace, which keeps cluster-scoped names apart: up to 253 characters.
    full_name = f"{name}.{namespace}".ljust(253 if len(name) > 100 else 0, "z")

    stored = create(kubectl, namespace, changed(full_manifest(kind), {"metadata.name": full_name}))

    assert stored["metadata"]["name"] == full_name


@pytest.mark.parametrize("name", [LONG, DOTTED], ids=["long", "dotted"])
def test_referenced_names_may_be_long_and_dotted(
    name: str, kubectl: Kubectl, namespace: str
) -> None:
    manifest = changed(
        policy_with_references(),
        {
            "spec.poolRefs.0.name": name,
            "spec.priorityTier": name,
            "spec.allowedTiers": [name],
            "spec.preemptionPolicyRef.name": name,
            "spec.serviceLevelRef.name": name,
            "spec.apiKeySecretRefs": [{"name": name, "key": LONG}],
        },
    )

    assert create(kubectl, namespace, manifest)["spec"] == manifest["spec"]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("PriorityTier", "value", -(2**31)),
        ("PriorityTier", "value", 2**31 - 1),
        ("PriorityTier", "reservedSharePercent", 90),
        ("PriorityTier", "waitWindow", "0s"),
        ("PriorityTier", "waitWindow", "60s"),
        ("PriorityTier", "description", "波" * 1024),
        ("PreemptionPolicy", "maxPreemptionsPerRequest", 100),
        ("ServiceLevel", "ttft", {"target": "24h"}),
        ("TenantPolicy", "poolRefs", [{"name": f"pool-{n}"} for n in range(32)]),
        ("TenantPolicy", "tenant", "ünï/团队-1@example"),
        ("TenantPolicy", "weight", 0),
        ("TenantPolicy", "weight", 1_000_000),
        ("TenantPolicy", "kv", {"nominalPercent": 100, "borrowingLimitPercent": 0}),
        ("EnginePool", "kv", {"watermarks": {"lowPercent": 1, "highPercent": 99}}),
        ("EnginePool", "kv", {"watermarks": {"lowPercent": 91}}),
        ("EnginePool", "batching", {"prefillChunk": {"max": 64}, "maxBatchedTokens": 64}),
        ("EnginePool", "batching", {"prefillChunk": {"min": 64}}),
        ("EnginePool", "batching", {"maxBatchedTokens": 1}),
        ("EnginePool", "replicas", 0),
        ("EnginePool", "allowedNamespaces", {"from": "Selector", "selector": {}}),
    ],
)
def test_the_outermost_values_are_allowed(
    kind: str, field: str, value: object, *, kubectl: Kubectl, namespace: str
) -> None:
    manifest = named(changed(full_manifest(kind), {f"spec.{field}": value}), namespace)

    assert create(kubectl, namespace, manifest)["spec"][field] == value


def test_status_written_with_the_spec_is_dropped(kubectl: Kubectl, namespace: str) -> None:
    manifest = changed(full_manifest("TenantPolicy"), {"status": {"tenant": "someone-else"}})

    assert create(kubectl, namespace, manifest)["status"] == UNSEEN


def test_columns_of_a_tenant_policy(kubectl: Kubectl, namespace: str) -> None:
    create(kubectl, namespace, full_manifest("TenantPolicy"))
    verdict = PoolVerdict(name="llama", namespace=namespace, accepted=True, revision=7)
    usage = TenantUsage(kv_percent=12, share_percent=34)
    missed = programmed().model_copy(
        update={"type": "ServiceLevelMet", "status": ConditionStatus.FALSE, "reason": "Missed"}
    )
    unready = missed.model_copy(update={"type": "Ready"})
    status = TenantPolicyStatus(
        tenant="acme/chat",
        tier="gold",
        pools=(verdict,),
        usage=usage,
        conditions=(programmed(), missed, unready),
    )

    write_status(kubectl, namespace, "tp", status)

    shown = row(kubectl, namespace, "tp")
    narrow = ["NAME", "TENANT", "TIER", "WEIGHT", "PROGRAMMED", "READY", "SLO", "AGE"]
    assert list(shown) == [*narrow, "REVISION", "KV", "SHARE"]
    assert {name: text for name, text in shown.items() if name != "AGE"} == {
        "NAME": "full",
        "TENANT": "acme/chat",
        "TIER": "gold",
        "WEIGHT": "300",
        "PROGRAMMED": "True",
        "READY": "False",
        "SLO": "False",
        "REVISION": "7",
        "KV": "12",
        "SHARE": "34",
    }


def test_columns_of_an_engine_pool(kubectl: Kubectl, namespace: str) -> None:
    create(kubectl, namespace, full_manifest("EnginePool"))
    status = EnginePoolStatus(
        engines=EngineCounts(ready=5, programmed=5, summary="5/5"),
        policy=PublishedPolicy(revision=7),
        usage=PoolUsage(kv_percent=60, waiting=3),
        conditions=(programmed(),),
    )

    write_status(kubectl, namespace, "epool", status)

    shown = row(kubectl, namespace, "epool")
    assert list(shown) == ["NAME", "READY", "PROGRAMMED", "REVISION", "KV", "WAITING", "AGE"]
    assert list(shown.values())[1:-1] == ["5/5", "True", "7", "60", "3"]


@pytest.mark.parametrize(
    ("kind", "short", "columns"),
    [
        (
            "PriorityTier",
            "ptier",
            {"VALUE": "-5", "DEFAULT": "false", "ACCEPTED": "True", "DESCRIPTION": "nightly"},
        ),
        (
            "PreemptionPolicy",
            "ppol",
            {
                "PREEMPTIBLE": "false",
                "MODE": "Swap",
                "ACCEPTED": "True",
                "MAX": "5",
                "RECLAIM": "Never",
            },
        ),
        (
            "ServiceLevel",
            "slo",
            {
                "TTFT": "500ms",
                "ITL": "40ms",
                "OVERLOAD": "Shed",
                "ACCEPTED": "True",
                "QUEUE-TIMEOUT": "30s",
                "REQUEST-TIMEOUT": "1h30m",
            },
        ),
    ],
)
def test_columns_of_the_other_kinds(
    kubectl: Kubectl, namespace: str, kind: str, short: str, columns: dict[str, str]
) -> None:
    manifest = full_manifest(kind, f"full-{namespace}")
    if kind == "PriorityTier":
        manifest = changed(manifest, {"spec.description": "nightly", "spec.globalDefault": False})
    create(kubectl, namespace, manifest)
    name, where = manifest["metadata"]["name"], f"--namespace={namespace}"
    accepted = programmed().model_copy(update={"type": "Accepted", "reason": "Accepted"})
    status = {"status": {"conditions": [accepted.as_json()]}}
    patch = ("--subresource=status", "--type=merge", "-p", json.dumps(status))
    kubectl("patch", short, name, where, *patch, check=True)
    shown = kubectl("get", short, name, where, "-o", "wide", check=True).stdout
    header, values = map(str.split, shown.splitlines())
    found = dict(zip(header, values, strict=True))
    assert found.pop("NAME") == name
    assert found.pop("AGE")
    assert found == columns


def test_pool_is_scaled_like_a_workload(kubectl: Kubectl, namespace: str) -> None:
    create(kubectl, namespace, full_manifest("EnginePool"))
    status = EnginePoolStatus(replicas=5, selector="app=engine")
    write_status(kubectl, namespace, "epool", status)

    kubectl("scale", "epool/full", "--replicas=6", f"--namespace={namespace}", check=True)

    path = f"/apis/tidegate.io/v1alpha1/namespaces/{namespace}/enginepools/full/scale"
    scale = json.loads(kubectl("get", "--raw", path, check=True).stdout)
    assert scale["spec"] == {"replicas": 6}
    assert scale["status"] == {"replicas": 5, "selector": "app=engine"}


def test_every_kind_is_listed_by_its_category(kubectl: Kubectl) -> None:
    listed = kubectl("api-resources", "--categories=tidegate", "-o", "wide", check=True).stdout

    short_names = {line.split()[0]: line.split()[1] for line in listed.splitlines()[1:]}
    assert short_names == {
        "prioritytiers": "ptier",
        "preemptionpolicies": "ppol",
        "servicelevels": "slo",
        "tenantpolicies": "tp",
        "enginepools": "epool",
    }


def test_explain_tells_meaning_and_default(kubectl: Kubectl) -> None:
    explained = kubectl("explain", "tp.spec.weight", check=True).stdout

    assert "Share among the tenants of the tier" in explained
    assert "default 100" in explained
