"""What can go wrong in the command line; every message is one that a person can act on.

CommandError
├── TraceError         a recorded trace can't be read, labelled or scaled
├── KubectlError       kubectl ended with an error
├── NotReadyError      something didn't come up, or a condition didn't come true, in time
├── TrafficError       requests failed that should have been served
└── ExpectationError   a run ended, and what it had to show did not hold
"""

from collections.abc import Sequence
from pathlib import Path


class CommandError(Exception):
    """Base of what a command reports and ends with, exit code 1."""


class TraceError(CommandError):
    """A recorded trace can't be read, labelled or scaled.

    Attributes:
        path: The trace; None when the rows did not come from a file.
    """

    def __init__(self, message: str, *, path: Path | None = None) -> None:
        self.path = path
        super().__init__(f"{path}: {message}" if path else message)


class KubectlError(CommandError):
    """The real kubectl ended with an error.

    Attributes:
        arguments: What it was called with.
        exit_code: How it ended.
        stderr: What it said.
    """

    def __init__(self, arguments: Sequence[str], exit_code: int, stderr: str) -> None:
        self.arguments = tuple(arguments)
        self.exit_code = exit_code
        self.stderr = stderr
        super().__init__(f"kubectl {' '.join(arguments)}: {stderr.strip()}")


class NotReadyError(CommandError):
    """Something didn't come up, or a condition didn't come true, in time.

    Attributes:
        what: What was waited for.
        limit_seconds: For how long.
    """

    def __init__(self, what: str, *, limit_seconds: float, last_seen: str = "") -> None:
        self.what = what
        self.limit_seconds = limit_seconds
        seen = f"; last seen: {last_seen}" if last_seen else ""
        super().__init__(f"{what}: not within {limit_seconds:g} s{seen}")


class TrafficError(CommandError):
    """Requests failed that should have been served; the message holds the first of them."""


class ExpectationError(CommandError):
    """A run ended, and what it had to show did not hold.

    Attributes:
        unmet: One sentence per expectation.
    """

    def __init__(self, unmet: Sequence[str]) -> None:
        self.unmet = tuple(unmet)
        super().__init__("; ".join(unmet))
