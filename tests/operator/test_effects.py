"""No field is without effect: it changes what is decided."""

import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tidegate_operator.autoscalers import autoscaler
from tidegate_operator.compiler import compile_pool
from tidegate_operator.demand import demand
from tidegate_operator.resources import (
    KINDS,
    AllowedNamespaces,
    EnginePool,
    LabelSelector,
    Model,
    PreemptionPolicy,
    PriorityTier,
    ServiceLevel,
    TenantPolicy,
)
from tidegate_operator.scaling import Workload, choose_victims
from tidegate_policies.attainment import bucket_of
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import Attainment, EngineReport, TenantCounters
from tidegate_testing.manifests import Manifest, changed, full_manifest, policy_with_references
from tidegate_testing.objects import a_metadata, a_pod_view, a_view, engines

SAID_TO_PEOPLE = {
    ("PriorityTier", "spec.description"),
    # There is one version.
    ("EnginePool", "spec.workloadRef.apiVersion"),
}

_NOBODY = {"from": "Selector", "selector": {"matchLabels": {"app": "other"}}}


def _of_preemption(kind: str, path: str) -> dict[tuple[str, str], object]:
    """Return other values of the rules of preemption, as they are in a resource of `kind`."""
    return {
        (kind, f"{path}.preemptible"): True,
        (kind, f"{path}.mode"): "Recompute",
        (kind, f"{path}.maxPreemptionsPerRequest"): 4,
        (kind, f"{path}.minQuantumTokens"): 31,
        (kind, f"{path}.reclaim"): "Always",
    }


def _of_service(kind: str, path: str) -> dict[tuple[str, str], object]:
    """Return other values of a service level, as they are in a resource of `kind`."""
    return {
        (kind, f"{path}.ttft.target"): "501ms",
        (kind, f"{path}.ttft.percentile"): 96,
        (kind, f"{path}.itl.target"): "41ms",
        (kind, f"{path}.itl.percentile"): 91,
        (kind, f"{path}.queueTimeout"): "31s",
        (kind, f"{path}.requestTimeout"): "1h31m",
        (kind, f"{path}.onOverload"): "Queue",
        (kind, f"{path}.window"): "11m",
    }


def _of_scaling(path: str) -> dict[tuple[str, str], object]:
    """Return other values of how fast replicas may change in a direction."""
    return {
        ("EnginePool", f"{path}.stabilizationWindowSeconds"): 301,
        ("EnginePool", f"{path}.selectPolicy"): "Min",
        ("EnginePool", f"{path}.policies"): [{"type": "Pods", "value": 2, "periodSeconds": 9}],
        ("EnginePool", f"{path}.tolerance"): "0.06",
    }


OTHER_VALUES: dict[tuple[str, str], object] = {
    ("PriorityTier", "spec.value"): 9,
    ("PriorityTier", "spec.reservedSharePercent"): 30,
    ("PriorityTier", "spec.preemption"): "PreemptLower",
    ("PriorityTier", "spec.waitWindow"): "0s",
    ("PriorityTier", "spec.allowedNamespaces"): _NOBODY,
    ("PriorityTier", "spec.globalDefault"): False,
    **_of_preemption("PreemptionPolicy", "spec"),
    **_of_service("ServiceLevel", "spec"),
    ("TenantPolicy", "spec.tenant"): "other",
    ("TenantPolicy", "spec.poolRefs"): [{"name": "other"}],
    ("TenantPolicy", "spec.priorityTier"): "absent",
    ("TenantPolicy", "spec.allowedTiers"): [],
    ("TenantPolicy", "spec.weight"): 1,
    ("TenantPolicy", "spec.kv.nominalPercent"): 1,
    ("TenantPolicy", "spec.kv.borrowingLimitPercent"): 0,
    ("TenantPolicy", "spec.kv.lendablePercent"): 0,
    ("TenantPolicy", "spec.rate.requestsPerMinute"): 1,
    ("TenantPolicy", "spec.rate.tokensPerMinute"): 1,
    ("TenantPolicy", "spec.rate.burstPercent"): 1,
    ("TenantPolicy", "spec.concurrency.maxRunning"): 1,
    ("TenantPolicy", "spec.concurrency.maxQueued"): 1,
    ("TenantPolicy", "spec.concurrency.maxQueuedTokens"): 1,
    ("TenantPolicy", "spec.limits.maxPromptTokens"): 1,
    ("TenantPolicy", "spec.limits.maxOutputTokens"): 1,
    ("TenantPolicy", "spec.preemptionPolicyRef.name"): "absent",
    **_of_preemption("TenantPolicy", "spec.preemption"),
    ("TenantPolicy", "spec.serviceLevelRef.name"): "absent",
    **_of_service("TenantPolicy", "spec.serviceLevel"),
    ("TenantPolicy", "spec.cancelOnDisconnect"): True,
    ("TenantPolicy", "spec.apiKeySecretRefs"): [],
    ("TenantPolicy", "spec.prefixCache"): "Private",
    ("TenantPolicy", "spec.stopPolicy"): "Drain",
    ("EnginePool", "spec.selector"): {"matchLabels": {"app": "other"}},
    ("EnginePool", "spec.batching.maxNumSeqs"): 1,
    ("EnginePool", "spec.batching.maxBatchedTokens"): 4096,
    ("EnginePool", "spec.batching.waitWindow"): "0s",
    ("EnginePool", "spec.batching.prefillChunk.min"): 65,
    ("EnginePool", "spec.batching.prefillChunk.max"): 511,
    ("EnginePool", "spec.batching.maxPartialPrefills"): 1,
    ("EnginePool", "spec.kv.watermarks.lowPercent"): 71,
    ("EnginePool", "spec.kv.watermarks.highPercent"): 91,
    ("EnginePool", "spec.kv.estimate"): "Optimistic",
    ("EnginePool", "spec.unknownTenants.action"): "Reject",
    ("EnginePool", "spec.unknownTenants.priorityTier"): "gold",
    ("EnginePool", "spec.unknownTenants.weight"): 9,
    ("EnginePool", "spec.unknownTenants.maxRunning"): 9,
    ("EnginePool", "spec.allowedNamespaces"): _NOBODY,
    ("EnginePool", "spec.workloadRef.kind"): "StatefulSet",
    ("EnginePool", "spec.workloadRef.name"): "other",
    ("EnginePool", "spec.replicas"): 4,
    ("EnginePool", "spec.autoscaling.minReplicas"): 2,
    ("EnginePool", "spec.autoscaling.maxReplicas"): 9,
    ("EnginePool", "spec.autoscaling.kvUtilizationPercent"): 5,
    ("EnginePool", "spec.autoscaling.queueTimeP99"): "1s",
    ("EnginePool", "spec.autoscaling.sloAttainmentPercent"): 90,
    ("EnginePool", "spec.autoscaling.driver"): "KEDA",
    **_of_scaling("spec.autoscaling.behavior.scaleUp"),
    **_of_scaling("spec.autoscaling.behavior.scaleDown"),
    ("EnginePool", "spec.drain.timeout"): "3m",
    ("EnginePool", "spec.drain.victim"): "FewestTokens",
}


def fields_of(model: type[Model], path: str) -> Iterator[str]:
    """Yield the fields that claim to have an effect, as deep as a value can be changed alone."""
    for field in model.model_fields.values():
        inner = f"{path}.{field.alias}"
        nested = _nested(field.annotation)
        if nested is None or nested in (AllowedNamespaces, LabelSelector):
            yield inner
        else:
            yield from fields_of(nested, inner)


def _nested(annotation: Any) -> type[Model] | None:  # noqa: ANN401
    """Return the model of a field that holds one."""
    is_union = isinstance(annotation, types.UnionType)
    options = typing.get_args(annotation) if is_union else (annotation,)
    models = (o for o in options if isinstance(o, type) and issubclass(o, Model))
    return next(models, None)


def decided(kind: str = "", path: str = "", value: object = None) -> tuple[object, ...]:
    """Return all that is decided for a pool of full objects, with one field changed."""

    def read(model: type[Any], manifest: Manifest, name: str, namespace: str) -> Any:  # noqa: ANN401
        # One policy says how it is served, the other one refers to what says so.
        is_referring = kind == "TenantPolicy" and "Ref." in path
        if model.definition.kind == kind and is_referring is (name == "referring"):
            manifest = changed(manifest, {path: value})
        return model.model_validate(manifest | {"metadata": a_metadata(name, namespace)})

    def read_full(model: type[Any], name: str, namespace: str) -> Any:  # noqa: ANN401
        return read(model, full_manifest(model.definition.kind), name, namespace)

    others = {"spec.tenant": "referring", "spec.apiKeySecretRefs": []}
    referring = changed(policy_with_references(), others)
    # What the selectors of all full manifests choose.
    labels = {"app": "engine", "zone": "a"}
    pool: EnginePool = read_full(EnginePool, "llama", "team")
    view = a_view(
        pool,
        read_full(TenantPolicy, "acme", "team"),
        read(TenantPolicy, referring, "referring", "team"),
        read_full(PriorityTier, "gold", ""),
        read_full(PreemptionPolicy, "gentle", "team"),
        read_full(ServiceLevel, "interactive", "team"),
        replace(a_pod_view("engine-0"), labels=labels),
        secrets={"team/keys": {"first": "1" * 64, "second": "2" * 64}},
        namespaces={"team": labels},
    )
    defaults = [tier.metadata.name for tier in view.default_tiers]
    compiled = compile_pool(view, pool)
    return (compiled, view.pods_of(pool), defaults, scaled(pool, compiled.snapshot))


def scaled(pool: EnginePool, snapshot: PolicySnapshot) -> tuple[object, ...]:
    """Return what is scaled by which load, and which of six engines go.

    The youngest of them has no tokens.
    """
    ref = pool.spec.workload_ref
    assert ref is not None
    workload = Workload(
        kind=ref.kind, name=ref.name, replicas=6, selector=LabelSelector(), is_owned=True
    )
    pods = [a_pod_view(f"engine-{age}", created=f"{9 - age}") for age in range(6)]
    reports = {
        pod.name: EngineReport(
            pool="team/llama",
            pod=pod.name,
            incarnation="i",
            sequence=1,
            kv_used_blocks=int(pod.name[-1]),
        )
        for pod in pods
    }
    victims = choose_victims(
        pool, workload, pods, reports=reports, snapshot=snapshot, is_quiet=lambda _: True
    )
    scaling = pool.spec.autoscaling
    assert scaling is not None
    manifest = autoscaler(pool, scaling, prometheus_url="http://prometheus")
    loads = [
        demand(pool, engines(a_load(kv_used_blocks=10))),
        demand(pool, engines(a_load(queue_times=((bucket_of(1.5), 1),)))),
        demand(pool, engines(a_load(tenants=(MISSING,)))),
    ]
    return workload, victims, manifest, loads


MISSING = TenantCounters(tenant="t", attainment=Attainment(requests=100, met=95))


def a_load(**fields: Any) -> EngineReport:
    return EngineReport(
        pool="team/llama", pod="a", incarnation="i", sequence=1, kv_blocks=100, **fields
    )


def test_every_field_is_marked_or_tried_here() -> None:
    claimed = {
        (model.definition.kind, path)
        for model in KINDS
        for path in fields_of(model.model_fields["spec"].annotation, "spec")  # type: ignore[arg-type]
    }
    assert claimed - SAID_TO_PEOPLE == set(OTHER_VALUES)


@pytest.mark.parametrize(("kind", "path"), OTHER_VALUES)
def test_field_that_is_not_marked_has_an_effect(kind: str, path: str) -> None:
    assert decided(kind, path, OTHER_VALUES[kind, path]) != decided()
