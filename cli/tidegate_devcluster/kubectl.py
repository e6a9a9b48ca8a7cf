"""The real kubectl, bound to one cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tidegate_devcluster.assets import Tool


class Kubectl:
    """Runs kubectl against one API server as one user.

    Attributes:
        kubeconfig: Of that user.
        path: The program.
    """

    def __init__(self, tool: Tool, kubeconfig: Path, cache: Path) -> None:
        """Takes a folder for what kubectl caches about the server's kinds.

        The usual folder is keyed by address: with ports used again, it would hold the kinds of a
        cluster that is gone.
        """
        self.kubeconfig = kubeconfig
        self.path = tool.path
        self._environment = tool.environment
        self._cache = cache

    def __call__(
        self,
        *arguments: str,
        input: str | None = None,  # noqa: A002 - named as in subprocess.run
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs it to the end.

        Args:
            arguments: As on the command line.
            input: Text for standard input, for `-f -`.
            check: Raise where kubectl fails.

        Raises:
            subprocess.CalledProcessError: kubectl failed and `check` was asked; its notes hold
                what it printed.
        """
        done = subprocess.run(
            [
                str(self.path),
                f"--kubeconfig={self.kubeconfig}",
                f"--cache-dir={self._cache}",
                *arguments,
            ],
            input=input if input is not None else "",
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self._environment},
        )
        if check and done.returncode != 0:
            error = subprocess.CalledProcessError(
                done.returncode, done.args, done.stdout, done.stderr
            )
            error.add_note(done.stderr)
            raise error
        return done
