from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tidegate_devcluster.errors import ToolBuildError, ToolMissingError
from tidegate_devcluster.go_tools import GO_TOOLS, GoBuilder, GoTool
from tidegate_devcluster.tool_cache import ToolCache

HELLO = GoTool("hello", "hello", "example.test/hello")
needs_go = pytest.mark.skipif(shutil.which("go") is None, reason="builds with Go")


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    module = tmp_path / "tools" / "hello"
    module.mkdir(parents=True)
    (module / "go.mod").write_text("module example.test/hello\n\ngo 1.20\n")
    (module / "go.sum").write_text("")
    (module / "main.go").write_text('package main\n\nfunc main() { println("hello") }\n')
    return module.parent


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def builder(modules: Path, tmp_path: Path, lines: list[str]) -> GoBuilder:
    return GoBuilder(modules, ToolCache(tmp_path / "cache", lines.append), lines.append)


@needs_go
def test_a_tool_is_built_once_with_downloads_and_build_told_apart(
    builder: GoBuilder, lines: list[str]
) -> None:
    binary = builder.binary(HELLO)

    ran = subprocess.run([binary], capture_output=True, text=True, check=True)
    assert ran.stderr == "hello\n"
    assert lines[0].startswith("hello: downloading modules")
    assert lines[1].startswith("hello: building ")
    assert lines[-1] == "hello: built"
    lines.clear()
    assert builder.binary(HELLO) == binary
    assert lines == []


@needs_go
def test_another_version_is_another_build(builder: GoBuilder, modules: Path) -> None:
    before = builder.binary(HELLO)

    (modules / "hello" / "go.mod").write_text("module example.test/hello\n\ngo 1.21\n")

    assert builder.binary(HELLO) != before


@needs_go
def test_a_failed_build_shows_what_go_said_and_leaves_nothing(
    builder: GoBuilder, modules: Path, tmp_path: Path
) -> None:
    (modules / "hello" / "main.go").write_text("package main\n\nfunc main() { missing() }\n")

    with pytest.raises(ToolBuildError, match="undefined: missing") as failed:
        builder.binary(HELLO)

    assert failed.value.tool == "hello"
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_without_go_the_error_says_what_to_install(
    builder: GoBuilder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ToolMissingError) as missing:
        builder.binary(HELLO)

    assert missing.value.tool == "hello"
    assert "needs Go 1.20 or newer" in missing.value.remedy
    assert "KUBEBUILDER_ASSETS" in missing.value.remedy


def test_without_the_modules_the_error_says_where_to_run(tmp_path: Path) -> None:
    builder = GoBuilder(tmp_path, ToolCache(tmp_path / "cache", print), print)

    with pytest.raises(ToolMissingError, match="Run from a checkout"):
        builder.binary(GO_TOOLS["etcd"])
