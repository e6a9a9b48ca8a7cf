from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tidegate_cli.app import app
from tidegate_cli.bench.errors import BenchError
from tidegate_cli.running import compute_to_end


def test_a_benchmark_that_fails_is_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> None:
        raise BenchError("the batch didn't fill up")

    with pytest.raises(typer.Exit) as ended:
        compute_to_end(work)

    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "tidegate: the batch didn't fill up\n"


def test_a_benchmark_ends_at_ctrl_c() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as ended:
        compute_to_end(work)

    assert ended.value.exit_code == 130


def test_the_benchmarks_are_listed() -> None:
    told = CliRunner().invoke(app, ["bench"]).output

    assert all(name in told for name in ("batching", "engine", "scheduler", "propagation"))


def test_a_trace_that_is_missing_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "batching", "--quick", "--traces", str(tmp_path)])

    assert result.exit_code == 1
    assert "azure2023_conv.csv: No such file" in result.output
