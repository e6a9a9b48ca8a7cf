"""The operator as an extension of the real API server; only the engines are made up."""

from __future__ import annotations

import asyncio
import json
import ssl
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.pki import Pki
from tidegate_devcluster.processes import free_port
from tidegate_devcluster.redis_server import RedisServer
from tidegate_operator import external_metrics as module
from tidegate_operator.external_metrics import (
    ExternalMetrics,
    PoolSignals,
    serving_external_metrics,
)
from tidegate_operator.kube import KubeApi
from tidegate_operator.metrics import DEMAND
from tidegate_policies.wire import TenantCounters
from tidegate_testing.cluster import eventually
from tidegate_testing.external_metrics import (
    API_PATH,
    Server,
    a_server,
    registered,
    values_of,
)
from tidegate_testing.helm import OPERATOR, Helm
from tidegate_testing.operator_process import (
    OperatorSetup,
    a_pod,
    a_pool,
    apply,
    make_ready,
    running_operator,
)
from tidegate_testing.reporting_engine import ReportingEngine, reporting_engine

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

DESIRED = "tidegate_pool_desired_replicas"


@dataclass
class Served:
    """A namespace with the pools `chat`, of two engines, and `batch`, of none."""

    namespace: str
    server: Server
    redis: RedisServer
    engines: tuple[ReportingEngine, ...]


@pytest.fixture(scope="module")
def served(
    crds_installed: None,  # noqa: ARG001
    assets: Assets,
    control_plane: ControlPlane,
    kubectl: Kubectl,
    helm: Helm,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """Served by an operator that never leads: somebody else does, and for long."""
    home = f"test-{uuid.uuid4().hex[:10]}"
    folder = tmp_path_factory.mktemp("external-metrics")
    with ExitStack() as exits:
        server = a_server(control_plane, kubectl, helm, home, folder / "certificates")
        redis = exits.enter_context(RedisServer(folder / "redis", assets))
        batch = a_pool("batch")
        batch["spec"]["selector"]["matchLabels"]["app"] = "none"
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": OPERATOR},
            "spec": {
                "holderIdentity": "somebody",
                "leaseDurationSeconds": 3600,
                "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            },
        }
        pods = ("engine-0", "engine-1")
        apply(kubectl, home, a_pool(), batch, lease, *map(a_pod, pods))
        for pod in pods:
            make_ready(kubectl, home, pod)
        setup = OperatorSetup(
            kubeconfig=server.kubeconfig,
            redis_url=redis.url,
            directory=folder,
            lease=f"{home}/{OPERATOR}",
            external_metrics_port=server.port,
            certificates=server.certificates,
        )
        engines = tuple(
            exits.enter_context(reporting_engine(redis.url, f"{home}/chat", pod, setup.public_key))
            for pod in pods
        )
        exits.enter_context(running_operator(setup))
        exits.enter_context(registered(kubectl, server))
        yield Served(home, server, redis, engines)


def value(kubectl: Kubectl, served: Served, metric: str = DESIRED) -> str:
    (item,) = values_of(kubectl, served.namespace, metric, "pool_name=chat")
    assert item["metricLabels"] == {"pool_namespace": served.namespace, "pool_name": "chat"}
    return str(item["value"])


def test_every_signal_is_listed_and_0_without_traffic(kubectl: Kubectl, served: Served) -> None:
    listed = json.loads(kubectl("get", "--raw", API_PATH, check=True).stdout)
    names = {f"tidegate_pool_{name}" for name in DEMAND}
    assert {one["name"] for one in listed["resources"]} == names
    eventually(lambda: value(kubectl, served) == "0", "both engines to be heard")
    assert {value(kubectl, served, name) for name in names} == {"0"}


def test_load_asks_for_engines_and_a_silent_one_is_taken_for_needed(
    kubectl: Kubectl, served: Served
) -> None:
    one, two = served.engines
    try:
        for engine in served.engines:
            engine.tenants = (TenantCounters(tenant="t", kv_used_blocks=90),)
        eventually(lambda: value(kubectl, served) == "3", "what 180 of 200 blocks ask for")
        assert value(kubectl, served, "tidegate_pool_kv_utilization_ratio") == "900m"
        for engine in served.engines:
            engine.tenants = ()
        eventually(lambda: value(kubectl, served) == "0", "no load")
        two.cut_off.set()
        eventually(lambda: value(kubectl, served) == "1", "a silent engine")
    finally:
        two.cut_off.clear()
        one.tenants = two.tenants = ()


def test_a_namespace_sees_those_of_its_own_pools_that_the_selector_chooses(
    kubectl: Kubectl, served: Served, namespace: str
) -> None:
    def names(selector: str, where: str = served.namespace) -> list[str]:
        items = values_of(kubectl, where, DESIRED, selector)
        return sorted(item["metricLabels"]["pool_name"] for item in items)

    assert names("") == ["batch", "chat"]
    assert names(f"pool_namespace={served.namespace},pool_name%21=chat") == ["batch"]
    assert names("pool_name=other") == []
    assert names(f"pool_namespace={served.namespace}", namespace) == []
    apply(kubectl, namespace, a_pool())
    assert names("", namespace) == ["chat"]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("tidegate_pool_other", "(NotFound)"),
        (f"{DESIRED}?labelSelector=a%20b", "not a label selector: 'a b'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_reason(
    kubectl: Kubectl, served: Served, path: str, told: str
) -> None:
    asked = kubectl("get", "--raw", f"{API_PATH}/namespaces/{served.namespace}/{path}")
    assert asked.returncode != 0
    assert told in asked.stderr


def client(pki: Pki, certificate: tuple[Path, Path] | None = None) -> httpx.Client:
    tls = ssl.create_default_context(cafile=str(pki.ca))
    tls.check_hostname = False
    if certificate is not None:
        tls.load_cert_chain(*certificate)
    return httpx.Client(verify=tls)


def test_nobody_but_the_api_server_is_answered(control_plane: ControlPlane, served: Served) -> None:
    """Whoever forges its headers needs its certificate, too: the CA's signature isn't enough."""
    url = f"https://127.0.0.1:{served.server.port}{API_PATH}"
    forged = {"x-remote-user": "admin", "x-remote-group": "system:masters"}
    ours = served.server.pki
    users = control_plane.kubeconfig.parent
    front_proxy = (users / "front-proxy-client.crt", users / "front-proxy-client.key")
    for certificate in (None, ours.user("front-proxy-client")):
        with client(ours, certificate) as stranger, pytest.raises(httpx.TransportError):
            stranger.get(url, headers=forged)
    with client(ours, (users / "admin.crt", users / "admin.key")) as admin:
        refused = admin.get(url, headers=forged)
        assert (refused.status_code, refused.json()["reason"]) == (401, "Unauthorized")
    with client(ours, front_proxy) as api_server:
        assert api_server.get(url).status_code == 200
        elsewhere = f"{url}/namespaces/default%2F..%2F{served.namespace}/{DESIRED}"
        assert api_server.get(elsewhere).status_code == 404


def test_without_redis_there_is_no_answer_rather_than_a_wrong_one(
    kubectl: Kubectl, served: Served
) -> None:
    path = f"{API_PATH}/namespaces/{served.namespace}/{DESIRED}"
    served.redis.stop()
    try:
        asked = kubectl("get", "--raw", path)
        assert (asked.returncode, "can't be read" in asked.stderr) == (1, True)
    finally:
        served.redis.restart()
    eventually(lambda: value(kubectl, served) == "0", "the engines to be heard again")


async def test_renewed_certificates_are_taken_and_broken_ones_are_not(
    control_plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    pki, port, nothing = Pki(tmp_path / "pki"), free_port(), cast(Any, None)
    users = control_plane.kubeconfig.parent
    tls = ssl.create_default_context(cafile=str(pki.ca))
    tls.load_cert_chain(users / "front-proxy-client.crt", users / "front-proxy-client.key")

    def renew() -> bytes:
        for file in pki.server("tls", ["127.0.0.1"]):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return ssl.PEM_cert_to_DER_cert((tmp_path / "tls.crt").read_text())

    async def shown() -> bytes | None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
            certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.write(b"GET / HTTP/1.1\r\nhost: operator\r\nconnection: close\r\n\r\n")
            # Until the server is through with it: the loop must end without open connections.
            await reader.read()
            writer.close()
            await writer.wait_closed()
        except OSError:
            return None
        return cast(bytes, certificate)

    async with KubeApi.connected(control_plane.kubeconfig) as api:
        signals = PoolSignals(api, nothing, ())
        metrics = ExternalMetrics(api, signals, certificates=tmp_path, host="127.0.0.1", port=port)
        async with serving_external_metrics(metrics):
            # There was none at first: it is tried again.
            assert await shown() is None
            renewed = b""
            for _ in range(2):
                renewed = renew()
                async with asyncio.timeout(10):
                    while await shown() != renewed:
                        await asyncio.sleep(module.LOOK_SECONDS)
            (tmp_path / "tls.key").write_text("")
            for _ in range(5):
                await asyncio.sleep(module.LOOK_SECONDS)
                assert await shown() == renewed
    assert await shown() is None
