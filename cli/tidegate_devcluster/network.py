"""Where pods live: a network namespace each behind a bridge, or loopback where that can't be.

A bridge and its namespaces carry their owner's process id in their names, so that the next start
recognises what a crashed one has left: `tg<pid, 6 hex digits><subnet, 2><pod, 2 or "br">`.

`python -m tidegate_devcluster.network PREFIX` removes everything whose name starts so.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tidegate_devcluster.errors import NetworkError
from tidegate_devcluster.processes import Lifeline, free_port

NAME = re.compile(r"tg([0-9a-f]{6})[0-9a-f]{2}(?:[0-9a-f]{2}|br)")
# Private networks that neither Docker nor the usual cluster defaults take.
SUBNETS = ipaddress.IPv4Network("10.213.0.0/16")
MOST_PODS = 253


@dataclass(frozen=True)
class PodPlace:
    """Where one pod's processes run and are reached.

    Attributes:
        ip: The pod's address as the cluster knows it (status.podIP).
        bind_ip: The address as the pod's own processes may bind it.
        prefix: Command that enters the place; what follows it runs there.
        ports: Real port by container port, where they differ.
    """

    ip: str
    bind_ip: str
    prefix: tuple[str, ...] = ()
    ports: dict[int, int] = field(default_factory=dict)

    def endpoint(self, port: int) -> tuple[str, int]:
        """Returns where this machine reaches the container port."""
        return self.bind_ip, self.ports.get(port, port)


class PodNetwork(Protocol):
    """Gives places to pods and takes them back.

    Attributes:
        host_address: By this address pods reach what listens on this machine.
    """

    host_address: str

    async def attach(self, container_ports: Sequence[int]) -> PodPlace:
        """Makes a place for a pod with these container ports.

        Raises:
            NetworkError: There is no room, or the system refused.
        """
        ...

    async def detach(self, place: PodPlace) -> None:
        """Removes the place; its processes must have ended."""
        ...

    def close(self) -> None:
        """Removes everything."""
        ...


class BridgeNetwork:
    """A network namespace per pod, joined by a bridge of this machine; needs root.

    A pod reaches this machine by the bridge's address and other pods, nothing else.
    """

    def __init__(self, lifeline: Lifeline) -> None:
        """Makes the bridge, after removing what crashed clusters have left.

        Raises:
            NetworkError: The system doesn't allow it, or has no `ip` command.
        """
        ip = shutil.which("ip")
        if ip is None:
            raise NetworkError("network namespaces need the `ip` command of iproute2")
        if os.geteuid() != 0:
            raise NetworkError("network namespaces need root")
        self._enter = (ip, "netns", "exec")
        with _only_one_at_a_time():
            remove_leftovers()
            self._subnet = _free_subnet()
            self._prefix = f"tg{os.getpid():06x}{self._subnet.network_address.packed[2]:02x}"
            lifeline.run_at_end([sys.executable, "-m", __name__, self._prefix])
            self.host_address = str(self._subnet[1])
            try:
                self._add_bridge()
                self._try_namespace()
            except NetworkError:
                self.close()
                raise
        self._free = list(range(2, MOST_PODS + 2))

    async def attach(self, container_ports: Sequence[int]) -> PodPlace:  # noqa: ARG002 - the same in a namespace
        """Makes a namespace with an address of its own."""
        if not self._free:
            raise NetworkError(f"all {MOST_PODS} pod addresses of {self._subnet} are taken")
        # The longest unused one: connections of its last owner may still be closing.
        number = self._free.pop(0)
        name, ip = self._name(number), str(self._subnet[number])
        try:
            await asyncio.to_thread(self._add_namespace, name, ip)
        except NetworkError:
            await asyncio.to_thread(_remove_namespace, name)
            self._free.append(number)
            raise
        return PodPlace(ip=ip, bind_ip=ip, prefix=(*self._enter, name))

    async def detach(self, place: PodPlace) -> None:
        """Removes the namespace, and with it its end of the bridge."""
        number = int(ipaddress.ip_address(place.ip)) - int(self._subnet.network_address)
        await asyncio.to_thread(_remove_namespace, self._name(number))
        self._free.append(number)

    def close(self) -> None:
        """Removes the bridge and all namespaces, with whatever runs in them."""
        remove_prefix(self._prefix)

    def _name(self, number: int) -> str:
        return f"{self._prefix}{number:02x}"

    def _add_bridge(self) -> None:
        bridge = f"{self._prefix}br"
        _ip_batch(
            f"link add {bridge} type bridge",
            f"addr add {self.host_address}/24 dev {bridge}",
            f"link set {bridge} up",
        )

    def _try_namespace(self) -> None:
        """Makes a pod's namespace and removes it: root may lack the right to, as in a container."""
        number = MOST_PODS + 1
        self._add_namespace(self._name(number), str(self._subnet[number]))
        _remove_namespace(self._name(number))

    def _add_namespace(self, name: str, ip: str) -> None:
        _ip_batch(
            f"netns add {name}",
            f"link add {name} type veth peer name eth0 netns {name}",
            f"link set {name} master {self._prefix}br up",
        )
        _ip_batch(
            "link set lo up",
            f"addr add {ip}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {self.host_address}",
            namespace=name,
        )


class LoopbackNetwork:
    """Pods on this machine's loopback, where namespaces aren't allowed.

    EndpointSlices refuse loopback addresses, so each pod gets an address that exists in the
    cluster's books alone, and each of its container ports a real port on 127.0.0.1. Reach pods
    through the service proxy, which knows both.
    """

    host_address = "127.0.0.1"

    def __init__(self) -> None:
        self._free = [str(address) for address in _subnets()[-1].hosts()]

    async def attach(self, container_ports: Sequence[int]) -> PodPlace:
        """Chooses a free port for each container port."""
        if not self._free:
            raise NetworkError("all pod addresses are taken")
        ports = {port: free_port(self.host_address) for port in container_ports}
        return PodPlace(ip=self._free.pop(0), bind_ip=self.host_address, ports=ports)

    async def detach(self, place: PodPlace) -> None:
        """Takes the address back."""
        self._free.append(place.ip)

    def close(self) -> None:
        """Leaves nothing, as there is nothing but processes."""


def remove_leftovers() -> None:
    """Removes the networks whose owners are gone."""
    for name in _names():
        found = NAME.fullmatch(name)
        if found is not None and not Path(f"/proc/{int(found[1], 16)}").exists():
            remove_prefix(name)


def remove_prefix(prefix: str) -> None:
    """Removes all namespaces and bridges whose names start so; kills what runs in them."""
    for name in _names():
        if NAME.fullmatch(name) and name.startswith(prefix):
            if name.endswith("br"):
                _ip("link", "del", name)
            else:
                _remove_namespace(name)


def _names() -> list[str]:
    namespaces = [entry["name"] for entry in json.loads(_ip("-j", "netns", "list") or "[]")]
    bridges = json.loads(_ip("-j", "link", "show", "type", "bridge") or "[]")
    # Namespaces first: a bridge is best removed when nothing is joined to it.
    return namespaces + [entry["ifname"] for entry in bridges if "ifname" in entry]


def _remove_namespace(name: str) -> None:
    for pid in _ip("netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    # By hand and first: with its namespace the kernel would remove it too, but some time later,
    # and the name has to be free at once.
    _ip("link", "del", name)
    _ip("netns", "del", name)


def _subnets() -> list[ipaddress.IPv4Network]:
    return [ipaddress.IPv4Network(subnet) for subnet in SUBNETS.subnets(new_prefix=24)]


def _free_subnet() -> ipaddress.IPv4Network:
    routes = json.loads(_ip("-j", "-4", "route", "show", "table", "all") or "[]")
    taken = []
    for route in routes:
        if route.get("dst", "default") != "default":
            with suppress(ValueError):
                taken.append(ipaddress.IPv4Network(route["dst"]))
    # The last one is left to the books of LoopbackNetwork.
    candidates = _subnets()[:-1]
    random.shuffle(candidates)
    for candidate in candidates:
        if not any(candidate.overlaps(network) for network in taken):
            return candidate
    raise NetworkError(f"no free /24 in {SUBNETS}")


@contextmanager
def _only_one_at_a_time() -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / "tidegate-devcluster-network.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ip(*arguments: str) -> str:
    """Returns what `ip` prints; nothing where it fails, as for what is gone already."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def _ip_batch(*lines: str, namespace: str | None = None) -> None:
    place = ["-n", namespace] if namespace else []
    done = subprocess.run(
        ["ip", *place, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise NetworkError(f"ip: {done.stderr.strip()} (of: {'; '.join(lines)})")


if __name__ == "__main__":
    remove_prefix(sys.argv[1])
