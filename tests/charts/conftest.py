"""What the tests of the charts share."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate_testing.helm import Values

POOL: dict[str, Any] = {"name": "chat", "env": {"TIDEGATE_EXECUTOR": "simulated"}}
EXTERNAL: dict[str, Any] = {
    "redis": {"enabled": False},
    "externalRedis": {
        "operatorUrl": {"secretName": "redis-operator"},
        "engineUrl": {"secretName": "redis-engine", "key": "where"},
        "ca": {"secretName": "redis-ca"},
    },
}
PLACED: dict[str, Any] = {
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
}
CLAIM = {"name": "weights", "persistentVolumeClaim": {"claimName": "weights"}}
EVERYTHING: dict[str, Any] = {
    "fullnameOverride": "tg",
    "imagePullSecrets": [{"name": "registry"}],
    "operator": {
        "image": {"repository": "registry.example:5000/tidegate/operator", "tag": "1.2.3"},
        "replicas": 3,
        "namespaces": ["team-a", "team-b"],
        "apiKeyNamespaces": ["team-a"],
        "prometheusUrl": "http://prometheus.monitoring:9090",
        "console": {"enabled": True, "resources": {"limits": {"memory": "1Gi"}}},
        "externalMetrics": {
            "enabled": True,
            "tlsSecretName": "external-metrics-tls",
            "apiServiceAnnotations": {
                "cert-manager.io/inject-ca-from": "tidegate/external-metrics"
            },
        },
        "sweepSeconds": 30.5,
        "logLevel": "DEBUG",
        "podAnnotations": {"example.org/a": "b"},
        "priorityClassName": "system-cluster-critical",
        **PLACED,
    },
    "enginePools": [
        {
            **POOL,
            **PLACED,
            "replicas": None,
            "image": {"digest": "sha256:" + "0" * 64},
            "model": "/models/weights.gguf",
            "trustedGatewayToken": {"secretName": "gateway", "key": "shared"},
            "spec": {"kv": {"watermarks": {"lowPercent": 70, "highPercent": 90}}},
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "drainSeconds": 600,
            "preStopSeconds": 0,
            "maxUnavailable": "25%",
            "maxSurge": 0,
            "volumes": [CLAIM],
            "volumeMounts": [{"name": "weights", "mountPath": "/models", "readOnly": True}],
            "podAnnotations": {"example.org/c": "d"},
            "runtimeClassName": "nvidia",
            "priorityClassName": "system-cluster-critical",
        },
        {"name": "batch", "env": {"TIDEGATE_MAX_NUM_SEQS": 64}},
    ],
    "redis": {"tlsSecretName": "redis-tls", **PLACED},
    "networkPolicy": {
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        "externalMetricsFrom": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
        "explainFrom": [{"ipBlock": {"cidr": "10.0.0.0/16"}}],
        "consoleFrom": [{"podSelector": {"matchLabels": {"app": "ingress"}}}],
        "enginesFrom": [{"podSelector": {}}],
        "redisFrom": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"a": "b"}}}],
    },
    "admissionPolicy": {
        "tiers": [{"name": "premium", "namespaceLabels": {"tidegate.io/premium": "true"}}],
        "pools": [
            {"namespace": "serving", "name": "chat", "namespaceLabels": {"team": "a", "env": "p"}}
        ],
    },
    "monitoring": {
        "monitors": {"enabled": True, "labels": {"release": "prometheus"}},
        "rules": {
            "enabled": True,
            "labels": {"release": "prometheus"},
            "runbooks": "https://runbooks.example/tidegate",
        },
        "tenantDashboards": {"enabled": True},
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "LLM"}},
    },
}

VARIANTS: dict[str, Values] = {
    "defaults": {},
    "engines": {"enginePools": [POOL]},
    "external-redis": {**EXTERNAL, "enginePools": [POOL]},
    "everything": EVERYTHING,
    "least": {
        "operator": {
            "replicas": 1,
            "apiKeyNamespaces": ["*"],
            "explain": {"enabled": False},
            "console": {"enabled": True},
        },
        "credentials": {"create": False},
        "networkPolicy": {"enabled": False},
    },
}


@pytest.fixture(params=VARIANTS)
def values(request: pytest.FixtureRequest) -> Values:
    """One set of values after the other."""
    return VARIANTS[request.param]
