"""How a command's work runs, fails and ends."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine

import typer

from tidegate_cli.errors import CommandError
from tidegate_devcluster.errors import DevClusterError

FAILED = 1
INTERRUPTED = 130
"""Exit codes: what was asked for did not hold or could not be done; Ctrl-C came before the end."""


def compute_to_end(work: Callable[[], None]) -> None:
    """Run work that only computes, and ends at Ctrl-C wherever it is; else as `run_to_end`.

    Raises:
        typer.Exit: The work failed or was interrupted.
    """
    try:
        work()
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except CommandError as error:
        sys.stderr.write(f"tidegate: {error}\n")
        raise typer.Exit(FAILED) from None


def run_to_end(work: Coroutine[None, None, None], *, interrupted: int = INTERRUPTED) -> None:
    """Run a command's work; what fails is told in one line, without a traceback.

    Args:
        work: Cleans up after itself when it is cancelled, as Ctrl-C and SIGTERM do.
        interrupted: Exit code after Ctrl-C or SIGTERM.

    Raises:
        typer.Exit: The work failed or was interrupted.
    """
    try:
        asyncio.run(_cancelled_by_signals(work))
    except asyncio.CancelledError:
        raise typer.Exit(interrupted) from None
    except (CommandError, DevClusterError) as error:
        sys.stderr.write(f"tidegate: {error}\n")
        raise typer.Exit(FAILED) from None


async def _cancelled_by_signals(work: Coroutine[None, None, None]) -> None:
    task = asyncio.current_task()
    # SIGINT by hand too: asyncio leaves it alone where the shell had it ignored, as for background
    # jobs of a script.
    for number in (signal.SIGINT, signal.SIGTERM):
        if task is not None:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await work
