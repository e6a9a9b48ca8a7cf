from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tidegate_devcluster.errors import NetworkError
from tidegate_devcluster.network import (
    BridgeNetwork,
    LoopbackNetwork,
    PodPlace,
    remove_leftovers,
    remove_prefix,
)
from tidegate_devcluster.processes import Lifeline

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes network namespaces")


def namespaces() -> str:
    return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def links() -> str:
    return subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def bridge() -> Iterator[BridgeNetwork]:
    with Lifeline() as lifeline:
        network = BridgeNetwork(lifeline)
        yield network
        network.close()


@needs_root
async def test_a_pod_and_this_machine_reach_each_other(bridge: BridgeNetwork) -> None:
    place = await bridge.attach([8000])
    with socket.create_server((bridge.host_address, 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(({bridge.host_address!r}, {port}), 5)"
        pod = await asyncio.create_subprocess_exec(*place.prefix, sys.executable, "-c", program)
        server.settimeout(10)
        connection, (caller, _) = await asyncio.to_thread(server.accept)
        connection.close()

    assert await pod.wait() == 0
    assert caller == place.ip
    assert place.endpoint(8000) == (place.ip, 8000)


@needs_root
async def test_detaching_removes_the_namespace_and_its_link(bridge: BridgeNetwork) -> None:
    place = await bridge.attach([])
    name = place.prefix[-1]
    assert name in namespaces()
    assert name in links()

    await bridge.detach(place)

    assert name not in namespaces()
    assert name not in links()


@needs_root
async def test_two_networks_have_subnets_of_their_own(bridge: BridgeNetwork) -> None:
    with Lifeline() as lifeline:
        other = BridgeNetwork(lifeline)
        try:
            assert other.host_address.rsplit(".", 1)[0] != bridge.host_address.rsplit(".", 1)[0]
        finally:
            other.close()
    # The other one's end has not touched this one.
    place = await bridge.attach([])
    assert place.prefix[-1] in namespaces()


@needs_root
@pytest.mark.usefixtures("bridge")
def test_what_a_dead_owner_left_is_removed_and_a_living_ones_kept() -> None:
    with subprocess.Popen(["true"]) as dead:
        pass
    leftover = f"tg{dead.pid:06x}ff02"
    subprocess.run(["ip", "netns", "add", leftover], check=True)
    with subprocess.Popen(["ip", "netns", "exec", leftover, "sleep", "3600"]) as orphan:
        remove_leftovers()

        assert orphan.wait(10) == -9
    assert leftover not in namespaces()
    assert f"tg{os.getpid():06x}" in links()


@needs_root
def test_names_of_others_are_left_alone() -> None:
    subprocess.run(["ip", "netns", "add", "tgnotours"], check=True)
    try:
        remove_leftovers()
        remove_prefix("tgnotours")

        assert "tgnotours" in namespaces()
    finally:
        subprocess.run(["ip", "netns", "del", "tgnotours"], check=True)


def test_without_root_there_is_no_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(NetworkError, match="root"):
        BridgeNetwork(Lifeline())


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="takes a right away")
def test_root_without_the_right_to_make_namespaces_gets_no_bridge() -> None:
    program = (
        "from tidegate_devcluster.errors import NetworkError\n"
        "from tidegate_devcluster.network import BridgeNetwork\n"
        "from tidegate_devcluster.processes import Lifeline\n"
        "with Lifeline() as lifeline:\n"
        "    try:\n"
        "        BridgeNetwork(lifeline)\n"
        "    except NetworkError as error:\n"
        "        print(error)\n"
    )
    command = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        told, _ = owner.communicate(timeout=30)

    assert "netns add" in told
    assert f"tg{owner.pid:06x}" not in links()


async def test_pods_on_loopback_get_ports_of_their_own() -> None:
    network = LoopbackNetwork()

    one, other = await network.attach([8000]), await network.attach([8000])

    assert one.ip != other.ip
    assert not one.ip.startswith("127.")
    assert one.endpoint(8000) == ("127.0.0.1", one.ports[8000])
    assert one.endpoint(8000) != other.endpoint(8000)


def test_a_place_without_a_port_map_is_reached_as_it_is() -> None:
    assert PodPlace("10.213.0.2", "10.213.0.2").endpoint(80) == ("10.213.0.2", 80)
