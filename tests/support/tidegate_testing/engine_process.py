"""The engine as a process of its own, `python -m tidegate_engine`."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
from tidegate_testing.engines import key_of

POD = "engine-0"


@dataclass
class EngineProcess:
    """A running engine."""

    process: "subprocess.Popen[bytes]"
    port: int
    log: Path

    def get(self, path: str) -> httpx.Response | None:
        """Its answer; None while it doesn't listen."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=5)
        except httpx.TransportError:
            return None

    def status(self, path: str) -> int | None:
        answer = self.get(path)
        return None if answer is None else answer.status_code

    def wait_for(self, path: str, status: int) -> None:
        """Return once a path is answered with a status; fail when the process has ended."""

        def is_so() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(self.log.read_text())
            return self.status(path) == status

        eventually(is_so, f"{status} from {path}", timeout_seconds=90)

    def wait_until_ready(self) -> None:
        self.wait_for("/readyz", 200)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def openai(self, tenant: str = "acme") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key_of(tenant), max_retries=0
        )


def engine_environment(publisher: Publisher, folder: Path, **more: str) -> dict[str, str]:
    """A simulated engine's, that keeps its state in a folder; steps of real ones get a thread."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")},
        "TIDEGATE_POOL": publisher.pool,
        "TIDEGATE_POD_NAME": POD,
        "TIDEGATE_REDIS_URL": publisher.url,
        "TIDEGATE_VERIFY_KEY": publisher.verify_key,
        "TIDEGATE_STATE_DIR": str(folder / "state"),
        "TIDEGATE_HOST": "127.0.0.1",
        "TIDEGATE_EXECUTOR": "simulated",
        "TIDEGATE_THREADS": "1",
        **more,
    }


@contextmanager
def an_engine_process(publisher: Publisher, folder: Path, **more: str) -> Iterator[EngineProcess]:
    """Start one on a free port; kill it at the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = folder / "engine.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidegate_engine"],
            env=engine_environment(publisher, folder, TIDEGATE_PORT=str(port), **more),
            stderr=output,
        )
    try:
        yield EngineProcess(process, port, log)
    finally:
        process.kill()
        process.wait()


def run_to_its_end(variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run an engine that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "tidegate_engine"],
        env=variables,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
