"""`tidegate status`, `top`, `explain`, `get decisions` and `kubectl tidegate`, as users run them.

A real API server, a real operator and a real engine; only the engine's pod is an object alone.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import stat
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner, Result

from tidegate_cli.app import app
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.processes import free_port
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import POD, EngineProcess, an_engine_process
from tidegate_testing.operator_process import (
    OperatorSetup,
    a_key_secret,
    a_pod,
    a_policy,
    a_pool,
    apply,
    make_ready,
    running_operator,
    wait_for_conditions,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

ROOT = Path(__file__).parents[2]
TOKEN = "the-engines-admin-token"
URGENT = "urgent-to-be-explained"
COMMAND = [sys.executable, "-m", "tidegate_cli"]


@dataclass
class Fleet:
    """A pool of one engine in `home`, with the tenant gold; the tenant acme stands in `away`."""

    home: str
    away: str
    kubeconfig: Path
    operator_port: int
    engine: EngineProcess

    @property
    def operator(self) -> str:
        return f"http://127.0.0.1:{self.operator_port}"

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "TIDEGATE_OPERATOR": self.operator,
            **more,
        }

    def run(self, *arguments: str, **more: str) -> Result:
        """Run the command in this process: starting one takes seconds."""
        if "--kubeconfig" not in arguments:
            arguments = (*arguments, "--kubeconfig", str(self.kubeconfig))
        return CliRunner().invoke(app, arguments, env={"TIDEGATE_OPERATOR": self.operator, **more})

    def json(self, *arguments: str) -> Any:  # noqa: ANN401
        done = self.run(*arguments, "--json")
        assert done.exit_code == 0, done.stderr
        return json.loads(done.stdout)

    def send(self, key: str, name: str) -> socket.socket:
        """Send a request that takes for ever; closing the connection cancels it."""
        body = json.dumps({"model": "simulated", "prompt": "Hi", "max_tokens": 20_000}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: engine\r\nx-request-id: {name}\r\n"
            f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        connection = socket.create_connection(("127.0.0.1", self.engine.port))
        connection.sendall(head.encode() + body)
        return connection


def namespaced(kubectl: Kubectl, name: str) -> str:
    """Make a namespace with the ServiceAccount that a controller would make."""
    kubectl("create", "namespace", name, check=True)
    kubectl("create", "serviceaccount", "default", "-n", name, check=True)
    return name


def set_address(kubectl: Kubectl, namespace: str, pod: str, address: str) -> None:
    """Give a pod an address, as its kubelet would."""
    status = json.dumps({"status": {"podIP": address, "podIPs": [{"ip": address}]}})
    where = ["-n", namespace, "--subresource=status", "-p", status]
    kubectl("patch", "pod", pod, *where, check=True)


@pytest.fixture(scope="module")
def fleet(
    operator_setup: OperatorSetup,
    kubectl: Kubectl,
    crds_installed: None,  # noqa: ARG001
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Fleet]:
    home = namespaced(kubectl, f"home-{uuid.uuid4().hex[:8]}")
    away = namespaced(kubectl, f"away-{uuid.uuid4().hex[:8]}")
    # What the chart has to give the operator for this, beside its other rights.
    kubectl(
        *("create", "clusterrolebinding", f"reviews-{home}", "--clusterrole=system:auth-delegator"),
        "--serviceaccount=tidegate:tidegate-operator",
        check=True,
    )
    admin_port, operator_port = free_port(), free_port()
    pool, pod = a_pool(), a_pod(POD)
    pool["spec"]["allowedNamespaces"] = {"from": "All"}
    pod["spec"]["containers"][0]["ports"] = [{"name": "admin", "containerPort": admin_port}]
    ref = [{"name": "keys", "key": "key"}]
    urgent = {"kind": "PriorityTier", "metadata": {"name": URGENT}, "spec": {"value": 1000}}
    urgent["apiVersion"] = pool["apiVersion"]
    apply(
        kubectl,
        home,
        urgent,
        pool,
        pod,
        a_key_secret("keys", key="sk-gold", boss="sk-boss"),
        a_policy("gold", weight=200, apiKeySecretRefs=ref),
        a_policy("boss", priorityTier=URGENT, apiKeySecretRefs=[{"name": "keys", "key": "boss"}]),
    )
    acme = a_policy(
        "acme",
        apiKeySecretRefs=ref,
        poolRefs=[{"name": "chat", "namespace": home}],
        preemption={"mode": "Recompute", "minQuantumTokens": 0},
    )
    apply(kubectl, away, a_key_secret("keys", key="sk-acme"), acme)
    make_ready(kubectl, home, POD)
    set_address(kubectl, home, POD, "127.0.0.1")
    setup = replace(
        operator_setup,
        directory=tmp_path_factory.mktemp("explaining"),
        explain_port=operator_port,
        engine_token=TOKEN,
    )
    publisher = Publisher(setup.redis_url, pool=f"{home}/chat")
    with (
        running_operator(setup),
        an_engine_process(
            publisher,
            tmp_path_factory.mktemp("engine"),
            TIDEGATE_VERIFY_KEY=setup.public_key,
            TIDEGATE_ADMIN_PORT=str(admin_port),
            TIDEGATE_ADMIN_TOKEN=TOKEN,
            TIDEGATE_MAX_NUM_SEQS="1",
            TIDEGATE_SIMULATED_STEP_SECONDS="0.02",
        ) as engine,
    ):
        wait_for_conditions(kubectl, "tenantpolicy", "gold", home, Programmed="Programmed")
        wait_for_conditions(kubectl, "tenantpolicy", "acme", away, Programmed="Programmed")
        engine.wait_until_ready()
        yield Fleet(home, away, kubectl.kubeconfig, operator_port, engine)


@pytest.fixture
def busy(fleet: Fleet) -> Iterator[Fleet]:
    """The fleet with one request of gold running, and one of each waiting."""
    with ExitStack() as exits:
        for count, (key, name) in enumerate(
            [("sk-gold", "first"), ("sk-gold", "second"), ("sk-acme", "theirs")], 1
        ):
            exits.enter_context(fleet.send(key, name))

            def all_are_in(count: int = count) -> bool:
                answer = fleet.engine.get("/metrics")
                return answer is not None and requests_in(answer.text) == count

            eventually(all_are_in, f"{count} requests in the engine")
        yield fleet
    eventually(lambda: requests_in(metrics_of(fleet)) == 0, "all cancelled")


def metrics_of(fleet: Fleet) -> str:
    answer = fleet.engine.get("/metrics")
    return "" if answer is None else answer.text


def requests_in(metrics: str) -> float:
    lines = [one for one in metrics.splitlines() if one.startswith("tidegate_requests{")]
    return sum(float(one.rpartition(" ")[2]) for one in lines) if lines else -1


def alive(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the requests that are in the engine: those of earlier tests had the same names."""
    return [one for one in answer["requests"] if one["state"] != "cancelled"]


def test_a_waiting_request_is_explained_from_its_pools_namespace(busy: Fleet) -> None:
    answer = busy.json("explain", "second", "-n", busy.home)
    (found,) = alive(answer)
    assert (answer["pool"], found["engine"]) == (f"{busy.home}/chat", POD)
    assert (found["tenant"], found["state"]) == (f"{busy.home}/gold", "waiting")
    assert (found["position"], found["predicted_ttft_seconds"] > 0) == (1, True)
    shown = busy.run("explain", "second", "-n", busy.home)
    assert shown.exit_code == 0, shown.stderr
    for text in ("waits for", "queued since", "position", "first token"):
        assert text in shown.stdout


def test_a_tenants_namespace_sees_its_own_requests_and_no_others(busy: Fleet) -> None:
    (theirs,) = alive(busy.json("explain", "theirs", "-n", busy.away))
    assert theirs["tenant"] == f"{busy.away}/acme"
    refused = busy.run("explain", "second", "-n", busy.away)
    assert refused.exit_code == 1
    assert "knows a request 'second' of yours" in refused.stderr
    own = busy.json("get", "decisions", "-n", busy.away)["decisions"]
    everyones = busy.json("get", "decisions", "-n", busy.home)["decisions"]
    assert {one["tenant"] for one in own} <= {f"{busy.away}/acme"}
    assert f"{busy.home}/gold" in {one["tenant"] for one in everyones}


def test_who_was_taken_out_is_told_for_which_tier_and_nowhere_for_whom(fleet: Fleet) -> None:
    asked = ("explain", "night")
    with fleet.send("sk-acme", "night"):
        eventually(lambda: requests_in(metrics_of(fleet)) == 1, "the request in the engine")
        with fleet.send("sk-boss", "secret"):

            def preempted() -> Any:  # noqa: ANN401
                (found,) = fleet.json(*asked, "-n", fleet.away)["requests"]
                # "turn": it was taken out just now, and nobody has looked at it again.
                return found if found["preempted"] and found["waits_for"] != "turn" else None

            night = eventually(preempted, "the preemption")
            own = {"authorization": "Bearer sk-acme"}
            seen = [
                fleet.run(*one, "-n", fleet.away, *more).stdout
                for one in (asked, ("get", "decisions"), ("status",), ("top", "--once"))
                for more in ((), ("--json",))
            ]
            engine = f"http://127.0.0.1:{fleet.engine.port}/v1/tidegate"
            seen += [httpx.get(f"{engine}/{it}", headers=own).text for it in ("usage", "queue")]
    (cut,) = night["preempted"]
    assert (cut["cause"], cut["tier"]) == ("displaced", URGENT)
    assert (cut["tenant"], cut["request_id"]) == (None, None)
    assert (night["state"], night["waits_for"], night["position"]) == ("waiting", "slot", 1)
    assert night["queued_since"] < cut["time"]
    assert f"displaced, for another tenant of tier {URGENT}" in " ".join(seen[0].split())
    for text in seen:
        assert "acme" in text
        assert not [secret for secret in ("boss", "secret", "gold") if secret in text]
    eventually(lambda: requests_in(metrics_of(fleet)) == 0, "all cancelled")


def test_decisions_are_listed_by_tenant_by_request_and_by_pool(busy: Fleet) -> None:
    where = ("--pool", f"{busy.home}/chat", "-n", busy.home)
    of_first = busy.json("get", "decisions", "--request", "first", *where)["decisions"]
    assert {one["verdict"] for one in of_first} >= {"admitted"}
    assert all("-first-" in one["request_id"] for one in of_first)
    gold = f"{busy.home}/gold"
    of_gold = busy.json("get", "decisions", "--tenant", gold, "--limit", "1", *where)["decisions"]
    assert [one["tenant"] for one in of_gold] == [gold]
    shown = busy.run("get", "decisions", "--request", "first", *where)
    assert "admitted" in shown.stdout


def test_status_and_top_show_pools_and_tenants(busy: Fleet) -> None:
    def is_waiting() -> bool:
        (pool,) = busy.json("status", "-n", busy.home)["pools"]
        return bool(pool["running"] == 1 and pool["waiting"] == 2)

    eventually(is_waiting, "usage in status")
    view = busy.json("status", "-n", busy.home)
    (pool,), (_, gold) = view["pools"], view["tenants"]
    assert (pool["name"], pool["engines"], pool["laggards"]) == ("chat", "1/1", [])
    assert pool["revision"] >= 1
    assert (gold["name"], gold["weight"], gold["running"]) == ("gold", 200, 1)
    assert {one["type"]: one["status"] for one in gold["conditions"]}["Programmed"] == "True"
    everywhere = busy.json("top", "--once", "-A")
    assert {busy.home, busy.away} <= {one["namespace"] for one in everywhere["tenants"]}
    shown = busy.run("status", "-A")
    assert f"{busy.home}/chat" in shown.stdout
    assert f"{busy.away}/acme" in shown.stdout
    assert "ready" in shown.stdout


def test_top_goes_on_until_ctrl_c_and_leaves_the_screen_as_it_was(fleet: Fleet) -> None:
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "top", "-n", fleet.home, "--interval", "0.2"],
        env=fleet.environment(TERM="xterm", COLUMNS="200", LINES="40"),
        stdout=terminal,
        stderr=subprocess.PIPE,
    )
    os.close(terminal)
    printed = b""
    while printed.count(b"chat") < 3:
        printed += os.read(screen, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while part := os.read(screen, 65536):
            printed += part
    except OSError:  # so a terminal ends whose other side is closed
        os.close(screen)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, b"")
    assert printed.rstrip().endswith((b"\x1b[?25h", b"\x1b[?1049l"))


def test_kubectl_finds_the_command_as_its_plug_in(
    fleet: Fleet, kubectl: Kubectl, tmp_path: Path
) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["kubectl-tidegate"].partition(":")
    plugin = tmp_path / "kubectl-tidegate"
    plugin.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [kubectl.path, "tidegate", "status", "-n", fleet.home],
        env=fleet.environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gold" in done.stdout


def a_token(kubectl: Kubectl, namespace: str, audience: str) -> str:
    asked = kubectl(
        *("create", "token", "default", "-n", namespace, f"--audience={audience}"), check=True
    )
    return asked.stdout.strip()


def test_the_operator_answers_nobody_without_a_token_that_was_made_for_it(
    fleet: Fleet, kubectl: Kubectl
) -> None:
    url = f"{fleet.operator}/explain/{fleet.home}/chat/first"
    other_purpose = a_token(kubectl, fleet.home, "https://kubernetes.default.svc")
    for headers in (
        {},
        {"x-tidegate-token": "nonsense"},
        {"x-tidegate-token": TOKEN},
        {"x-tidegate-token": other_purpose},
        {"authorization": f"Bearer {a_token(kubectl, fleet.home, 'tidegate.io')}"},
    ):
        refused = httpx.get(url, headers=headers)
        assert refused.status_code == 401, (headers, refused.text)
    good = {"x-tidegate-token": a_token(kubectl, fleet.home, "tidegate.io")}
    assert httpx.get(url.replace("chat", "other"), headers=good).status_code == 404
    assert httpx.get(f"{fleet.operator}/decisions/{fleet.home}/chat", headers=good).is_success


def machine_address() -> str | None:
    """Return an address of this machine that isn't loopback: the API server proxies to no other."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family is socket.AF_INET and not one.address.startswith(("127.", "169.254.")):
                return one.address
    return None


def test_the_operator_is_reached_through_the_api_server(busy: Fleet, kubectl: Kubectl) -> None:
    address = machine_address()
    if address is None:
        pytest.skip("this machine has no address but loopback")
    apply(kubectl, busy.home, a_pod("operator-0") | {"metadata": {"name": "operator-0"}})
    set_address(kubectl, busy.home, "operator-0", address)
    target = {"kind": "Pod", "namespace": busy.home, "name": "operator-0"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "tidegate-operator"},
        "spec": {"ports": [{"name": "explain", "port": 8082}]},
    }
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "tidegate-operator",
            "labels": {"kubernetes.io/service-name": "tidegate-operator"},
        },
        "addressType": "IPv4",
        # The API server's proxy leads to pods alone.
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}, "targetRef": target}],
        "ports": [{"name": "explain", "port": busy.operator_port}],
    }
    apply(kubectl, busy.home, service, endpoints)
    proxied = f"{busy.home}/tidegate-operator:explain"
    asked = ("explain", "second", "-n", busy.home, "--operator", proxied)
    eventually(lambda: busy.run(*asked).exit_code == 0, "the API server to know the endpoint")
    assert [one["position"] for one in alive(busy.json(*asked))] == [1]
    unknown = busy.run("explain", "unheard-of", "-n", busy.home, "--operator", proxied)
    assert "knows a request 'unheard-of' of yours" in unknown.stderr
    nobody = busy.run("explain", "second", "-n", busy.home, "--operator", f"{busy.home}/none:http")
    assert (nobody.exit_code, "no such Service" in nobody.stderr) == (1, True)


def test_errors_name_what_is_missing(
    fleet: Fleet, control_plane: ControlPlane, kubectl: Kubectl, tmp_path: Path
) -> None:
    without = fleet.run("status", "--kubeconfig", str(tmp_path / "none"))
    assert "no kubeconfig: there is no" in without.stderr
    as_stranger = ("--kubeconfig", str(control_plane.user_kubeconfig("stranger")))
    refused = fleet.run("status", "-n", fleet.home, *as_stranger)
    assert f"list enginepools in namespace '{fleet.home}'" in refused.stderr
    pool = ("--pool", f"{fleet.home}/chat", "-n", fleet.home)
    untrusted = fleet.run("explain", "first", *pool, *as_stranger)
    assert "verb create on serviceaccounts/token" in untrusted.stderr
    down = fleet.run("explain", "first", *pool, TIDEGATE_OPERATOR="http://127.0.0.1:1")
    assert "no operator answers at http://127.0.0.1:1" in down.stderr
    empty = namespaced(kubectl, f"empty-{uuid.uuid4().hex[:8]}")
    assert "has no EnginePool" in fleet.run("explain", "first", "-n", empty).stderr
    assert "There is no EnginePool" in fleet.run("status", "-n", empty).stdout
    elsewhere = fleet.run("explain", "first", "--pool", f"{fleet.home}/none", "-n", fleet.home)
    assert f"serves no EnginePool {fleet.home}/none" in elsewhere.stderr
    for done in (without, refused, untrusted, down, elsewhere):
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.stderr
        assert done.stderr.startswith("tidegate: ")


def test_a_down_engine_is_named(fleet: Fleet, kubectl: Kubectl) -> None:
    pod = a_pod("engine-down")
    pod["spec"]["containers"][0]["ports"] = [{"name": "admin", "containerPort": free_port()}]
    apply(kubectl, fleet.home, pod)
    set_address(kubectl, fleet.home, "engine-down", "127.0.0.1")
    try:
        lost = fleet.run("explain", "unheard-of", "-n", fleet.home)
        assert "engine-down" in lost.stderr
    finally:
        kubectl("delete", "pod", "engine-down", "-n", fleet.home, "--force", "--grace-period=0")
