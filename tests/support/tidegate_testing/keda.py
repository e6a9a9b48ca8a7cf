"""KEDA's ScaledObject as a CustomResourceDefinition: the fields that its documentation names."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_INTEGER: Schema = {"type": "integer", "format": "int32"}
_TEXT: Schema = {"type": "string"}


def _fields(*required: str, **properties: Schema) -> Schema:
    needed = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **needed}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


_POLICY = _fields(
    "type", "value", "periodSeconds", type=_TEXT, value=_INTEGER, periodSeconds=_INTEGER
)
_TOLERANCE: Schema = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
}


def _rules(*, has_tolerance: bool) -> Schema:
    tolerance = {"tolerance": _TOLERANCE} if has_tolerance else {}
    return _fields(
        stabilizationWindowSeconds=_INTEGER,
        selectPolicy=_TEXT,
        policies=_list_of(_POLICY),
        **tolerance,
    )


def scaled_object_crd(*, has_tolerance: bool = True) -> Schema:
    """Return the definition; older releases of KEDA know no tolerance."""
    rules = _rules(has_tolerance=has_tolerance)
    behavior = _fields(scaleUp=rules, scaleDown=rules)
    strings: Schema = {"type": "object", "additionalProperties": _TEXT}
    spec = _fields(
        "scaleTargetRef",
        "triggers",
        scaleTargetRef=_fields("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
        minReplicaCount=_INTEGER,
        maxReplicaCount=_INTEGER,
        pollingInterval=_INTEGER,
        cooldownPeriod=_INTEGER,
        fallback=_fields(
            "failureThreshold",
            "replicas",
            failureThreshold=_INTEGER,
            replicas=_INTEGER,
            behavior={
                **_TEXT,
                "enum": [
                    "static",
                    "currentReplicas",
                    "currentReplicasIfHigher",
                    "currentReplicasIfLower",
                ],
            },
        ),
        advanced=_fields(horizontalPodAutoscalerConfig=_fields(name=_TEXT, behavior=behavior)),
        triggers=_list_of(
            _fields("type", "metadata", type=_TEXT, metricType=_TEXT, metadata=strings)
        ),
    )
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "scaledobjects.keda.sh"},
        "spec": {
            "group": "keda.sh",
            "names": {"kind": "ScaledObject", "plural": "scaledobjects", "shortNames": ["so"]},
            "scope": "Namespaced",
            "versions": [
                {
                    "name": "v1alpha1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _fields(spec=spec)},
                }
            ],
        },
    }
