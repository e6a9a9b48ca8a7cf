from typing import Any

import pytest

from tidegate_operator.autoscalers import autoscaler, driver_of, holds, pool_label
from tidegate_operator.resources import AutoscalingDriver
from tidegate_testing.objects import an_engine_pool

REF = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engines"}


def a_manifest(driver: str, *, name: str = "chat", **spec: Any) -> Any:  # noqa: ANN401
    scaling = {"driver": driver, "minReplicas": 2, "maxReplicas": 9, **spec}
    pool = an_engine_pool(name, workloadRef=REF, autoscaling=scaling)
    assert pool.spec.autoscaling is not None
    return autoscaler(pool, pool.spec.autoscaling, prometheus_url="http://prometheus:9090")


def test_the_hpa_sets_the_pool_to_the_number_that_its_load_asks_for() -> None:
    manifest = a_manifest("HPA")
    spec = manifest["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 9)
    assert spec["scaleTargetRef"]["kind"] == "EnginePool"
    (metric,) = spec["metrics"]
    assert metric["external"]["metric"] == {
        "name": "tidegate_pool_desired_replicas",
        "selector": {"matchLabels": {"pool_namespace": "team", "pool_name": "chat"}},
    }
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    assert {rules["tolerance"] for rules in spec["behavior"].values()} == {"0"}
    assert manifest["metadata"]["ownerReferences"][0]["name"] == "chat"


def test_keda_takes_a_missing_prometheus_for_no_reason_to_shrink() -> None:
    spec = a_manifest("KEDA", minReplicas=0)["spec"]
    (trigger,) = spec["triggers"]
    assert trigger["metadata"] == {
        "serverAddress": "http://prometheus:9090",
        "query": 'max(tidegate_pool_desired_replicas{pool_namespace="team",pool_name="chat"})',
        "threshold": "1",
        "ignoreNullValues": "false",
    }
    assert spec["fallback"] == {
        "failureThreshold": 3,
        "replicas": 1,
        "behavior": "currentReplicasIfHigher",
    }
    assert spec["minReplicaCount"] == 0


def test_behavior_replaces_what_it_names_and_nothing_else() -> None:
    down = {"stabilizationWindowSeconds": 60, "tolerance": "0.05"}
    up = {
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 5}],
        "selectPolicy": "Min",
    }
    behavior = a_manifest("HPA", behavior={"scaleDown": down, "scaleUp": up})["spec"]["behavior"]
    assert behavior["scaleDown"] == {
        "tolerance": "0.05",
        "stabilizationWindowSeconds": 60,
        "selectPolicy": "Max",
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
    }
    assert behavior["scaleUp"] == {"tolerance": "0", "stabilizationWindowSeconds": 0, **up}


def test_names_that_no_label_holds_are_shortened_and_stay_different() -> None:
    one, other = pool_label("x" * 200 + "1"), pool_label("x" * 200 + "2")
    assert one != other
    assert len(one) == len(other) == 63
    assert pool_label("chat") == "chat"
    assert len(a_manifest("KEDA", name="x" * 63)["metadata"]["name"]) == 63


@pytest.mark.parametrize("spec", [{}, {"workloadRef": REF}, {"autoscaling": {"maxReplicas": 2}}])
def test_a_pool_without_driver_has_no_autoscaler(spec: dict[str, Any]) -> None:
    assert driver_of(an_engine_pool(**spec)) is AutoscalingDriver.NONE


def test_a_pool_without_workload_has_no_autoscaler() -> None:
    pool = an_engine_pool(autoscaling={"driver": "HPA", "maxReplicas": 2})
    assert driver_of(pool) is AutoscalingDriver.NONE


def test_what_nobody_asked_for_may_be_anything() -> None:
    assert holds({"a": [{"b": 1}]}, {"a": [{"b": 1, "c": 2}], "d": 3})
    assert not holds({"a": [{"b": 1}]}, {"a": [{"b": 2}]})
    assert not holds({"a": [1]}, {"a": [1, 2]})
    assert not holds({"a": 1}, None)
    assert not holds([1], 1)
