"""`tidegate up` as a user runs it: a process of its own, reached by what it prints."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tidegate_testing.cluster import eventually, network_names, still_running

pytestmark = pytest.mark.e2e


class Command:
    """The running command and all it has printed so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.printed = ""

    def read_until(self, text: str) -> None:
        """Reads line by line until one holds the text."""
        for line in self.process.stdout or ():
            self.printed += line
            if text in line:
                return
        raise AssertionError(f"ended without {text!r}:\n{self.printed}")

    def line(self, pattern: str) -> str:
        """Returns the group of the pattern in what was printed."""
        found = re.search(pattern, self.printed, re.MULTILINE)
        assert found, f"{pattern} is not in:\n{self.printed}"
        return found[1]

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, argument: str) -> psutil.Process:
        """Returns the one descendant with the argument at its command line's front."""
        found = [one for one in self.descendants() if argument in " ".join(one.cmdline()[:3])]
        assert len(found) == 1
        return found[0]


@contextmanager
def running_up(environment: Mapping[str, str] | None = None) -> Iterator[Command]:
    with subprocess.Popen(
        [sys.executable, "-m", "tidegate_cli", "up", "--simulated"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(environment or {})},
    ) as process:
        try:
            yield Command(process)
        finally:
            process.kill()


def answer_of(base_url: str, key: str) -> str:
    body = {"model": "simulated", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    # No proxy of the environment: the address is this machine's.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        return str(json.load(answer)["object"])


def assert_nothing_is_left(pid: int, descendants: list[psutil.Process], folder: Path) -> None:
    eventually(lambda: not still_running(descendants), "the end of every process")
    eventually(lambda: f"tg{pid:06x}" not in network_names(), "the end of the network")
    eventually(lambda: not folder.exists(), "the end of the folder")


def test_what_is_printed_works_and_ctrl_c_stops_everything() -> None:
    # Nothing here needs a proxy: where one is named, it isn't asked.
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:1")
    with running_up({**proxies, "NO_PROXY": "", "no_proxy": ""}) as command:
        command.read_until("Ctrl-C stops everything")
        folder = Path(command.line(r"^Logs are in (\S+)\."))
        api, key = command.line(r"^  (http\S+/v1)$"), command.line(r"^  key of gold: (\S+)$")

        assert answer_of(api, key) == "chat.completion"
        told = [command.line(r"^  (export .+)$"), command.line(r"^  (kubectl .+ apply .+)$")]
        applied = subprocess.run(
            ["bash", "-ec", "\n".join(told)], capture_output=True, text=True, check=False
        )
        assert "tenantpolicy.tidegate.io/silver configured" in applied.stdout, applied.stderr

        told = [
            command.line(rf"^  (export {name}=.+)$") for name in ("KUBECONFIG", "TIDEGATE_OP\\w+")
        ]
        asked = "python -m tidegate_cli " + command.line(r"^  tidegate (get decisions .+)$")
        listed = subprocess.run(
            ["bash", "-ec", "\n".join([*told, f"{Path(sys.executable).parent}/{asked}"])],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "admitted" in listed.stdout, listed.stderr

        descendants = command.descendants()
        command.process.send_signal(signal.SIGINT)
        assert command.process.wait(60) == 0
        assert_nothing_is_left(command.process.pid, descendants, folder)


@pytest.mark.parametrize(
    ("argument", "name", "line"),
    [
        ("/etcd", "etcd", "operator started"),
        ("tidegate_operator", "operator", "Ctrl-C stops everything"),
    ],
)
def test_a_process_that_ends_by_itself_ends_the_command_with_its_log(
    argument: str, name: str, line: str
) -> None:
    with running_up() as command:
        command.read_until(line)

        command.child(argument).kill()

        command.read_until(f"tidegate: {name} ended with status -9; the end of ")
        shutil.rmtree(command.line(r"^logs are kept in (\S+)$"))
        assert command.process.wait(60) == 1


def test_a_killed_command_leaves_nothing() -> None:
    with running_up() as command:
        command.read_until("waiting until the node takes pods")
        data = next(one for one in command.child("/etcd").cmdline() if "--data-dir=" in one)
        folder = Path(data.partition("=")[2]).parents[1]
        assert (folder / "cluster" / "pki" / "admin.kubeconfig").exists()
        descendants = command.descendants()

        os.kill(command.process.pid, signal.SIGKILL)

        assert_nothing_is_left(command.process.pid, descendants, folder)
