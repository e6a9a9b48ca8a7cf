from __future__ import annotations

from typing import Any

import pytest

from tidegate_devcluster.network import PodPlace
from tidegate_devcluster.pod_environment import (
    ContainerConfigError,
    Sources,
    command,
    decoded,
    environment,
    expanded,
    named_sources,
)

NAMESPACE = PodPlace("10.213.7.2", "10.213.7.2")
LOOPBACK = PodPlace("10.213.255.1", "127.0.0.1", ports={8000: 23456})
POD = {
    "metadata": {
        "name": "web-0",
        "namespace": "shop",
        "uid": "u-1",
        "labels": {"tier": "gold"},
    },
    "spec": {"nodeName": "devcluster", "containers": []},
}


def sources(place: PodPlace = NAMESPACE, **known: Any) -> Sources:
    return Sources(
        config_maps=known.get("config_maps", {}),
        secrets=known.get("secrets", {}),
        place=place,
        host_ip="10.213.7.1",
    )


def field(path: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": path}}


def variables(env: list[dict[str, Any]], given: Sources | None = None) -> dict[str, str]:
    return environment({"name": "web", "env": env}, POD, given or sources())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "web-0"),
        ("metadata.namespace", "shop"),
        ("metadata.uid", "u-1"),
        ("metadata.labels['tier']", "gold"),
        ("metadata.labels['none']", ""),
        ("spec.nodeName", "devcluster"),
        ("status.podIP", "10.213.7.2"),
        ("status.hostIP", "10.213.7.1"),
    ],
)
def test_fields_of_the_pod_become_variables(path: str, value: str) -> None:
    assert variables([{"name": "X", "valueFrom": field(path)}])["X"] == value


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$(A)/$(B)", "1/$(B)"),
        ("$$(A)", "$(A)"),
        ("$A ${A}", "$A ${A}"),
        ("$$$(A)", "$1"),
    ],
)
def test_references_expand_as_in_kubernetes(text: str, result: str) -> None:
    assert expanded(text, {"A": "1"}) == result


def test_a_variable_sees_those_before_it() -> None:
    env = [
        {"name": "A", "value": "$(B)"},
        {"name": "B", "value": "2"},
        {"name": "C", "value": "$(B)"},
    ]

    assert variables(env) == {"HOSTNAME": "web-0", "A": "$(B)", "B": "2", "C": "2"}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"secretKeyRef": {"name": "s", "key": "k"}}, "env X: Secret 's' not found"),
        ({"configMapKeyRef": {"name": "c", "key": "k"}}, "env X: ConfigMap 'c' has no key 'k'"),
        (field("spec.hostname"), "env X: fieldRef 'spec.hostname' is not supported"),
        ({"resourceFieldRef": {"resource": "limits.cpu"}}, "resourceFieldRef is not supported"),
    ],
)
def test_a_value_that_cannot_be_had_is_named(source: dict[str, Any], message: str) -> None:
    with pytest.raises(ContainerConfigError, match=message):
        variables([{"name": "X", "valueFrom": source}], sources(config_maps={"c": {"other": "1"}}))


def test_an_optional_value_may_be_missing() -> None:
    reference = {"name": "s", "key": "k", "optional": True}

    assert "X" not in variables([{"name": "X", "valueFrom": {"secretKeyRef": reference}}])


def test_all_of_a_secret_comes_under_a_prefix_and_env_wins() -> None:
    container = {
        "envFrom": [{"prefix": "P_", "secretRef": {"name": "s"}}],
        "env": [{"name": "P_B", "value": "own"}],
    }
    secret = decoded({"data": {"A": "MQ==", "B": "Mg=="}})

    found = environment(container, POD, sources(secrets={"s": secret}))

    assert (found["P_A"], found["P_B"]) == ("1", "own")
    assert named_sources(container) == (set(), {"s"})


def test_on_loopback_a_port_variable_gets_the_real_port() -> None:
    env = [
        {"name": "PORT", "value": "8000"},
        {"name": "WEB_PORT", "value": "8000"},
        {"name": "LIMIT", "value": "8000"},
        {"name": "OTHER_PORT", "value": "9000"},
    ]

    found = variables(env, sources(LOOPBACK))

    assert (found["PORT"], found["WEB_PORT"]) == ("23456", "23456")
    assert (found["LIMIT"], found["OTHER_PORT"]) == ("8000", "9000")
    assert (
        variables([{"name": "IP", "valueFrom": field("status.podIP")}], sources(LOOPBACK))["IP"]
        == "127.0.0.1"
    )


@pytest.mark.parametrize(
    ("container", "line"),
    [
        ({}, ["run", "fast"]),
        ({"args": ["--port=$(P)"]}, ["run", "fast", "--port=80"]),
        ({"command": ["other", "$(P)"]}, ["other", "80"]),
        ({"command": ["other"], "args": ["x"]}, ["other", "x"]),
    ],
)
def test_command_replaces_the_images_own_and_args_follow(
    container: dict[str, Any], line: list[str]
) -> None:
    images = {"web": ["run", "fast"]}

    assert command({"image": "web", **container}, images, {"P": "80"}) == line
