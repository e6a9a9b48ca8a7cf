import subprocess
import sys

import pytest

from tidegate_cli.memory import process_name, resident_megabytes


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/cache/bin/kube-apiserver", "--secure-port=1"], "kube-apiserver"),
        (["/venv/bin/python", "-m", "tidegate_engine"], "engine"),
        (["/venv/bin/python", "-I", "-S", "/lib/lifeline.py"], "lifeline"),
        (["redis-server 127.0.0.1:20001"], "redis-server"),
        ([], "(ended)"),
    ],
)
def test_processes_are_called_what_people_call_them(command: list[str], name: str) -> None:
    assert process_name(command) == name


def test_every_child_is_measured_and_equal_names_are_numbered() -> None:
    command = [sys.executable, "-c", "print(flush=True); input()"]
    pipe = subprocess.PIPE
    children = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(2)]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # it has its memory
        sizes = resident_megabytes()
    finally:
        for child in children:
            child.communicate()

    name = sys.executable.rpartition("/")[2]
    assert next(iter(sizes)).startswith("tidegate")
    assert sizes[f"{name} 1"] > 1
    assert sizes[f"{name} 2"] > 1
