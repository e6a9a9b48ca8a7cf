"""A pool under traffic, scraped by a real Prometheus: operator, two engines, two tenants."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.processes import free_port
from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import EngineProcess, an_engine_process
from tidegate_testing.helm import Helm, listed
from tidegate_testing.operator_process import (
    Manifest,
    OperatorSetup,
    a_key_secret,
    a_pod,
    apply,
    make_ready,
    running_operator,
    wait_for_conditions,
)
from tidegate_testing.prometheus import Prometheus

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "charts/tidegate/files/rules.yaml"
NAMESPACE = "team-gold"
GOLD = f"{NAMESPACE}/gold"
POOL = f"{NAMESPACE}/chat"
RELEASE_NAMESPACE = "observability"
RIGHTS = {
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}
RANGE = "20s"
MAX_PROMPT_TOKENS = 700
DATA_SECONDS = 45.0


@dataclass
class Watched:
    """A pool under traffic and who watches it.

    Attributes:
        weight: Of gold, as it is now.
    """

    prometheus: Prometheus
    kubectl: Kubectl
    engines: list[EngineProcess]
    weight: int = 300

    def change(self) -> None:
        """Change gold's policy, so that there is a change to be shown."""
        self.weight = 700 - self.weight
        apply(self.kubectl, NAMESPACE, _policy("gold", "premium", weight=self.weight, **_GOLD))
        wait_for_conditions(self.kubectl, "tp", "gold", NAMESPACE, Programmed="Programmed")

    def data(self, expr: str, variables: Mapping[str, str]) -> list[Any]:
        """Return the series of a panel's query that have a number; waits for the first ones."""
        query = filled_in(expr, variables)

        def ask() -> list[Any]:
            return [one for one in self.prometheus.query(query) if one["value"][1] != "NaN"]

        if not ask():
            # What happens rarely may have left the query's range.
            self.change()
        return eventually(ask, f"data of {query}", timeout_seconds=DATA_SECONDS)


def filled_in(text: str, variables: Mapping[str, str]) -> str:
    """Put values for variables, as Grafana does."""
    known = {"__rate_interval": RANGE, "__range": RANGE, **variables}
    for name in sorted(known, key=len, reverse=True):
        text = text.replace(f"${name}", known[name])
    assert "$" not in text, text
    return text


@pytest.fixture(scope="session")
def operator_account(kubectl: Kubectl, helm: Helm) -> str:
    """The chart's ServiceAccount, with what the chart grants and forbids it."""
    values = {
        "operator": {"apiKeyNamespaces": ["*"]},
        "monitoring": {"tenantDashboards": {"enabled": True}},
    }
    rendered = helm.render(values=values, namespace=RELEASE_NAMESPACE)
    kubectl("create", "namespace", RELEASE_NAMESPACE, check=True)
    rules = [one for one in rendered if one["kind"] in RIGHTS]
    kubectl("apply", "-f", "-", input=listed(rules), check=True)
    return f"system:serviceaccount:{RELEASE_NAMESPACE}:tidegate-operator"


@pytest.fixture(scope="session")
def watched(
    assets: Assets,
    control_plane: ControlPlane,
    operator_account: str,
    kubectl: Kubectl,
    crds_installed: None,  # noqa: ARG001
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Watched]:
    """The pool of `team-gold`, from its first scrape on under traffic."""
    root = tmp_path_factory.mktemp("observed")
    setup = OperatorSetup(
        kubeconfig=control_plane.user_kubeconfig(
            operator_account,
            ["system:serviceaccounts", f"system:serviceaccounts:{RELEASE_NAMESPACE}"],
        ),
        redis_url=redis_server.url,
        directory=root,
        metrics_port=free_port(),
        has_tenant_dashboards=True,
        sweep_seconds=2.0,
    )
    kubectl("create", "namespace", NAMESPACE, check=True)
    apply(kubectl, NAMESPACE, *_objects())
    with ExitStack() as exits:
        exits.enter_context(running_operator(setup))
        engines = [exits.enter_context(_engine(setup, root, number)) for number in range(2)]
        for number, engine in enumerate(engines):
            engine.wait_until_ready()
            make_ready(kubectl, NAMESPACE, f"engine-{number}")
        assert setup.metrics_port is not None
        targets = {"engines": [e.port for e in engines], "operator": [setup.metrics_port]}
        rules = [RULES] if RULES.exists() else []
        prometheus = exits.enter_context(
            Prometheus(root / "prometheus", assets, targets, rules=rules)
        )
        eventually(
            lambda: prometheus.query("sum(tidegate_engines{state='programmed'}) == 2"),
            "both engines run the policy",
        )
        exits.enter_context(_Traffic(engines))
        yield Watched(prometheus, kubectl, engines)


_GOLD = {
    "kv": {"nominalPercent": 40},
    "limits": {"maxPromptTokens": MAX_PROMPT_TOKENS},
    "serviceLevel": {
        "ttft": {"target": "50ms", "percentile": 95},
        "itl": {"target": "20ms", "percentile": 95},
    },
}


def _policy(name: str, tier: str, **spec: object) -> Manifest:
    return {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": "TenantPolicy",
        "metadata": {"name": name},
        "spec": {
            "poolRefs": [{"name": "chat"}],
            "priorityTier": tier,
            "apiKeySecretRefs": [{"name": "keys", "key": name}],
            **spec,
        },
    }


def _objects() -> list[Manifest]:
    def of_kind(kind: str, name: str, **spec: object) -> Manifest:
        version = "tidegate.io/v1alpha1"
        return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}

    return [
        of_kind("PriorityTier", "premium", value=10),
        of_kind("PriorityTier", "background", value=0),
        of_kind("EnginePool", "chat", selector={"matchLabels": {"app": "engine"}}),
        a_pod("engine-0"),
        a_pod("engine-1"),
        a_key_secret("keys", gold="sk-gold", batch="sk-batch"),
        _policy("gold", "premium", weight=300, **_GOLD),
        _policy("batch", "background", preemption={"mode": "Swap", "minQuantumTokens": 0}),
    ]


def _engine(setup: OperatorSetup, root: Path, number: int) -> Any:  # noqa: ANN401
    folder = root / f"engine-{number}"
    folder.mkdir()
    return an_engine_process(
        Publisher(setup.redis_url, pool=POOL),
        folder,
        TIDEGATE_VERIFY_KEY=setup.public_key,
        TIDEGATE_POD_NAME=f"engine-{number}",
        TIDEGATE_MAX_NUM_SEQS="4",
        TIDEGATE_KV_BLOCKS="256",
        TIDEGATE_HOST_KV_BLOCKS="128",
        TIDEGATE_SIMULATED_STEP_SECONDS="0.01",
    )


class _Traffic:
    """Clients of both tenants, until the block ends: some hang up, some ask for too much."""

    def __init__(self, engines: list[EngineProcess]) -> None:
        self._ports = [engine.port for engine in engines]
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(port, tenant, number))
            for port in self._ports
            for tenant, clients in (("gold", 2), ("batch", 5))
            for number in range(clients)
        ]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, port: int, tenant: str, client: int) -> None:
        headers = {"authorization": f"Bearer sk-{tenant}"}
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}/v1", headers=headers, timeout=30, trust_env=False
        ) as http:
            for number in count():
                if self._stopping.is_set():
                    return
                self._ask(http, client, number)

    def _ask(self, http: httpx.Client, client: int, number: int) -> None:
        length = MAX_PROMPT_TOKENS + 1 if number % 7 == 6 else 40 + 60 * (number % 5)
        body = {
            "model": "simulated",
            "prompt": "x" * length,
            "max_tokens": 5 + 7 * (number % 6),
            "stream": True,
        }
        with (
            suppress(httpx.TransportError),
            http.stream("POST", "/completions", json=body) as answer,
        ):
            for seen, _ in enumerate(answer.iter_lines()):
                if number % 5 == 4 and seen > client:
                    return
