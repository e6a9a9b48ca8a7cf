from __future__ import annotations

import http.client
import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing

import pytest

from tidegate_testing.cluster import RunningCluster, eventually


def hold(address: str) -> tuple[http.client.HTTPResponse, str]:
    """Opens a stream and returns it with the name of the pod that serves it."""
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", "/hold")
    # The connection belongs to the response from now on, as the server keeps none alive.
    response = connection.getresponse()
    return response, response.readline().decode().strip()


@pytest.fixture
def two_pods(full_cluster: RunningCluster, cluster_namespace: str, web: Callable[..., str]) -> str:
    full_cluster.kubectl("apply", "-n", cluster_namespace, "-f", "-", input=web(2))
    full_cluster.kubectl(
        *("rollout", "status", "deployment/web", "-n", cluster_namespace, "--timeout=60s")
    )
    address = full_cluster.address(cluster_namespace, "web")
    eventually(
        lambda: len({called_pod(address) for _ in range(2)}) == 2, "both pods behind the proxy"
    )
    return address


def called_pod(address: str) -> str:
    with closing(http.client.HTTPConnection(address, timeout=10)) as connection:
        connection.request("GET", "/")
        return str(json.load(connection.getresponse())["HOSTNAME"])


@pytest.mark.cluster
def test_a_connection_goes_to_the_pod_with_the_fewest_open_ones(two_pods: str) -> None:
    held = [hold(two_pods) for _ in range(4)]
    try:
        assert sorted(Counter(pod for _, pod in held).values()) == [2, 2]
        busy = held[0][1]
        for stream, pod in held:
            if pod != busy:
                stream.close()
        idle = next(pod for _, pod in held if pod != busy)
        eventually(lambda: {called_pod(two_pods) for _ in range(4)} == {idle}, "only the idle pod")
    finally:
        for stream, _ in held:
            stream.close()


@pytest.mark.cluster
def test_a_caller_that_leaves_is_seen_by_the_pod_at_once(
    two_pods: str, full_cluster: RunningCluster, cluster_namespace: str
) -> None:
    stream, pod = hold(two_pods)
    assert "caller left" not in full_cluster.log(cluster_namespace, pod, "web")

    stream.close()

    eventually(
        lambda: "caller left" in full_cluster.log(cluster_namespace, pod, "web"),
        "the pod to notice",
        timeout_seconds=2.0,
    )


@pytest.mark.cluster
def test_a_caller_may_come_before_its_service_and_waits(
    full_cluster: RunningCluster, cluster_namespace: str, web: Callable[..., str]
) -> None:
    address = full_cluster.address(cluster_namespace, "web")
    assert full_cluster.address(cluster_namespace, "web") == address

    with closing(http.client.HTTPConnection(address, timeout=30)) as connection:
        connection.request("GET", "/")
        full_cluster.kubectl("apply", "-n", cluster_namespace, "-f", "-", input=web(1))
        assert connection.getresponse().status == 200


@pytest.mark.cluster
def test_a_caller_is_turned_away_when_no_endpoint_becomes_ready(
    full_cluster: RunningCluster, cluster_namespace: str
) -> None:
    address = full_cluster.address(cluster_namespace, "nothing")

    with closing(http.client.HTTPConnection(address, timeout=30)) as connection:
        connection.request("GET", "/")
        with pytest.raises(ConnectionError):
            connection.getresponse()
