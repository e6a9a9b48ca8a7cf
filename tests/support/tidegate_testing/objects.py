"""Custom resources as values and views of a cluster, with harmless defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from tidegate_operator.cluster import ClusterView, PodView
from tidegate_operator.progress import Engines
from tidegate_operator.resources import (
    EnginePool,
    PreemptionPolicy,
    PriorityTier,
    Resource,
    ServiceLevel,
    TenantPolicy,
)
from tidegate_policies.wire import EngineReport

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


def a_metadata(name: str, namespace: str, *, age: int = 0, generation: int = 1) -> dict[str, Any]:
    """Build metadata; a higher `age` is older."""
    return {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{namespace}-{name}",
        "generation": generation,
        "creationTimestamp": (EPOCH - timedelta(hours=age)).isoformat(),
    }


def a_tenant_policy(
    name: str = "acme",
    namespace: str = "team",
    *,
    age: int = 0,
    generation: int = 1,
    pools: Iterable[str] = ("chat",),
    **spec: Any,
) -> TenantPolicy:
    """Build a policy; further arguments are fields of its spec as in YAML."""
    refs = [
        dict(zip(("namespace", "name"), pool.split("/"), strict=True))
        if "/" in pool
        else {"name": pool}
        for pool in pools
    ]
    return TenantPolicy.model_validate(
        {
            "metadata": a_metadata(name, namespace, age=age, generation=generation),
            "spec": {"poolRefs": refs, **spec},
        }
    )


def an_engine_pool(
    name: str = "chat", namespace: str = "team", *, generation: int = 1, **spec: Any
) -> EnginePool:
    """Build a pool of the pods with the label app=engine."""
    return EnginePool.model_validate(
        {
            "metadata": a_metadata(name, namespace, generation=generation),
            "spec": {"selector": {"matchLabels": {"app": "engine"}}, **spec},
        }
    )


def a_tier(name: str, value: int = 0, *, age: int = 0, **spec: Any) -> PriorityTier:
    """Build a tier."""
    return PriorityTier.model_validate(
        {"metadata": a_metadata(name, "", age=age), "spec": {"value": value, **spec}}
    )


def a_preemption_policy(name: str, namespace: str = "team", **spec: Any) -> PreemptionPolicy:
    """Build a PreemptionPolicy."""
    return PreemptionPolicy.model_validate({"metadata": a_metadata(name, namespace), "spec": spec})


def a_service_level(name: str, namespace: str = "team", **spec: Any) -> ServiceLevel:
    """Build a ServiceLevel."""
    return ServiceLevel.model_validate({"metadata": a_metadata(name, namespace), "spec": spec})


def a_pod_view(
    name: str,
    namespace: str = "team",
    *,
    is_ready: bool = True,
    draining: str = "",
    created: str = "",
) -> PodView:
    """Build an engine's pod."""
    return PodView(
        namespace=namespace,
        name=name,
        uid=f"uid-{name}",
        labels={"app": "engine"},
        is_ready=is_ready,
        draining=draining,
        created=created,
    )


def engines(*reports: EngineReport, silent: Iterable[str] = ()) -> Engines:
    """Build the ready engines that reported this, and silent ones."""
    names = (*(report.pod for report in reports), *silent)
    return Engines(
        pods=tuple(map(a_pod_view, names)), reports={report.pod: report for report in reports}
    )


def a_view(
    *objects: Resource | PodView,
    secrets: Mapping[str, Mapping[str, str | None]] | None = None,
    namespaces: Mapping[str, Mapping[str, str]] | None = None,
) -> ClusterView:
    """Build a view of exactly these objects, in the order given."""
    return ClusterView(
        pools=_keyed(objects, EnginePool),
        policies=_keyed(objects, TenantPolicy),
        tiers=_keyed(objects, PriorityTier),
        preemption_policies=_keyed(objects, PreemptionPolicy),
        service_levels=_keyed(objects, ServiceLevel),
        secrets=secrets or {},
        namespaces=namespaces or {},
        pods={f"{pod.namespace}/{pod.name}": pod for pod in objects if isinstance(pod, PodView)},
    )


def _keyed(objects: Iterable[Resource | PodView], model: type[Any]) -> dict[str, Any]:
    return {o.metadata.qualified_name: o for o in objects if isinstance(o, model)}
