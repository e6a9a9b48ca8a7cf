"""Real pods that are scaled under load: engines that leave let their streams end first."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidegate_testing.cluster import RunningCluster, eventually, install_crds
from tidegate_testing.external_metrics import a_server, registered
from tidegate_testing.helm import Helm
from tidegate_testing.operator_process import OperatorSetup, apply, running_operator

pytestmark = pytest.mark.cluster

NUM_STREAMS = 12
STREAM_TOKENS = 120
STEP_SECONDS = 0.1
"""A stream takes at least 12 s: far longer than the operator needs to notice anything."""

LONG_STREAM_TOKENS = 600
"""Such a stream takes at least 60 s."""

KV_BLOCKS = 64
"""A stream grows to 8 of them."""

KV_BLOCKS_OF_LONG_STREAMS = NUM_STREAMS * 40
"""Whichever engine they meet in, each has room."""

GRACE_SECONDS = 90
SCRATCH = "/var/run/tidegate/scratch"


@pytest.fixture
def operator_setup(
    full_cluster: RunningCluster, cluster_namespace: str, helm: Helm, tmp_path: Path
) -> Iterator[OperatorSetup]:
    """An operator of the cluster, which serves external metrics; its kinds go with the test."""
    cluster = full_cluster.cluster
    kubectl = cluster.kubectl
    install_crds(kubectl)
    folder = tmp_path / "certificates"
    server = a_server(cluster.control_plane, kubectl, helm, cluster_namespace, folder)
    setup = OperatorSetup(
        kubeconfig=server.kubeconfig,
        redis_url=full_cluster.redis.url,
        directory=tmp_path,
        secret_namespaces=(),
        external_metrics_port=server.port,
        certificates=server.certificates,
    )
    with running_operator(setup), registered(kubectl, server):
        yield setup
    crds = [f"{name}.tidegate.io" for name in PLURALS]
    kubectl("delete", "crd", *crds, check=True)


PLURALS = ("enginepools", "preemptionpolicies", "prioritytiers", "servicelevels", "tenantpolicies")


def engines(
    cluster: RunningCluster,
    setup: OperatorSetup,
    namespace: str,
    *,
    kv_blocks: int = KV_BLOCKS,
    **spec: object,
) -> list[dict[str, Any]]:
    """A pool that anybody may use, its Deployment and its Service; `spec` is the pool's."""
    variables = {
        "TIDEGATE_POOL": f"{namespace}/chat",
        "TIDEGATE_REDIS_URL": cluster.redis.url_for(address=cluster.host_address),
        "TIDEGATE_VERIFY_KEY": setup.public_key,
        "TIDEGATE_EXECUTOR": "simulated",
        "TIDEGATE_SIMULATED_STEP_SECONDS": str(STEP_SECONDS),
        "TIDEGATE_STATE_DIR": f"{SCRATCH}/state",
        "TIDEGATE_KV_BLOCKS": str(kv_blocks),
        "TIDEGATE_DRAIN_SECONDS": str(GRACE_SECONDS),
    }
    container = {
        "name": "engine",
        "image": "tidegate/engine",
        "env": [
            *({"name": name, "value": value} for name, value in variables.items()),
            {
                "name": "TIDEGATE_POD_NAME",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
            },
        ],
        "ports": [{"containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": 8000}, "periodSeconds": 1},
        "volumeMounts": [{"name": "scratch", "mountPath": SCRATCH}],
    }
    labels = {"app": "engine"}
    pod = {
        "terminationGracePeriodSeconds": GRACE_SECONDS + 10,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
    }
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "engines"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "engines"},
            "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8000}]},
        },
        {
            "apiVersion": "tidegate.io/v1alpha1",
            "kind": "EnginePool",
            "metadata": {"name": "chat"},
            "spec": {
                "selector": {"matchLabels": labels},
                "workloadRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engines"},
                "unknownTenants": {"action": "Admit"},
                **spec,
            },
        },
    ]


class Service:
    """The engines behind one address."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/v1/completions"

    def stream(self, begun: threading.Semaphore, *, tokens: int = STREAM_TOKENS) -> list[str]:
        """Read a stream to its end; returns its events."""
        body = {"model": "simulated", "prompt": "tides", "max_tokens": tokens}
        events = []
        with httpx.stream("POST", self._url, json=body | {"stream": True}, timeout=60) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                    if len(events) == 1:
                        begun.release()
        return events

    def ask(self) -> int:
        """Send a short request on a connection of its own; returns the status."""
        body = {"model": "simulated", "prompt": "tides", "max_tokens": 1}
        return httpx.post(self._url, json=body, timeout=60).status_code


def is_whole(events: list[str]) -> bool:
    chunks = [json.loads(event) for event in events[:-1]]
    finish = chunks[-1]["choices"][0]["finish_reason"] if chunks else None
    return events[-1:] == ["[DONE]"] and finish == "length"


def test_scaling_from_three_to_one_breaks_no_stream_of_a_minute_and_fails_no_request(
    full_cluster: RunningCluster, cluster_namespace: str, operator_setup: OperatorSetup
) -> None:
    kubectl, namespace = full_cluster.cluster.kubectl, cluster_namespace
    kv_blocks = KV_BLOCKS_OF_LONG_STREAMS
    pool = engines(full_cluster, operator_setup, namespace, kv_blocks=kv_blocks, replicas=3)
    apply(kubectl, namespace, *pool)

    def get(what: str, path: str) -> str:
        shown = kubectl("get", what, "-n", namespace, "-o", f"jsonpath={{{path}}}", check=True)
        return shown.stdout

    eventually(
        lambda: get("epool/chat", ".status.engines.ready") == "3", "three", timeout_seconds=90
    )
    service = Service(full_cluster.address(namespace, "engines"))
    begun, statuses = threading.Semaphore(0), []
    with ThreadPoolExecutor(NUM_STREAMS) as readers:
        began = time.monotonic()
        streams = [
            readers.submit(service.stream, begun, tokens=LONG_STREAM_TOKENS)
            for _ in range(NUM_STREAMS)
        ]
        for _ in streams:
            assert begun.acquire(timeout=30)
        kubectl("scale", "epool/chat", "--replicas=1", "-n", namespace, check=True)
        while get("deploy/engines", ".spec.replicas") != "1":
            statuses.append(service.ask())
        assert not any(stream.done() for stream in streams)
        while not all(stream.done() for stream in streams):
            statuses.append(service.ask())
        whole = [is_whole(stream.result()) for stream in streams]
    assert time.monotonic() - began > LONG_STREAM_TOKENS * STEP_SECONDS
    assert whole == [True] * NUM_STREAMS
    assert set(statuses) == {200}
    eventually(lambda: get("pod", ".items[*].metadata.name").count("engines-") == 1, "one pod")
    assert service.ask() == 200


def test_the_real_hpa_scales_from_one_to_three_and_back_under_real_load(
    full_cluster: RunningCluster, cluster_namespace: str, operator_setup: OperatorSetup
) -> None:
    kubectl, namespace = full_cluster.cluster.kubectl, cluster_namespace
    scaling = {
        "driver": "HPA",
        "maxReplicas": 3,
        "kvUtilizationPercent": 20,
        "behavior": {
            "scaleDown": {
                "stabilizationWindowSeconds": 20,
                "policies": [{"type": "Pods", "value": 4, "periodSeconds": 5}],
            }
        },
    }
    pool = engines(full_cluster, operator_setup, namespace, autoscaling=scaling)
    apply(kubectl, namespace, *pool)

    def get(what: str, path: str) -> str:
        shown = kubectl("get", what, "-n", namespace, "-o", f"jsonpath={{{path}}}", check=True)
        return shown.stdout

    def has_ready(number: int) -> bool:
        return get("epool/chat", ".status.engines.summary") == f"{number}/{number}"

    eventually(lambda: has_ready(1), "one engine", timeout_seconds=60)
    service = Service(full_cluster.address(namespace, "engines"))
    enough, begun = threading.Event(), threading.Semaphore(0)

    def keep_reading() -> list[bool]:
        whole = []
        while not enough.is_set():
            whole.append(is_whole(service.stream(begun)))
        return whole

    with ThreadPoolExecutor(NUM_STREAMS) as readers:
        read = [readers.submit(keep_reading) for _ in range(NUM_STREAMS)]
        try:
            eventually(lambda: has_ready(3), "three engines", timeout_seconds=90)
        finally:
            enough.set()
        eventually(lambda: has_ready(1), "one engine again", timeout_seconds=90)
        assert all(all(one.result()) for one in read)
    eventually(lambda: get("deploy/engines", ".spec.replicas") == "1", "one replica")
