"""Valid custom resources as plain manifests: with every field set, and with the required alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Manifest = dict[str, Any]

REMOVED = object()
"""The value that makes `changed` take a field out."""

_SELECTOR = {
    "matchLabels": {"app": "engine"},
    "matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}],
}
_SCALING_RULES = {
    "stabilizationWindowSeconds": 300,
    "selectPolicy": "Max",
    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
    "tolerance": "0.05",
}
_FULL_SPECS: dict[str, Manifest] = {
    "PriorityTier": {
        "value": -5,
        "reservedSharePercent": 20,
        "preemption": "Never",
        "waitWindow": "250ms",
        "allowedNamespaces": {"from": "Selector", "selector": _SELECTOR},
        "globalDefault": True,
        "description": "Für Stapelläufe 批处理 🌙: was nachts läuft",
    },
    "PreemptionPolicy": {
        "preemptible": False,
        "mode": "Swap",
        "maxPreemptionsPerRequest": 5,
        "minQuantumTokens": 32,
        "reclaim": "Never",
    },
    "ServiceLevel": {
        "ttft": {"target": "500ms", "percentile": 95},
        "itl": {"target": "40ms", "percentile": 90},
        "queueTimeout": "30s",
        "requestTimeout": "1h30m",
        "onOverload": "Shed",
        "window": "10m",
    },
    "EnginePool": {
        "selector": _SELECTOR,
        "workloadRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engines"},
        "replicas": 5,
        "batching": {
            "maxNumSeqs": 64,
            "maxBatchedTokens": 2048,
            "waitWindow": "5ms",
            "prefillChunk": {"min": 64, "max": 512},
            "maxPartialPrefills": 2,
        },
        "kv": {"watermarks": {"lowPercent": 70, "highPercent": 90}, "estimate": "WorstCase"},
        "unknownTenants": {
            "action": "Admit",
            "priorityTier": "bronze",
            "weight": 1,
            "maxRunning": 2,
        },
        "allowedNamespaces": {"from": "Selector", "selector": _SELECTOR},
        "autoscaling": {
            "minReplicas": 1,
            "maxReplicas": 8,
            "kvUtilizationPercent": 75,
            "queueTimeP99": "2s",
            "sloAttainmentPercent": 99,
            "driver": "HPA",
            "behavior": {"scaleUp": _SCALING_RULES, "scaleDown": _SCALING_RULES},
        },
        "drain": {"timeout": "2m", "victim": "Oldest"},
    },
}
_FULL_SPECS["TenantPolicy"] = {
    "tenant": "acme-chat",
    "poolRefs": [{"name": "llama"}, {"name": "llama", "namespace": "shared"}],
    "priorityTier": "gold",
    "allowedTiers": ["silver", "bronze"],
    "weight": 300,
    "kv": {"nominalPercent": 30, "borrowingLimitPercent": 20, "lendablePercent": 50},
    "rate": {"requestsPerMinute": 600, "tokensPerMinute": 100_000, "burstPercent": 150},
    "concurrency": {"maxRunning": 16, "maxQueued": 100, "maxQueuedTokens": 50_000},
    "limits": {"maxPromptTokens": 8192, "maxOutputTokens": 1024},
    "preemption": _FULL_SPECS["PreemptionPolicy"],
    "serviceLevel": _FULL_SPECS["ServiceLevel"],
    "cancelOnDisconnect": False,
    "prefixCache": "Shared",
    "apiKeySecretRefs": [{"name": "keys", "key": "first"}, {"name": "keys", "key": "second"}],
    "stopPolicy": "Hold",
}
_MINIMAL_SPECS: dict[str, Manifest] = {
    "PriorityTier": {},
    "PreemptionPolicy": {},
    "ServiceLevel": {},
    "TenantPolicy": {"poolRefs": [{"name": "llama"}]},
    "EnginePool": {"selector": {"matchLabels": {"app": "engine"}}},
}
KIND_NAMES = tuple(_FULL_SPECS)


def full_manifest(kind: str, name: str = "full") -> Manifest:
    """Every field set to a valid value that is not its default; a TenantPolicy has inline parts."""
    return _manifest(kind, name, _FULL_SPECS[kind])


def minimal_manifest(kind: str, name: str = "minimal") -> Manifest:
    """Nothing but what is required."""
    return _manifest(kind, name, _MINIMAL_SPECS[kind])


def policy_with_references(name: str = "references") -> Manifest:
    """A full TenantPolicy that refers to its PreemptionPolicy and ServiceLevel."""
    return changed(
        full_manifest("TenantPolicy", name),
        {
            "spec.preemption": REMOVED,
            "spec.serviceLevel": REMOVED,
            "spec.preemptionPolicyRef": {"name": "gentle"},
            "spec.serviceLevelRef": {"name": "interactive"},
        },
    )


def changed(manifest: Manifest, changes: Mapping[str, object]) -> Manifest:
    """Returns a copy with other values at dotted paths; a number is the index in a list."""
    result: Manifest = _copy(manifest)
    for path, value in changes.items():
        *parents, last = path.split(".")
        parent: Any = result
        for step in parents:
            parent = parent[int(step)] if isinstance(parent, list) else parent.setdefault(step, {})
        key: Any = int(last) if isinstance(parent, list) else last
        if value is REMOVED:
            del parent[key]
        else:
            parent[key] = _copy(value)
    return result


def _manifest(kind: str, name: str, spec: Manifest) -> Manifest:
    return {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": _copy(spec),
    }


def _copy(value: Any) -> Any:  # noqa: ANN401
    """Copies so that no part is shared, not even inside the value as `copy.deepcopy` would."""
    return json.loads(json.dumps(value))
