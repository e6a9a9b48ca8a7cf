"""A real Prometheus that scrapes real targets on loopback, and promtool."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.processes import Child, Lifeline, free_port

START_SECONDS = 30.0
SCRAPE_SECONDS = 1.0


class Prometheus:
    """Prometheus on a free port; a context manager, ready when entered."""

    def __init__(
        self,
        root: Path,
        assets: Assets,
        targets: Mapping[str, Sequence[int]],
        *,
        rules: Sequence[Path] = (),
    ) -> None:
        """Keep configuration, data and log under `root`.

        Args:
            root: Folder of its own.
            assets: Gives the binary.
            targets: Ports on loopback by the name of their job.
            rules: Files of rules to evaluate.
        """
        self._root = root
        self._assets = assets
        self._targets = targets
        self._rules = rules
        self._port = free_port()
        self._exits = ExitStack()

    def __enter__(self) -> Prometheus:
        with ExitStack() as exits:
            lifeline = exits.enter_context(Lifeline())
            tool = self._assets.tool("prometheus")
            child = Child(
                "prometheus",
                [
                    str(tool.path),
                    f"--config.file={self._write_configuration()}",
                    f"--storage.tsdb.path={self._root / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                log=self._root / "prometheus.log",
                lifeline=lifeline,
                environment=tool.environment,
            )
            exits.callback(child.stop)
            self._http = exits.enter_context(
                httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=10, trust_env=False)
            )
            child.wait_until(self._is_ready, timeout_seconds=START_SECONDS)
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    def query(self, expr: str) -> list[Any]:
        """Return the series that an expression has now."""
        answer = self._http.post("/api/v1/query", data={"query": expr}).json()
        assert answer["status"] == "success", (expr, answer)
        result: list[Any] = answer["data"]["result"]
        return result

    def label_values(self, label: str, series: str) -> list[str]:
        """Return the values of a label of some series."""
        answer = self._http.get(f"/api/v1/label/{label}/values", params={"match[]": series}).json()
        assert answer["status"] == "success", answer
        values: list[str] = answer["data"]
        return values

    def rules(self) -> list[Any]:
        """Return all rules, with the state of their last evaluation."""
        groups = self._http.get("/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _write_configuration(self) -> Path:
        interval = f"{SCRAPE_SECONDS * 1000:.0f}ms"
        jobs = [
            {
                "job_name": job,
                "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in ports]}],
            }
            for job, ports in self._targets.items()
        ]
        configuration = {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "scrape_configs": jobs,
            "rule_files": [str(path) for path in self._rules],
        }
        self._root.mkdir(parents=True, exist_ok=True)
        path = self._root / "prometheus.yml"
        path.write_text(yaml.safe_dump(configuration))
        return path


def promtool(assets: Assets, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run promtool; its output says what is wrong."""
    tool = assets.tool("promtool")
    return subprocess.run(
        [tool.path, *arguments],
        env=dict(tool.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
