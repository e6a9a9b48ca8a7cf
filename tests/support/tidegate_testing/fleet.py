"""Control plane, Redis, operators and engines as processes of their own, to be killed in tests.

There is no kubelet: pods are objects that are made ready by hand, and their processes are started
where and when a test says so, each in a network of its own where this machine allows it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import httpx
import redis

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.errors import NetworkError
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.network import BridgeNetwork, LoopbackNetwork, PodNetwork
from tidegate_devcluster.processes import Lifeline
from tidegate_devcluster.redis_server import LOOPBACK, RedisServer
from tidegate_operator.keys import load_signing_key
from tidegate_policies.wire import envelope_key
from tidegate_testing.cluster import install_crds
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import engine_environment
from tidegate_testing.helm import OPERATOR_LEASE, Helm, operator_kubeconfig
from tidegate_testing.members import Member, forwarding
from tidegate_testing.operator_process import OperatorSetup, a_pod, a_pool, apply, make_ready

NAMESPACE = "serving"
POOL = "chat"
POOL_KEY = f"{NAMESPACE}/{POOL}"
ENGINE_PORT = 8000
OPERATOR_PORT = 9090
ANSWER_SECONDS = 5.0


class Fleet:
    """A pool `chat` of simulated engines and what governs it; a context manager.

    Operators and engines are not started by it. Operators have the rights that the chart gives.

    Attributes:
        kubectl: As administrator.
        redis_server: Of policies and reports.
        operators: By a Lease where there are several.
        engines: One per pod.
    """

    kubectl: Kubectl
    redis_server: RedisServer
    control_plane: ControlPlane
    operators: list[Member]
    engines: list[Member]

    def __init__(
        self,
        root: Path,
        assets: Assets,
        *,
        num_operators: int = 1,
        num_engines: int = 2,
        sweep_seconds: float = 60.0,
        step_seconds: float = 0.01,
    ) -> None:
        self._root = root
        self._assets = assets
        self._num_operators = num_operators
        self._num_engines = num_engines
        self._sweep_seconds = sweep_seconds
        self._step_seconds = step_seconds
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as exits:
            self._lifeline = exits.enter_context(Lifeline())
            self._network = self._open_network()
            exits.callback(self._network.close)
            self._start_servers(exits)
            self._define_objects()
            # Their processes end before the network does.
            exits.callback(self._kill_members)
            self.engines = [self._an_engine(f"engine-{n}") for n in range(self._num_engines)]
            self.operators = [
                self._an_operator(f"operator-{n}") for n in range(self._num_operators)
            ]
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    @property
    def members(self) -> list[Member]:
        """All operators and engines."""
        return [*self.operators, *self.engines]

    # -- what can be seen -------------------------------------------------------------------------

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object of the fleet's namespace."""
        shown = self.kubectl("get", kind, name, "-n", NAMESPACE, "-o", "json", check=True).stdout
        return cast("dict[str, Any]", json.loads(shown))

    def stored_revision(self) -> int:
        """Return the newest revision in Redis; 0 without one, or without Redis."""
        try:
            found = self.redis.hget(envelope_key(POOL_KEY), "revision")
        except redis.RedisError:
            return 0
        return int(cast("bytes", found or b"0"))

    def stored_policy(self) -> str:
        """Return the envelope in Redis as text."""
        return cast("bytes", self.redis.hget(envelope_key(POOL_KEY), "envelope")).decode()

    def engine_url(self, engine: Member) -> str:
        """Return the root of its HTTP interface."""
        address, port = engine.place.endpoint(ENGINE_PORT)
        return f"http://{address}:{port}"

    def is_ready(self, engine: Member) -> bool:
        """Ask the engine's readiness probe."""
        try:
            return self._ask(self.engine_url(engine), "readyz").status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def metric(self, member: Member, name: str) -> float | None:
        """Return the sum of a metric's series at a member; None where it doesn't answer."""
        port = ENGINE_PORT if member in self.engines else OPERATOR_PORT
        address, real_port = member.place.endpoint(port)
        try:
            text = self._ask(f"http://{address}:{real_port}", "metrics").text
        except httpx.TransportError:
            return None
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def revision(self, engine: Member) -> int | None:
        """Return the policy that an engine has in force; 0 = none, None = it doesn't answer."""
        found = self.metric(engine, "tidegate_policy_revision")
        return None if found is None else int(found)

    # -- what can be done -------------------------------------------------------------------------

    def forget_history(self) -> None:
        """Let etcd forget all that was before now: who watches from an earlier point is Gone."""
        with httpx.Client(base_url=f"{self.control_plane.etcd_url}/v3/kv", timeout=30) as etcd:
            newest = etcd.post("/range", json={"key": "YQ=="}).json()["header"]["revision"]
            body = {"revision": newest, "physical": True}
            etcd.post("/compaction", json=body).raise_for_status()

    # -- how it is put together -------------------------------------------------------------------

    def _open_network(self) -> PodNetwork:
        try:
            return BridgeNetwork(self._lifeline)
        except NetworkError:
            return LoopbackNetwork()

    def _start_servers(self, exits: ExitStack) -> None:
        host = self._network.host_address
        addresses = list(dict.fromkeys([LOOPBACK, host]))
        self.redis_server = exits.enter_context(
            RedisServer(
                self._root / "redis", self._assets, addresses=addresses, lifeline=self._lifeline
            )
        )
        self.redis = redis.Redis.from_url(self.redis_server.url)
        exits.callback(self.redis.close)
        self.control_plane = exits.enter_context(
            ControlPlane(
                self._root,
                self._assets,
                controllers=False,
                hosts=[host],
                lifeline=self._lifeline,
            )
        )
        if host != LOOPBACK:
            port = self.control_plane.port
            exits.enter_context(forwarding((host, port), (LOOPBACK, port)))

    def _define_objects(self) -> None:
        self.kubectl = Kubectl(
            self._assets.tool("kubectl"), self.control_plane.kubeconfig, self._root / "cache"
        )
        install_crds(self.kubectl)
        self.kubectl("create", "namespace", NAMESPACE, check=True)
        pods = [f"engine-{n}" for n in range(self._num_engines)]
        apply(self.kubectl, NAMESPACE, a_pool(POOL), *map(a_pod, pods))
        for pod in pods:
            make_ready(self.kubectl, NAMESPACE, pod)
        kubeconfig = operator_kubeconfig(
            self.control_plane,
            self.kubectl,
            Helm(self._assets.tool("helm"), self._root / "helm"),
            host=self._network.host_address,
        )
        self._setup = OperatorSetup(
            kubeconfig=kubeconfig,
            redis_url=self._redis_url,
            directory=self._root,
            namespaces=(NAMESPACE,),
            sweep_seconds=self._sweep_seconds,
            lease=OPERATOR_LEASE if self._num_operators > 1 else "",
        )
        self._publisher = Publisher(
            self._redis_url,
            pool=POOL_KEY,
            key=load_signing_key(self._signing_key()),
        )

    def _signing_key(self) -> Path:
        assert self._setup.public_key
        return self._root / "signing-key.pem"

    @property
    def _redis_url(self) -> str:
        return self.redis_server.url_for(address=self._network.host_address)

    def _an_operator(self, name: str) -> Member:
        member = self._a_member(name, "tidegate_operator", OPERATOR_PORT)
        _, port = member.place.endpoint(OPERATOR_PORT)
        member.environment |= only_own(self._setup.environment())
        member.environment["TIDEGATE_OPERATOR_METRICS_PORT"] = str(port)
        return member

    def _an_engine(self, name: str) -> Member:
        member = self._a_member(name, "tidegate_engine", ENGINE_PORT)
        address, port = member.place.endpoint(ENGINE_PORT)
        member.environment |= only_own(
            engine_environment(
                self._publisher,
                self._root / name,
                TIDEGATE_POD_NAME=name,
                TIDEGATE_HOST=address,
                TIDEGATE_PORT=str(port),
                TIDEGATE_SERVED_MODEL_NAME="simulated",
                TIDEGATE_SIMULATED_STEP_SECONDS=str(self._step_seconds),
            )
        )
        return member

    def _a_member(self, name: str, module: str, port: int) -> Member:
        return Member(
            name,
            [sys.executable, "-m", module],
            place=asyncio.run(self._network.attach([port])),
            host_address=self._network.host_address,
            folder=self._root,
            lifeline=self._lifeline,
        )

    def _kill_members(self) -> None:
        for member in self.members:
            if member.is_running:
                member.kill()

    def _ask(self, root: str, path: str) -> httpx.Response:
        return httpx.get(f"{root}/{path}", timeout=ANSWER_SECONDS)


def only_own(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the product's variables; the others come from this process anyway."""
    return {name: value for name, value in environment.items() if name.startswith("TIDEGATE_")}
