"""Rules about files that no linter states."""

import subprocess
import zipfile
from collections import Counter
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 450
PACKAGES = {
    "tidegate_operator": "operator",
    "tidegate_engine": "engine",
    "tidegate_policies": "policies",
    "tidegate_cli": "cli",
    "tidegate_devcluster": "cli",
}
MIRRORED = {
    "operator": "operator/tidegate_operator",
    "engine": "engine/tidegate_engine",
    "policies": "policies/tidegate_policies",
    "cli/devcluster": "cli/tidegate_devcluster",
}


def committed(*patterns: str) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / name for name in listing.stdout.split() if (ROOT / name).is_file()]


@pytest.mark.parametrize("folder", ["operator", "engine", "policies", "cli", "tests"])
def test_top_level_folders_are_not_packages(folder: str) -> None:
    """An `operator/__init__.py` would replace the standard library's `operator` in the checkout."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_test_folders_are_not_packages() -> None:
    """A `tests/operator/__init__.py` does the same to anyone who runs Python inside tests/."""
    strays = [p for p in ROOT.glob("tests/**/__init__.py") if "support" not in p.parts]
    assert strays == []


@pytest.mark.parametrize("tests", MIRRORED)
def test_the_tests_mirror_the_tree(tests: str) -> None:
    """tests/engine/core/ tests engine/tidegate_engine/core/, one module or several at once."""
    strays = [
        test
        for test in committed(f"tests/{tests}/**/test_*.py")
        if not (ROOT / MIRRORED[tests] / test.parent.relative_to(ROOT / "tests" / tests)).is_dir()
    ]
    assert strays == []


def test_no_file_is_too_long_to_read_in_one_sitting() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in committed("*.py")
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}


def test_decisions_are_numbered_once() -> None:
    numbers = Counter(path.name[:4] for path in committed("docs/decisions/*.md"))
    assert {number for number, times in numbers.items() if times > 1} == set()


def test_no_file_is_too_large_for_the_repository() -> None:
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in committed()}
    assert {name: size for name, size in sizes.items() if size > 500_000} == {}


def test_one_distribution_ships_every_package_and_the_command(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / ".venv/bin/hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("tidegate-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata_name,) = [n for n in names if n.endswith("dist-info/METADATA")]
        (entry_points,) = [n for n in names if n.endswith("entry_points.txt")]
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
        assert "tidegate = tidegate_cli.app:main" in archive.read(entry_points).decode()
    for package, folder in PACKAGES.items():
        sources = committed(f"{folder}/{package}/**/*.py", f"{folder}/{package}/*.py")
        shipped = {f"{package}/{path.relative_to(ROOT / folder / package)}" for path in sources}
        assert shipped - set(names) == set()
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "operator",
        "engine",
        "tracing",
        "console",
        "cli",
        "dev",
    }


def test_the_operator_needs_no_torch() -> None:
    """The operator's image must not carry gigabytes for nothing."""
    project = (ROOT / "pyproject.toml").read_text()
    operator = project.split("operator = [", 1)[1].split("]", 1)[0]
    assert "torch" not in operator
