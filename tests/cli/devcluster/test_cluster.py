from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tidegate_devcluster.assets import Assets, AssetSettings
from tidegate_devcluster.cluster import DevCluster
from tidegate_devcluster.kubelet import ProcessKubelet
from tidegate_devcluster.network import LoopbackNetwork
from tidegate_devcluster.pod import PORT_MAP_ANNOTATION
from tidegate_devcluster.processes import Lifeline
from tidegate_devcluster.service_proxy import ServiceProxy
from tidegate_testing.cluster import (
    IMAGES,
    RunningCluster,
    eventually,
    network_names,
    still_running,
)

pytestmark = pytest.mark.cluster

# Starts a cluster with one pod, tells what there is, and waits to be killed.
OWNER = """
import asyncio, json, subprocess, sys
from tidegate_devcluster.cluster import DevCluster

async def main():
    async with DevCluster(images={"python": [sys.executable]}) as cluster:
        cluster.kubectl("run", "sleeper", "--image=python", "--", "-c",
                        "import time; time.sleep(3600)", check=True)
        await asyncio.to_thread(cluster.kubectl, "wait", "pod/sleeper", "--for=condition=Ready",
                                "--timeout=30s", check=True)
        print(json.dumps({"root": str(cluster.root)}), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_nothing_is_left_when_its_process_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        root = Path(json.loads(owner.stdout.readline())["root"])
        descendants = psutil.Process(owner.pid).children(recursive=True)
        names = {process.name() for process in descendants}
        assert {"etcd", "kube-apiserver", "kube-scheduler", "redis-server"} <= names
        assert any("time.sleep(3600)" in " ".join(one.cmdline()) for one in descendants)

        os.kill(owner.pid, signal.SIGKILL)

    eventually(lambda: not still_running(descendants), "the end of every process")
    eventually(lambda: f"tg{owner.pid:06x}" not in network_names(), "the end of the network")
    eventually(lambda: not root.exists(), "the end of the temporary folder")


@pytest.mark.timeout(30)
async def test_cancelling_the_start_ends_a_build_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "modules" / "kubernetes"
    module.mkdir(parents=True)
    (module / "go.mod").write_text("module example.test/kubernetes\n\ngo 1.20\n")
    (module / "go.sum").write_text("")
    compiler = tmp_path / "compiler"
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    go.write_text(
        f"#!/bin/sh\nsleep 3600 &\necho $! > {compiler}.new\nmv {compiler}.new {compiler}\nwait\n"
    )
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(go.parent), prepend=os.pathsep)
    cache = tmp_path / "cache"
    assets = Assets(AssetSettings(cache, tmp_path / "modules"), lambda _: None)
    cluster = DevCluster(images={}, assets=assets, progress=lambda _: None)

    start = asyncio.create_task(cluster.__aenter__())
    await asyncio.to_thread(eventually, compiler.exists, "a build")
    process = psutil.Process(int(compiler.read_text()))
    start.cancel()

    with pytest.raises(asyncio.CancelledError):
        await start
    await asyncio.to_thread(
        eventually, lambda: not still_running([process]), "the end of the compiler"
    )
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


async def test_pods_without_namespaces_are_reached_through_the_proxy(
    full_cluster: RunningCluster,
    cluster_namespace: str,
    web: Callable[..., str],
    tmp_path: Path,
) -> None:
    network = LoopbackNetwork()
    with Lifeline() as lifeline:
        async with (
            ProcessKubelet(
                tmp_path,
                full_cluster.kubeconfig,
                IMAGES,
                network=network,
                lifeline=lifeline,
                node_name="loopback",
            ) as kubelet,
            ServiceProxy(full_cluster.kubeconfig, resolve=kubelet.endpoint) as proxy,
        ):
            address = proxy.address(cluster_namespace, "web")
            await asyncio.to_thread(_roll_out, full_cluster, cluster_namespace, web(2))

            variables = await asyncio.to_thread(_get, f"http://{address}/")

            shown = await asyncio.to_thread(
                full_cluster.kubectl,
                *("get", "pod", variables["HOSTNAME"], "-n", cluster_namespace, "-o", "json"),
            )
            ports = json.loads(shown.stdout)["metadata"]["annotations"][PORT_MAP_ANNOTATION]
            assert json.loads(ports) == {"8000": int(variables["WEB_PORT"])}
            await asyncio.to_thread(
                full_cluster.kubectl,
                *("delete", "deployment/web", "-n", cluster_namespace, "--cascade=foreground"),
            )
    full_cluster.kubectl("delete", "node", "loopback")


def _get(url: str) -> dict[str, str]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: dict[str, str] = json.load(answer)
        return body


def _roll_out(cluster: RunningCluster, namespace: str, manifest: str) -> None:
    deployment, service = manifest.split("\n---\n")
    content = json.loads(deployment)
    content["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "loopback"}
    cluster.kubectl(
        *("apply", "-n", namespace, "-f", "-"), input=f"{json.dumps(content)}\n---\n{service}"
    )
    cluster.kubectl("rollout", "status", "deployment/web", "-n", namespace, "--timeout=60s")
