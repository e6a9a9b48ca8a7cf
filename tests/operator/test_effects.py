"""No field is silently without effect: it changes what is decided, or it is marked."""

import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tidegate_operator.compiler import compile_pool
from tidegate_operator.resources import (
    KINDS,
    NOT_ENFORCED_YET,
    AllowedNamespaces,
    EnginePool,
    LabelSelector,
    Model,
    PriorityTier,
    TenantPolicy,
)
from tidegate_testing.manifests import changed, full_manifest
from tidegate_testing.objects import a_metadata, a_pod_view, a_view

SAID_TO_PEOPLE = {("PriorityTier", "spec.description")}

_NOBODY = {"from": "Selector", "selector": {"matchLabels": {"app": "other"}}}

OTHER_VALUES: dict[tuple[str, str], object] = {
    ("PriorityTier", "spec.value"): 9,
    ("PriorityTier", "spec.allowedNamespaces"): _NOBODY,
    ("PriorityTier", "spec.globalDefault"): False,
    ("TenantPolicy", "spec.tenant"): "other",
    ("TenantPolicy", "spec.poolRefs"): [{"name": "other"}],
    ("TenantPolicy", "spec.priorityTier"): "absent",
    ("TenantPolicy", "spec.weight"): 1,
    ("TenantPolicy", "spec.kv.nominalPercent"): 1,
    ("TenantPolicy", "spec.limits.maxPromptTokens"): 1,
    ("TenantPolicy", "spec.limits.maxOutputTokens"): 1,
    ("TenantPolicy", "spec.cancelOnDisconnect"): True,
    ("TenantPolicy", "spec.apiKeySecretRefs"): [],
    ("EnginePool", "spec.selector"): {"matchLabels": {"app": "other"}},
    ("EnginePool", "spec.batching.maxNumSeqs"): 1,
    ("EnginePool", "spec.batching.maxBatchedTokens"): 4096,
    ("EnginePool", "spec.kv.watermarks.lowPercent"): 71,
    ("EnginePool", "spec.kv.watermarks.highPercent"): 91,
    ("EnginePool", "spec.unknownTenants.action"): "Reject",
    ("EnginePool", "spec.unknownTenants.priorityTier"): "gold",
    ("EnginePool", "spec.unknownTenants.weight"): 9,
    ("EnginePool", "spec.unknownTenants.maxRunning"): 9,
    ("EnginePool", "spec.allowedNamespaces"): _NOBODY,
}


def unmarked_fields(model: type[Model], path: str) -> Iterator[str]:
    """Yield the fields that claim to have an effect, as deep as a value can be changed alone."""
    for field in model.model_fields.values():
        inner = f"{path}.{field.alias}"
        if NOT_ENFORCED_YET in field.metadata:
            continue
        nested = _nested(field.annotation)
        if nested is None or nested in (AllowedNamespaces, LabelSelector):
            yield inner
        else:
            yield from unmarked_fields(nested, inner)


def _nested(annotation: Any) -> type[Model] | None:  # noqa: ANN401
    """Return the model of a field that holds one."""
    is_union = isinstance(annotation, types.UnionType)
    options = typing.get_args(annotation) if is_union else (annotation,)
    models = (o for o in options if isinstance(o, type) and issubclass(o, Model))
    return next(models, None)


def decided(kind: str = "", path: str = "", value: object = None) -> tuple[object, ...]:
    """Return all that is decided for a pool of full objects, with one field changed."""

    def read(model: type[Any], name: str, namespace: str) -> Any:  # noqa: ANN401
        manifest = full_manifest(model.definition.kind)
        if model.definition.kind == kind:
            manifest = changed(manifest, {path: value})
        return model.model_validate(manifest | {"metadata": a_metadata(name, namespace)})

    # What the selectors of all full manifests choose.
    labels = {"app": "engine", "zone": "a"}
    pool: EnginePool = read(EnginePool, "llama", "team")
    view = a_view(
        pool,
        read(TenantPolicy, "acme", "team"),
        read(PriorityTier, "gold", ""),
        replace(a_pod_view("engine-0"), labels=labels),
        secrets={"team/keys": {"first": "1" * 64, "second": "2" * 64}},
        namespaces={"team": labels},
    )
    defaults = [tier.metadata.name for tier in view.default_tiers]
    return (compile_pool(view, pool), view.pods_of(pool), defaults)


def test_every_field_is_marked_or_tried_here() -> None:
    claimed = {
        (model.definition.kind, path)
        for model in KINDS
        for path in unmarked_fields(model.model_fields["spec"].annotation, "spec")  # type: ignore[arg-type]
    }
    assert claimed - SAID_TO_PEOPLE == set(OTHER_VALUES)


@pytest.mark.parametrize(("kind", "path"), OTHER_VALUES)
def test_field_that_is_not_marked_has_an_effect(kind: str, path: str) -> None:
    assert decided(kind, path, OTHER_VALUES[kind, path]) != decided()
