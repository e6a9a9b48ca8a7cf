import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from tidegate_cli.app import app
from tidegate_cli.errors import ExpectationError, KubectlError, NotReadyError
from tidegate_cli.running import run_to_end
from tidegate_devcluster.errors import ToolMissingError


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


async def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            NotReadyError("deployment/engine", limit_seconds=180, last_seen="1 of 2 ready"),
            "tidegate: deployment/engine: not within 180 s; last seen: 1 of 2 ready\n",
        ),
        (
            KubectlError(["apply", "-f", "x.yaml"], 1, "spec.weight: must be at most 1000000\n"),
            "tidegate: kubectl apply -f x.yaml: spec.weight: must be at most 1000000\n",
        ),
        (
            ToolMissingError("etcd", "install Go 1.26"),
            "tidegate: etcd is missing: install Go 1.26\n",
        ),
        (
            ExpectationError(["a did not hold", "b neither"]),
            "tidegate: a did not hold; b neither\n",
        ),
    ],
)
def test_a_failure_is_one_line_and_exit_code_1(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        run_to_end(fail(error))

    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_cleans_up_and_says_so_by_its_exit_code(
    number: signal.Signals,
) -> None:
    cleaned_up = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            # Cleaning up may take its time.
            await asyncio.sleep(0)
            cleaned_up.append(number)

    with pytest.raises(typer.Exit) as ended:
        run_to_end(work())

    assert ended.value.exit_code == 130
    assert cleaned_up == [number]


def test_a_command_that_ends_by_ctrl_c_alone_ends_well() -> None:
    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(typer.Exit) as ended:
        run_to_end(work(), interrupted=0)

    assert ended.value.exit_code == 0


def test_the_crds_are_printed_as_one_yaml_stream(runner: CliRunner) -> None:
    result = runner.invoke(app, ["crds"])

    kinds = {one["spec"]["names"]["kind"] for one in yaml.safe_load_all(result.output)}
    assert result.exit_code == 0
    assert kinds == {
        "EnginePool",
        "PreemptionPolicy",
        "PriorityTier",
        "ServiceLevel",
        "TenantPolicy",
    }


def test_the_crds_are_written_as_files(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(app, ["crds", "--output", str(tmp_path / "crds")])

    assert result.exit_code == 0
    assert len(list((tmp_path / "crds").glob("tidegate.io_*.yaml"))) == 5


def test_an_option_out_of_range_is_refused_with_its_name_and_limit(runner: CliRunner) -> None:
    result = runner.invoke(app, ["bench", "propagation", "--engines", "0"])

    told = " ".join(result.output.replace("│", "").split())
    assert result.exit_code == 2
    assert "--engines" in told
    assert "greater than or equal to 1" in told


def test_without_arguments_the_commands_are_listed(runner: CliRunner) -> None:
    result = runner.invoke(app, [])

    assert all(name in result.output for name in ("up", "demo", "bench", "crds"))


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["status", "--help"], ["bench", "--help"], ["console", "--help"]],
    ids=" ".join,
)
def test_help_comes_without_what_commands_need_to_run(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from tidegate_cli.app import app\n"
        f"app({arguments}, standalone_mode=False)\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Usage" in done.stdout
    loaded = set(done.stderr.split())
    assert not loaded & {"torch", "numpy", "kubernetes", "aiohttp", "fastapi", "openai", "nicegui"}
    own = {name for name in loaded if name.startswith(("tidegate_engine", "tidegate_operator"))}
    prefix = "tidegate_cli.bench."
    benches = {name.removeprefix(prefix) for name in loaded if name.startswith(prefix)}
    names_of_choices = {"engine_part", "isolation_side", "propagation_part"}
    assert (own, benches) == (set(), names_of_choices)
