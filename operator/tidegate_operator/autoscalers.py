"""The autoscaler's object of a pool, from `spec.autoscaling`; pure.

Both drivers scale the pool by one number, the replicas that its load asks for: see
`tidegate_operator.demand`. Of external metrics, an average of 1 for each replica means just that.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from tidegate_operator.resources import (
    API_VERSION,
    Autoscaling,
    AutoscalingDriver,
    EnginePool,
)
from tidegate_operator.resources.autoscaling import ScalingRules

DESIRED_METRIC = "tidegate_pool_desired_replicas"
"""As the operator exposes it, with the labels `pool_namespace` and `pool_name`."""

OWN_LABEL = "tidegate.io/autoscaler"

POLL_SECONDS = 15
COOLDOWN_SECONDS = 300
FALLBACK_FAILURES = 3
MAX_LABEL_CHARACTERS = 63

_GROWING: Mapping[str, Any] = {
    "stabilizationWindowSeconds": 0,
    "selectPolicy": "Max",
    "policies": [
        {"type": "Percent", "value": 100, "periodSeconds": 15},
        {"type": "Pods", "value": 4, "periodSeconds": 15},
    ],
}
_SHRINKING: Mapping[str, Any] = {
    "stabilizationWindowSeconds": 300,
    "selectPolicy": "Max",
    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
}
# The number is exact: with a tolerance of a tenth, ten engines would never become eleven.
_TOLERANCE = "0"


def pool_label(name: str) -> str:
    """Return a pool's name as a label's value, which has at most 63 characters."""
    if len(name) <= MAX_LABEL_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:10]
    return f"{name[: MAX_LABEL_CHARACTERS - 11]}-{digest}"


def pool_labels(namespace: str, name: str) -> dict[str, str]:
    """Return the labels by which autoscalers find a pool's series.

    `namespace` would be taken by Prometheus for that of the operator.
    """
    return {"pool_namespace": namespace, "pool_name": pool_label(name)}


def driver_of(pool: EnginePool) -> AutoscalingDriver:
    """Return which autoscaler the pool is to have; None without one, or without a workload."""
    scaling = pool.spec.autoscaling
    if scaling is None or pool.spec.workload_ref is None:
        return AutoscalingDriver.NONE
    return scaling.driver


def autoscaler(pool: EnginePool, scaling: Autoscaling, *, prometheus_url: str) -> Any:  # noqa: ANN401
    """Return the manifest of the HorizontalPodAutoscaler or ScaledObject of a pool.

    Args:
        pool: Is scaled, and owns it.
        scaling: Its `spec.autoscaling`, whose driver isn't None.
        prometheus_url: Where KEDA finds the operator's metrics.
    """
    is_keda = scaling.driver is AutoscalingDriver.KEDA
    owner = pool.metadata
    return {
        "apiVersion": "keda.sh/v1alpha1" if is_keda else "autoscaling/v2",
        "kind": "ScaledObject" if is_keda else "HorizontalPodAutoscaler",
        "metadata": {
            "name": pool_label(f"tidegate-{owner.name}"),
            "namespace": owner.namespace,
            "labels": {OWN_LABEL: "true", "app.kubernetes.io/managed-by": "tidegate"},
            "ownerReferences": [
                {
                    "apiVersion": API_VERSION,
                    "kind": EnginePool.definition.kind,
                    "name": owner.name,
                    "uid": owner.uid,
                    "controller": True,
                    # True would need a right on the pool's finalizers.
                    "blockOwnerDeletion": False,
                }
            ],
        },
        "spec": _keda(pool, scaling, prometheus_url) if is_keda else _hpa(pool, scaling),
    }


def holds(wanted: object, found: object) -> bool:
    """Tell whether an object is as wanted; what nobody asked for may be anything."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(
            holds(value, found.get(key)) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(holds(*pair) for pair in zip(wanted, found, strict=True))
        )
    return wanted == found


def _target(pool: EnginePool) -> dict[str, str]:
    kind = EnginePool.definition.kind
    return {"apiVersion": API_VERSION, "kind": kind, "name": pool.metadata.name}


def _hpa(pool: EnginePool, scaling: Autoscaling) -> dict[str, Any]:
    labels = pool_labels(pool.metadata.namespace, pool.metadata.name)
    metric = {"name": DESIRED_METRIC, "selector": {"matchLabels": labels}}
    target = {"type": "AverageValue", "averageValue": "1"}
    return {
        "scaleTargetRef": _target(pool),
        "minReplicas": scaling.min_replicas,
        "maxReplicas": scaling.max_replicas,
        "metrics": [{"type": "External", "external": {"metric": metric, "target": target}}],
        "behavior": _behavior(scaling),
    }


def _keda(pool: EnginePool, scaling: Autoscaling, prometheus_url: str) -> dict[str, Any]:
    labels = pool_labels(pool.metadata.namespace, pool.metadata.name)
    chosen = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return {
        "scaleTargetRef": _target(pool),
        "minReplicaCount": scaling.min_replicas,
        "maxReplicaCount": scaling.max_replicas,
        "pollingInterval": POLL_SECONDS,
        "cooldownPeriod": COOLDOWN_SECONDS,
        # A Prometheus that is gone or empty must not look like a pool without work.
        "fallback": {
            "failureThreshold": FALLBACK_FAILURES,
            "replicas": max(1, scaling.min_replicas),
            "behavior": "currentReplicasIfHigher",
        },
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(scaling)}},
        "triggers": [
            {
                "type": "prometheus",
                "metricType": "AverageValue",
                "metadata": {
                    "serverAddress": prometheus_url,
                    "query": f"max({DESIRED_METRIC}{{{chosen}}})",
                    "threshold": "1",
                    "ignoreNullValues": "false",
                },
            }
        ],
    }


def _behavior(scaling: Autoscaling) -> dict[str, Any]:
    given = scaling.behavior
    return {
        "scaleUp": _rules(_GROWING, given.scale_up if given is not None else None),
        "scaleDown": _rules(_SHRINKING, given.scale_down if given is not None else None),
    }


def _rules(defaults: Mapping[str, Any], given: ScalingRules | None) -> dict[str, Any]:
    rules: dict[str, Any] = {"tolerance": _TOLERANCE, **defaults}
    if given is None:
        return rules
    if given.tolerance is not None:
        rules["tolerance"] = given.tolerance
    if given.stabilization_window_seconds is not None:
        rules["stabilizationWindowSeconds"] = given.stabilization_window_seconds
    if given.select_policy is not None:
        rules["selectPolicy"] = str(given.select_policy)
    if given.policies:
        rules["policies"] = [
            {"type": str(one.type), "value": one.value, "periodSeconds": one.period_seconds}
            for one in given.policies
        ]
    return rules
