from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tidegate_devcluster.assets import Assets, AssetSettings, main
from tidegate_devcluster.errors import ToolMissingError

REPOSITORY = Path(__file__).resolve().parents[3]


def given_assets(folder: Path, cache: Path) -> Assets:
    settings = AssetSettings(cache=cache, modules=folder / "none", kubebuilder_assets=folder)
    return Assets(settings, lambda _: None)


def test_the_environment_names_cache_and_given_binaries(tmp_path: Path) -> None:
    settings = AssetSettings.from_environment(
        {"XDG_CACHE_HOME": str(tmp_path), "KUBEBUILDER_ASSETS": "prebuilt/assets"}
    )

    assert settings.cache == tmp_path / "tidegate" / "tools"
    assert settings.modules == REPOSITORY / "tools"
    assert settings.kubebuilder_assets == Path("prebuilt/assets")


def test_given_binaries_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "etcd").write_text("")

    assert given_assets(tmp_path, tmp_path / "cache").tool("etcd").path == tmp_path / "etcd"
    assert not (tmp_path / "cache").exists()


def test_a_missing_one_among_the_given_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolMissingError, match="kube-apiserver is missing: KUBEBUILDER_ASSETS is"):
        given_assets(tmp_path, tmp_path / "cache").tool("kube-apiserver")


def test_what_envtest_never_gives_is_built(tmp_path: Path) -> None:
    with pytest.raises(ToolMissingError, match=r"it is built from .*none/kubernetes"):
        given_assets(tmp_path, tmp_path / "cache").tool("kube-scheduler")


def test_kubectl_is_the_one_of_this_environment(assets: Assets) -> None:
    assert assets.tool("kubectl").path.parent == Path(sys.executable).parent


def test_redis_runs_with_the_libraries_it_was_found_with(assets: Assets) -> None:
    tool = assets.tool("redis-server")

    shown = subprocess.run(
        [tool.path, "--version"], env=dict(tool.environment), capture_output=True, text=True
    )
    assert shown.stdout.startswith("Redis server v=")


def test_the_command_prints_where_a_tool_is(
    assets: Assets, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kubectl"]) == 0

    assert capsys.readouterr().out.split() == ["kubectl", str(assets.tool("kubectl").path)]


def test_the_command_tells_a_missing_tool_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))

    assert main(["etcd"]) == 1

    assert capsys.readouterr().err.startswith("etcd is missing: KUBEBUILDER_ASSETS is ")
