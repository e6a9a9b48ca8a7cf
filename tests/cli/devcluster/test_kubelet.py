from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tidegate_testing.cluster import RunningCluster, eventually

pytestmark = pytest.mark.cluster

Manifest = Callable[..., str]


def pods_of(cluster: RunningCluster, namespace: str) -> list[dict[str, Any]]:
    listed = cluster.kubectl("get", "pods", "-n", namespace, "-o", "json").stdout
    return list(json.loads(listed)["items"])


def ready_addresses(cluster: RunningCluster, namespace: str) -> set[str]:
    listed = cluster.kubectl("get", "endpointslices", "-n", namespace, "-o", "json").stdout
    return {
        address
        for item in json.loads(listed)["items"]
        for endpoint in item["endpoints"] or ()
        for address in endpoint["addresses"]
        if endpoint["conditions"]["ready"]
    }


def call(cluster: RunningCluster, namespace: str, path: str = "/") -> dict[str, str]:
    url = f"http://{cluster.address(namespace, 'web')}{path}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: dict[str, str] = json.load(answer)
        return body


def roll_out(cluster: RunningCluster, namespace: str, manifest: str) -> None:
    cluster.kubectl("apply", "-n", namespace, "-f", "-", input=manifest)
    cluster.kubectl("rollout", "status", "deployment/web", "-n", namespace, "--timeout=60s")


def waiting(pod: dict[str, Any]) -> dict[str, str]:
    statuses = pod.get("status", {}).get("containerStatuses") or [{}]
    found: dict[str, str] = statuses[0].get("state", {}).get("waiting", {})
    return found


def only_process(cluster: RunningCluster, namespace: str) -> int:
    """Returns the process id of the namespace's one container, once it runs."""
    cluster.kubectl(
        *("wait", "pod", "--all", "--for=condition=Ready", "-n", namespace, "--timeout=30s")
    )
    (pod,) = pods_of(cluster, namespace)
    (status,) = pod["status"]["containerStatuses"]
    return int(status["containerID"].removeprefix("proc://"))


def test_a_deployment_becomes_ready_scales_and_ends_gracefully(
    full_cluster: RunningCluster, cluster_namespace: str, web: Manifest
) -> None:
    namespace = cluster_namespace
    roll_out(full_cluster, namespace, web(1))
    assert len(ready_addresses(full_cluster, namespace)) == 1

    full_cluster.kubectl("scale", "deployment/web", "--replicas=3", "-n", namespace)
    addresses = eventually(
        lambda: found if len(found := ready_addresses(full_cluster, namespace)) == 3 else None,
        "three ready addresses",
    )
    assert addresses == {pod["status"]["podIP"] for pod in pods_of(full_cluster, namespace)}
    assert {pod["status"]["phase"] for pod in pods_of(full_cluster, namespace)} == {"Running"}

    names = [pod["metadata"]["name"] for pod in pods_of(full_cluster, namespace)]
    full_cluster.kubectl("delete", "deployment/web", "-n", namespace, "--cascade=foreground")
    eventually(lambda: not pods_of(full_cluster, namespace), "the pods' end")
    for name in names:
        assert full_cluster.log(namespace, name, "web") == "got SIGTERM\n"


def test_a_crashed_container_restarts_in_its_pod_after_a_back_off(
    full_cluster: RunningCluster, cluster_namespace: str, web: Manifest
) -> None:
    namespace = cluster_namespace
    roll_out(full_cluster, namespace, web(1))
    (pod,) = pods_of(full_cluster, namespace)

    with suppress(urllib.error.URLError, ConnectionError):
        call(full_cluster, namespace, "/crash")
    backing_off = eventually(
        lambda: waiting(pods_of(full_cluster, namespace)[0]), "a waiting container"
    )
    assert backing_off["reason"] == "CrashLoopBackOff"
    assert "1s" in backing_off["message"]
    full_cluster.kubectl(
        *("wait", "pod", "--all", "--for=condition=Ready", "-n", namespace, "--timeout=30s")
    )

    (same,) = pods_of(full_cluster, namespace)
    assert same["metadata"]["uid"] == pod["metadata"]["uid"]
    (status,) = same["status"]["containerStatuses"]
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 3


def test_an_unready_pod_leaves_the_endpoints_and_keeps_running(
    full_cluster: RunningCluster, cluster_namespace: str, web: Manifest
) -> None:
    probe = {
        "httpGet": {"path": "/ready", "port": 8000},
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
    roll_out(full_cluster, cluster_namespace, web(1, readinessProbe=probe))

    call(full_cluster, cluster_namespace, "/unready")

    eventually(lambda: not ready_addresses(full_cluster, cluster_namespace), "no ready address")
    (pod,) = pods_of(full_cluster, cluster_namespace)
    assert "running" in pod["status"]["containerStatuses"][0]["state"]


def test_a_failing_liveness_probe_restarts_the_container(
    full_cluster: RunningCluster, cluster_namespace: str, web: Manifest
) -> None:
    probe = {
        "httpGet": {"path": "/ready", "port": 8000},
        "periodSeconds": 1,
        "failureThreshold": 1,
        "initialDelaySeconds": 1,
    }
    roll_out(full_cluster, cluster_namespace, web(1, livenessProbe=probe))

    call(full_cluster, cluster_namespace, "/unready")

    eventually(
        lambda: pods_of(full_cluster, cluster_namespace)[0]["status"]["containerStatuses"][0][
            "restartCount"
        ],
        "a restart",
    )


def test_variables_come_from_secrets_config_maps_fields_and_other_variables(
    full_cluster: RunningCluster, cluster_namespace: str, web: Manifest
) -> None:
    namespace = cluster_namespace
    env = [
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "gold"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "URL", "value": "http://$(POD_IP):$(WEB_PORT)/$(UNKNOWN)"},
    ]
    source = [{"configMapRef": {"name": "settings"}}]
    full_cluster.kubectl("apply", "-n", namespace, "-f", "-", input=web(1, env=env, envFrom=source))
    refused = eventually(
        lambda: next((waiting(pod) for pod in pods_of(full_cluster, namespace)), {}).get("message"),
        "a reason",
    )
    assert refused == "envFrom: ConfigMap 'settings' not found"

    full_cluster.kubectl(
        "create", "configmap", "settings", "--from-literal=COLOR=blue", "-n", namespace
    )
    full_cluster.kubectl(
        "create", "secret", "generic", "keys", "--from-literal=gold=s3cret", "-n", namespace
    )
    full_cluster.kubectl("rollout", "status", "deployment/web", "-n", namespace, "--timeout=60s")

    (pod,) = pods_of(full_cluster, namespace)
    variables = call(full_cluster, namespace)
    assert variables["KEY"] == "s3cret"
    assert variables["COLOR"] == "blue"
    assert variables["URL"] == f"http://{variables['POD_IP']}:{variables['WEB_PORT']}/$(UNKNOWN)"
    assert variables["HOSTNAME"] == pod["metadata"]["name"]
    assert "KUBEBUILDER_ASSETS" not in variables


def test_an_unknown_image_is_named_in_the_waiting_state(
    full_cluster: RunningCluster, cluster_namespace: str
) -> None:
    full_cluster.kubectl("run", "alien", "--image=nginx", "-n", cluster_namespace)

    state = eventually(
        lambda: waiting(pods_of(full_cluster, cluster_namespace)[0]), "a waiting container"
    )
    assert state["reason"] == "ErrImagePull"
    assert "'nginx' is not in this cluster's image table; it has: python" in state["message"]


def test_a_pod_that_is_not_restarted_succeeds_or_fails_by_its_exit_code(
    full_cluster: RunningCluster, cluster_namespace: str
) -> None:
    for name, code in (("good", 0), ("bad", 4)):
        full_cluster.kubectl(
            *("run", name, "--image=python", "--restart=Never", "-n", cluster_namespace),
            *("--", "-c", f"raise SystemExit({code})"),
        )

    for name, phase in (("good", "Succeeded"), ("bad", "Failed")):
        full_cluster.kubectl(
            *("wait", f"pod/{name}", f"--for=jsonpath={{.status.phase}}={phase}"),
            *("-n", cluster_namespace, "--timeout=30s"),
        )


def test_a_pod_reaches_redis_and_the_api_server_by_the_host_address(
    full_cluster: RunningCluster, cluster_namespace: str
) -> None:
    addresses = [
        (full_cluster.host_address, full_cluster.redis.port),
        (full_cluster.host_address, full_cluster.cluster.control_plane.port),
    ]
    code = f"import socket\nfor a in {addresses}: socket.create_connection(a, 5).close()"
    full_cluster.kubectl(
        *("run", "caller", "--image=python", "--restart=Never", "-n", cluster_namespace),
        *("--", "-c", code),
    )

    full_cluster.kubectl(
        *("wait", "pod/caller", "--for=jsonpath={.status.phase}=Succeeded"),
        *("-n", cluster_namespace, "--timeout=30s"),
    )


def test_a_pod_sees_its_volumes_and_logs_in_to_the_api_server_with_its_own_token(
    full_cluster: RunningCluster, cluster_namespace: str
) -> None:
    code = (
        "import os, pathlib, urllib.request, ssl, json\n"
        "own = pathlib.Path('/var/run/secrets/kubernetes.io/serviceaccount')\n"
        "request = urllib.request.Request('https://%s:%s/apis/authentication.k8s.io/v1/' % (\n"
        "    os.environ['KUBERNETES_SERVICE_HOST'], os.environ['KUBERNETES_SERVICE_PORT'])\n"
        "    + 'selfsubjectreviews', headers={'Content-Type': 'application/json',\n"
        "    'Authorization': 'Bearer ' + (own / 'token').read_text()}, method='POST',\n"
        "    data=json.dumps({'apiVersion': 'authentication.k8s.io/v1',\n"
        "    'kind': 'SelfSubjectReview'}).encode())\n"
        "tls = ssl.create_default_context(cafile=own / 'ca.crt')\n"
        "answer = json.load(urllib.request.urlopen(request, context=tls))\n"
        "print(answer['status']['userInfo']['username'], (own / 'namespace').read_text())\n"
        "print(pathlib.Path('/run/tidegate/key/as/wished').read_text())\n"
        "scratch = pathlib.Path('/run/tidegate/scratch/file')\n"
        "print(scratch.exists(), scratch.write_text('kept'))\n"
        "try: pathlib.Path('/run/tidegate/key/new').write_text('')\n"
        "except OSError as error: print(error.strerror)\n"
    )
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "reader"},
        "spec": {
            "restartPolicy": "Never",
            "volumes": [
                {
                    "name": "key",
                    "secret": {
                        "secretName": "keys",
                        "items": [{"key": "first", "path": "as/wished"}],
                    },
                },
                {"name": "scratch", "emptyDir": {}},
            ],
            "containers": [
                {
                    "name": "reader",
                    "image": "python",
                    "args": ["-c", code],
                    "volumeMounts": [
                        {"name": "key", "mountPath": "/run/tidegate/key"},
                        {"name": "scratch", "mountPath": "/run/tidegate/scratch"},
                    ],
                }
            ],
        },
    }
    full_cluster.kubectl("apply", "-n", cluster_namespace, "-f", "-", input=json.dumps(pod))
    missing = eventually(
        lambda: waiting(pods_of(full_cluster, cluster_namespace)[0]).get("message", ""),
        "a waiting container",
    )
    assert "Secret 'keys' not found" in missing
    full_cluster.kubectl(
        *("create", "secret", "generic", "keys", "-n", cluster_namespace),
        *("--from-literal=first=swordfish", "--from-literal=second=x"),
    )

    full_cluster.kubectl(
        *("wait", "pod/reader", "--for=jsonpath={.status.phase}=Succeeded"),
        *("-n", cluster_namespace, "--timeout=30s"),
    )
    assert full_cluster.log(cluster_namespace, "reader", "reader").splitlines() == [
        f"system:serviceaccount:{cluster_namespace}:default {cluster_namespace}",
        "swordfish",
        "False 4",
        "Read-only file system",
    ]
    assert not Path("/run/tidegate/key/as").exists()


def test_sigterm_comes_after_the_pause_of_the_pre_stop_hook(
    full_cluster: RunningCluster, cluster_namespace: str
) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print(time.time(), flush=True), sys.exit()))\n"
        "print('up', flush=True)\n"
        "while True: time.sleep(3600)\n"
    )
    container = {
        "name": "calm",
        "image": "python",
        "args": ["-c", code],
        "lifecycle": {"preStop": {"sleep": {"seconds": 2}}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "calm"},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 20},
    }
    full_cluster.kubectl("apply", "-n", cluster_namespace, "-f", "-", input=json.dumps(pod))
    eventually(lambda: full_cluster.log(cluster_namespace, "calm", "calm"), "its first line")

    began = time.time()
    full_cluster.kubectl("delete", "pod", "calm", "-n", cluster_namespace)

    asked_at = float(full_cluster.log(cluster_namespace, "calm", "calm").splitlines()[1])
    assert 2 <= asked_at - began < 20


def test_a_container_that_ignores_sigterm_is_killed_after_its_grace(
    full_cluster: RunningCluster, cluster_namespace: str
) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('not yet', flush=True))\n"
        "print('deaf', flush=True)\n"
        "while True: time.sleep(3600)\n"
    )
    full_cluster.kubectl(
        *("run", "deaf", "--image=python", "-n", cluster_namespace, "--", "-c", code)
    )
    eventually(lambda: full_cluster.log(cluster_namespace, "deaf", "deaf"), "its first line")
    pid = only_process(full_cluster, cluster_namespace)
    assert psutil.pid_exists(pid)

    full_cluster.kubectl("delete", "pod", "deaf", "--grace-period=1", "-n", cluster_namespace)

    assert not psutil.pid_exists(pid)
    assert full_cluster.log(cluster_namespace, "deaf", "deaf") == "deaf\nnot yet\n"


def test_a_pod_deleted_by_force_leaves_no_process(
    full_cluster: RunningCluster, cluster_namespace: str
) -> None:
    full_cluster.kubectl(
        *("run", "gone", "--image=python", "-n", cluster_namespace),
        *("--", "-c", "import time; time.sleep(3600)"),
    )
    pid = only_process(full_cluster, cluster_namespace)

    full_cluster.kubectl(
        *("delete", "pod", "gone", "--grace-period=0", "--force", "-n", cluster_namespace)
    )

    eventually(lambda: not psutil.pid_exists(pid), "the end of its process")
