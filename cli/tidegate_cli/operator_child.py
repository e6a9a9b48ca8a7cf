"""The operator as a child of this command: started, stopped and killed at will."""

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tidegate_cli.proxies import without_proxy
from tidegate_devcluster.processes import Child, Lifeline, free_port

_GRACE_SECONDS = 15.0


class OperatorChild:
    """`python -m tidegate_operator` against one API server and one Redis.

    Attributes:
        metrics_port: On loopback; the same across restarts.
        explain_port: Likewise.
        log: Grows over restarts.
    """

    def __init__(
        self,
        *,
        kubeconfig: Path,
        redis_url: str,
        signing_key_file: Path,
        engine_token_file: Path,
        log: Path,
        lifeline: Lifeline,
        hosts: Sequence[str] = (),
    ) -> None:
        """Start nothing yet; `hosts` are on this machine, so no proxy leads to them."""
        self.metrics_port = free_port()
        self.explain_port = free_port()
        self.log = log
        self._lifeline = lifeline
        self._child: Child | None = None
        self._environment = {
            **without_proxy(os.environ, hosts),
            "TIDEGATE_OPERATOR_KUBECONFIG": str(kubeconfig),
            "TIDEGATE_OPERATOR_REDIS_URL": redis_url,
            "TIDEGATE_OPERATOR_SIGNING_KEY_FILE": str(signing_key_file),
            "TIDEGATE_OPERATOR_ENGINE_TOKEN_FILE": str(engine_token_file),
            "TIDEGATE_OPERATOR_EXPLAIN_HOST": "127.0.0.1",
            "TIDEGATE_OPERATOR_EXPLAIN_PORT": str(self.explain_port),
            "TIDEGATE_OPERATOR_METRICS_HOST": "127.0.0.1",
            "TIDEGATE_OPERATOR_METRICS_PORT": str(self.metrics_port),
        }

    @property
    def pid(self) -> int | None:
        """Process id; None while it doesn't run."""
        return self._child.pid if self._child is not None and self._child.is_running() else None

    def raise_if_ended(self) -> None:
        """Complain about an end that nobody asked for.

        Raises:
            StartError: It was started, not stopped, and has ended.
        """
        if self._child is not None:
            self._child.raise_if_ended()

    async def start(self) -> None:
        """Start it if it doesn't run; what it does shows in the resources' conditions."""
        if self.pid is None:
            # A thread: starting a process and reading its log block.
            self._child = await asyncio.to_thread(
                Child,
                "operator",
                [sys.executable, "-m", "tidegate_operator"],
                log=self.log,
                lifeline=self._lifeline,
                environment=self._environment,
            )

    async def stop(self, *, kill: bool = False) -> None:
        """Stop it, or kill it as a crash would; it has ended on return."""
        # Forgotten first: from here on its end is asked for.
        child, self._child = self._child, None
        if child is not None:
            grace = 0.0 if kill else _GRACE_SECONDS
            await asyncio.to_thread(child.stop, grace_seconds=grace)
