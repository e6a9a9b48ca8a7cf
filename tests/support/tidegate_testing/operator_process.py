"""The real operator as a process of its own, and what it says about objects."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate_devcluster.kubectl import Kubectl
from tidegate_operator.keys import generate_signing_key, load_signing_key, public_key_text

Manifest = dict[str, Any]

STOP_SECONDS = 10.0
USAGE_SECONDS = 1.0
RUN = "import runpy; runpy.run_module('tidegate_operator', run_name='__main__')"


@dataclass(frozen=True, kw_only=True)
class OperatorSetup:
    """What an operator process needs; the same for each restart."""

    kubeconfig: Path
    redis_url: str
    directory: Path
    namespaces: tuple[str, ...] = ()
    secret_namespaces: tuple[str, ...] | None = None
    sweep_seconds: float = 60.0
    lease: str = ""
    metrics_port: int | None = None
    has_tenant_dashboards: bool = False
    prometheus_url: str = ""
    explain_port: int | None = None
    engine_token: str = ""
    external_metrics_port: int | None = None
    certificates: Path | None = None

    @property
    def public_key(self) -> str:
        """What engines verify policies with."""
        path = self.directory / "signing-key.pem"
        key = load_signing_key(path) if path.exists() else generate_signing_key(path)
        return public_key_text(key)

    def environment(self) -> dict[str, str]:
        """Return the process's environment."""
        assert self.public_key
        return os.environ | {
            "TIDEGATE_OPERATOR_KUBECONFIG": str(self.kubeconfig),
            "TIDEGATE_OPERATOR_REDIS_URL": self.redis_url,
            "TIDEGATE_OPERATOR_SIGNING_KEY_FILE": str(self.directory / "signing-key.pem"),
            "TIDEGATE_OPERATOR_NAMESPACES": ",".join(self.namespaces),
            "TIDEGATE_OPERATOR_SWEEP_SECONDS": str(self.sweep_seconds),
            "TIDEGATE_OPERATOR_USAGE_SECONDS": str(USAGE_SECONDS),
            "TIDEGATE_OPERATOR_TENANT_DASHBOARDS": str(self.has_tenant_dashboards),
            **self._explaining(),
            **self._serving_external_metrics(),
            **({"TIDEGATE_OPERATOR_LEASE": self.lease} if self.lease else {}),
            **(
                {"TIDEGATE_OPERATOR_PROMETHEUS_URL": self.prometheus_url}
                if self.prometheus_url
                else {}
            ),
            **(
                {"TIDEGATE_OPERATOR_SECRET_NAMESPACES": ",".join(self.secret_namespaces)}
                if self.secret_namespaces is not None
                else {}
            ),
            **(
                {"TIDEGATE_OPERATOR_METRICS_PORT": str(self.metrics_port)}
                if self.metrics_port
                else {}
            ),
        }

    def _serving_external_metrics(self) -> dict[str, str]:
        if self.external_metrics_port is None:
            return {}
        return {
            "TIDEGATE_OPERATOR_EXTERNAL_METRICS_PORT": str(self.external_metrics_port),
            "TIDEGATE_OPERATOR_EXTERNAL_METRICS_CERTIFICATES": str(self.certificates),
        }

    def _explaining(self) -> dict[str, str]:
        if self.explain_port is None:
            return {}
        token = self.directory / "engine-token"
        token.write_text(self.engine_token)
        return {
            "TIDEGATE_OPERATOR_EXPLAIN_PORT": str(self.explain_port),
            "TIDEGATE_OPERATOR_ENGINE_TOKEN_FILE": str(token),
        }


class OperatorProcess:
    """One running operator."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self.log = log

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def log_has(self, text: str) -> bool:
        """Whether it has printed the text."""
        return text in self.log.read_text()

    def wait(self, seconds: float) -> int:
        """Wait until it has ended by itself; returns its exit code."""
        return self._process.wait(seconds)

    def kill(self) -> None:
        """End it without warning."""
        self._process.kill()
        self._process.wait(timeout=STOP_SECONDS)

    def pause(self) -> None:
        """Stop it as a frozen machine does."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """Ask it to end; returns its exit code."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=STOP_SECONDS)


@contextmanager
def running_operator(setup: OperatorSetup, *, fault: str = "") -> Iterator[OperatorProcess]:
    """Run the operator for the length of the block; nothing is left behind.

    Args:
        setup: What it needs.
        fault: Python that runs in its process before it does, to break something.
    """
    log = setup.directory / f"operator-{len(list(setup.directory.glob('*.log')))}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{fault}\n{RUN}"],
            env=setup.environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        running = OperatorProcess(process, log)
        try:
            yield running
            if running.is_running:
                assert running.stop() == 0, log.read_text()
        finally:
            if running.is_running:
                running.kill()


def read(kubectl: Kubectl, kind: str, name: str, namespace: str = "") -> Manifest:
    """Return an object as JSON."""
    where = ["-n", namespace] if namespace else []
    found: Manifest = json.loads(
        kubectl("get", kind, name, *where, "-o", "json", check=True).stdout
    )
    return found


def conditions(manifest: Manifest) -> dict[str, tuple[str, str]]:
    """Return status and reason by condition, of those that are about the current generation."""
    generation = manifest["metadata"]["generation"]
    return {
        entry["type"]: (entry["status"], entry["reason"])
        for entry in manifest.get("status", {}).get("conditions", ())
        if entry["observedGeneration"] == generation
    }


def wait_until(
    probe: Callable[[], bool], *, timeout: float = 60.0, context: Callable[[], Any] | None = None
) -> None:
    """Ask `probe` until its answer is true."""
    latest = time.monotonic() + timeout
    while not probe():
        if time.monotonic() > latest:
            raise AssertionError(f"not true within {timeout} s; {context() if context else ''}")


def wait_for_conditions(
    kubectl: Kubectl, kind: str, name: str, namespace: str = "", **expected: str
) -> Manifest:
    """Wait until conditions of the current generation have these reasons; returns the object."""
    last: dict[str, Manifest] = {}

    def has_reasons() -> bool:
        last["object"] = read(kubectl, kind, name, namespace)
        found = conditions(last["object"])
        return all(found.get(key, ("", ""))[1] == reason for key, reason in expected.items())

    wait_until(has_reasons, context=lambda: json.dumps(last.get("object", {}).get("status")))
    return last["object"]


def apply(kubectl: Kubectl, namespace: str, *manifests: Mapping[str, Any]) -> None:
    """Apply manifests with the real kubectl, as a user does."""
    listed = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
    kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(listed), check=True)


def a_pool(name: str = "chat") -> Manifest:
    """A pool of the pods with the label app=engine."""
    return {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": "EnginePool",
        "metadata": {"name": name},
        "spec": {"selector": {"matchLabels": {"app": "engine"}}},
    }


def a_policy(name: str, **spec: object) -> Manifest:
    """A policy of the pool `chat`."""
    return {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": "TenantPolicy",
        "metadata": {"name": name},
        "spec": {"poolRefs": [{"name": "chat"}], **spec},
    }


def a_pod(name: str) -> Manifest:
    """An engine's pod; nobody runs it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "engine"}},
        "spec": {"containers": [{"name": "engine", "image": "engine"}]},
    }


def a_key_secret(name: str, **keys: str) -> Manifest:
    """A Secret with API keys, labelled for the operator."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "labels": {"tidegate.io/api-keys": "true"}},
        "data": {key: base64.b64encode(text.encode()).decode() for key, text in keys.items()},
    }


def change_status(
    kubectl: Kubectl, kind: str, name: str, namespace: str, *operations: Mapping[str, Any]
) -> None:
    """Change a status as somebody else, by the operations of a JSON patch."""
    where = ["-n", namespace, "--subresource=status", "--type=json"]
    kubectl("patch", kind, name, *where, "-p", json.dumps(operations), check=True)


def make_ready(kubectl: Kubectl, namespace: str, pod: str) -> None:
    """Make a pod ready, as its kubelet would."""
    status = json.dumps({"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    where = ["-n", namespace, "--subresource=status"]
    kubectl("patch", "pod", pod, *where, "-p", status, check=True)
