"""The Dockerfiles, as far as they go without a container engine: their steps in a fresh folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "tools" / "images"
INSTALLED = "/opt/tidegate"


def instructions(image: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each with its arguments on one line."""
    text = (IMAGES / f"{image}.Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    split = (line.split(maxsplit=1) for line in lines if line.strip())
    return [(name, " ".join(rest.split())) for name, rest in split]


def build(image: str, folder: Path) -> Path:
    """Do what the build stage of a Dockerfile does, below the folder; returns its environment."""
    source, installed = folder / "src", folder / "opt" / "tidegate"
    source.mkdir()
    for name, arguments in instructions(image):
        if name == "COPY" and not arguments.startswith("--from"):
            copy(arguments.split(), source)
        elif name == "RUN":
            command = arguments.replace(INSTALLED, str(installed))
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=source,
                capture_output=True,
                text=True,
                check=False,
                env={"PATH": os.environ["PATH"], "HOME": str(folder)} | registries(),
            )
            assert done.returncode == 0, done.stderr
        elif name == "FROM" and " AS " not in arguments:
            break
    return installed


def copy(arguments: list[str], into: Path) -> None:
    *paths, _ = arguments
    for path in paths:
        if (ROOT / path).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / path, into / path, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / path, into / path)


def registries() -> dict[str, str]:
    """Return how this machine is told to reach package registries."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def test_image_of_the_operator_has_no_torch_and_runs(tmp_path: Path) -> None:
    installed = build("operator", tmp_path)
    python = installed / "bin" / "python"
    packages = {
        one["name"]
        for one in json.loads(
            subprocess.run(
                [python, "-m", "pip", "list", "--format=json"],
                check=True,
                capture_output=True,
            ).stdout
        )
    }
    assert {"kopf", "kubernetes", "nicegui", "redis", "tidegate"} <= packages
    assert not packages & {"torch", "numpy", "numba", "tokenizers", "transformers"}
    for arguments, says in (
        (["tidegate_operator"], "TIDEGATE_OPERATOR_SIGNING_KEY_FILE: Field required"),
        (["tidegate_operator.credentials"], "required: --namespace, --prefix"),
        # Only after it has loaded all that it needs.
        (["tidegate_cli", "console", "--host=192.0.2.1"], "can't listen on 192.0.2.1:8090"),
    ):
        done = subprocess.run(
            [python, "-m", *arguments],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
        )
        assert says in done.stderr


@pytest.mark.parametrize("image", ["operator", "engine"])
def test_image_runs_as_nobody_what_the_chart_expects(image: str) -> None:
    said = dict(instructions(image))
    assert said["USER"] == "65532:65532"
    assert json.loads(said["ENTRYPOINT"]) == ["python", "-m"]
    assert json.loads(said["CMD"]) == [f"tidegate_{image}"]
    copied = [arguments for name, arguments in instructions(image) if name == "COPY"]
    for path in (path for one in copied for path in one.split()[:-1] if "from" not in one):
        assert (ROOT / path).exists()
