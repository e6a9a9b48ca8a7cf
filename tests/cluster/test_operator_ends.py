"""How an operator ends: for good, in time, and saying why."""

from __future__ import annotations

import http.client
import json
import socket
import time
from dataclasses import replace

import pytest

from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.processes import free_port
from tidegate_testing.operator_process import (
    OperatorProcess,
    OperatorSetup,
    running_operator,
    wait_until,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

END_SECONDS = 15.0
AT_ONCE_SECONDS = 4.0

A_PART_FAILS = """
import asyncio
from tidegate_operator.events import EventWriter

async def run(self):
    await asyncio.sleep(0.5)
    raise RuntimeError("no ink")

EventWriter.run = run
"""

A_PART_RETURNS = """
from tidegate_operator.events import EventWriter

async def run(self):
    pass

EventWriter.run = run
"""

THE_WATCH_NEVER_ENDS = """
import asyncio
import kopf
from tidegate_operator import tasks

async def run_tasks(*_, **__):
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            print("goes on", flush=True)

kopf.run_tasks = run_tasks
tasks.END_SECONDS = 1.0
"""


@pytest.fixture
def setup(operator_setup: OperatorSetup, operator_lease: str, namespace: str) -> OperatorSetup:
    return replace(
        operator_setup, namespaces=(namespace,), lease=operator_lease, metrics_port=free_port()
    )


def last_line(operator: OperatorProcess) -> str:
    log = operator.log.read_text()
    assert "Traceback" not in log, log
    return log.splitlines()[-1]


def test_operator_that_can_not_start_says_why_in_a_line(setup: OperatorSetup) -> None:
    with socket.create_server(("0.0.0.0", setup.metrics_port or 0)), running_operator(setup) as it:
        assert it.wait(END_SECONDS) == 1
        assert " ERROR tidegate_operator.main: OSError: " in last_line(it)
        assert "address already in use" in last_line(it)


@pytest.mark.parametrize(
    ("fault", "why"), [(A_PART_FAILS, "RuntimeError: no ink"), (A_PART_RETURNS, "it returned")]
)
def test_operator_without_one_of_its_parts_ends_and_says_which(
    setup: OperatorSetup, fault: str, why: str
) -> None:
    with running_operator(setup, fault=fault) as it:
        assert it.wait(END_SECONDS) == 1
        assert last_line(it).endswith(
            f" ERROR tidegate_operator.main: the writer of Events ended: {why}"
        )


@pytest.mark.parametrize("is_told_to", [True, False], ids=["sigterm", "lease lost"])
def test_operator_that_hangs_when_it_must_go_is_gone_all_the_same(
    kubectl: Kubectl, setup: OperatorSetup, *, is_told_to: bool
) -> None:
    with running_operator(setup, fault=THE_WATCH_NEVER_ENDS) as it:
        wait_until(lambda: it.log_has("all objects are listed"))
        if is_told_to:
            assert it.stop() == 1
        else:
            namespace, name = setup.lease.split("/")
            stolen = json.dumps({"spec": {"holderIdentity": "thief"}})
            where = ("-n", namespace, "--type=merge", "-p", stolen)
            kubectl("patch", "lease", name, *where, check=True)
            assert it.wait(END_SECONDS) == 1
        assert it.log_has("goes on")
        assert it.log_has("most recent call first")


def test_operator_that_is_told_to_end_waits_for_nobody_who_asks_it(setup: OperatorSetup) -> None:
    with running_operator(setup) as it:
        wait_until(lambda: it.log_has("all objects are listed"))
        connection = http.client.HTTPConnection("127.0.0.1", setup.metrics_port)
        connection.request("GET", "/metrics")
        assert connection.getresponse().read()
        began = time.monotonic()
        assert it.stop() == 0
        assert time.monotonic() - began < AT_ONCE_SECONDS
        connection.close()
