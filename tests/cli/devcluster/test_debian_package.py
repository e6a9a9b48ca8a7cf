from __future__ import annotations

from pathlib import Path

import pytest

from tidegate_devcluster.debian_package import PROMETHEUS, REDIS, binary_path, library_path
from tidegate_devcluster.errors import ToolMissingError


def test_without_apt_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ToolMissingError, match="install redis-server 7 or newer"):
        REDIS.unpack(binary_path("redis-server"), tmp_path, print)


def test_the_library_path_names_each_folder_of_libraries_once(tmp_path: Path) -> None:
    folder = tmp_path / "usr" / "lib" / "x86_64-linux-gnu"
    folder.mkdir(parents=True)
    for name in ("liblzf.so.1", "libjemalloc.so.2"):
        (folder / name).write_text("")

    assert library_path(tmp_path) == str(folder)


def test_an_installed_set_of_libraries_needs_no_path(tmp_path: Path) -> None:
    assert library_path(tmp_path) == ""


def test_each_package_names_what_people_install_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ToolMissingError, match="prometheus is missing: install prometheus"):
        PROMETHEUS.unpack(binary_path("promtool"), tmp_path, print)


def test_the_cache_keeps_packages_apart() -> None:
    assert REDIS.cache_name.startswith("redis-server-")
    assert PROMETHEUS.cache_name == REDIS.cache_name.replace("redis-server", "prometheus")
