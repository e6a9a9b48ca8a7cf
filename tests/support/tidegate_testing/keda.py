"""KEDA's ScaledObject as KEDA publishes it: the definition in its Go module, by release."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate_devcluster import progress
from tidegate_devcluster.assets import AssetSettings
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.tool_cache import ToolCache
from tidegate_testing.cluster import eventually

MODULE = "github.com/kedacore/keda/v2"
FILE = Path("config/crd/bases/keda.sh_scaledobjects.yaml")
CRD = "scaledobjects.keda.sh"

TOO_OLD = "v2.17.2"
"""The last that knows no tolerance."""

OLDEST = "v2.18.3"
"""Of the first minor release that takes what the operator writes."""

NEWEST = "v2.20.0"

SUMS = {
    TOO_OLD: "h1:xlrcK5TKABJF9PebK79sgL07s/csGjL3H4m72OkZXxk=",
    OLDEST: "h1:PY3o80tzBAzCffS8J6eBZctT4B+g/r26zErNSMleC50=",
    NEWEST: "h1:nPKQL9iKsPpoyq7BftlBzJiQzb2LdKHiqBIEG6ju3bk=",
}
"""Of the modules' content, as in a go.sum."""


def scaled_object_crd(version: str) -> Path:
    """Return the definition; the first time it is downloaded as Go downloads modules."""
    cache = ToolCache(AssetSettings.from_environment(os.environ).cache, progress.to_stderr)
    folder = cache.folder(f"keda-{version}", lambda part: _download(version, part))
    return folder / FILE.name


def install(kubectl: Kubectl, release: str) -> None:
    """Have the API server serve the kind as a release has it, in place of any other."""
    kubectl("apply", "--server-side", "-f", str(scaled_object_crd(release)), check=True)
    wait = ("wait", "--for=condition=Established", "--timeout=30s", f"crd/{CRD}")
    # kubectl fails at once on an object that has no conditions yet.
    eventually(lambda: kubectl(*wait).returncode == 0, "KEDA's kind is served")


@contextmanager
def installed(kubectl: Kubectl, release: str) -> Iterator[None]:
    """Have the kind served for the length of the block."""
    install(kubectl, release)
    try:
        yield
    finally:
        kubectl("delete", "crd", CRD, check=True)


def _download(version: str, into: Path) -> None:
    done = subprocess.run(
        ["go", "mod", "download", "-json", f"{MODULE}@{version}"],
        # Outside any module, so that nothing else decides what is taken.
        cwd=into,
        env=os.environ | {"GOWORK": "off"},
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["Sum"] == SUMS[version]
    shutil.copy(Path(answer["Dir"]) / FILE, into)
