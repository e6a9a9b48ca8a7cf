"""What can go wrong in a development cluster; every error says what to do or where to look.

DevClusterError
├── ToolMissingError     a binary can be neither found nor made on this machine
├── ToolBuildError       making a binary failed
├── StartError           a child process ended or stayed unready
├── NetworkError         the pods' network could not be set up
└── ApiError             the API server refused a request
"""

from __future__ import annotations

from pathlib import Path


class DevClusterError(Exception):
    """Base of all errors of the development cluster."""


class ToolMissingError(DevClusterError):
    """A binary can be neither found nor made here; the message says what to install.

    Attributes:
        tool: Name of the binary.
        remedy: What the user can do.
    """

    def __init__(self, tool: str, remedy: str) -> None:
        self.tool = tool
        self.remedy = remedy
        super().__init__(f"{tool} is missing: {remedy}")


class ToolBuildError(DevClusterError):
    """Building or unpacking a binary failed; nothing of it stays in the cache.

    Attributes:
        tool: Name of the binary.
        output: The last lines that the failed command printed.
    """

    def __init__(self, tool: str, command: str, output: str) -> None:
        self.tool = tool
        self.output = output
        super().__init__(f"{tool}: `{command}` failed:\n{output}")


class StartError(DevClusterError):
    """A child process ended, or stayed unready for too long.

    Attributes:
        name: Name of the child.
        log: Its log file.
    """

    def __init__(self, name: str, log: Path, what: str, tail: str) -> None:
        self.name = name
        self.log = log
        super().__init__(f"{name} {what}; the end of {log}:\n{tail}")


class NetworkError(DevClusterError):
    """The pods' network could not be set up."""


class ApiError(DevClusterError):
    """The API server refused a request.

    Attributes:
        status: HTTP status; 409 is a conflict, 410 an expired watch.
        reason: The `reason` of the returned Status, for example NotFound.
    """

    def __init__(self, method: str, path: str, status: int, *, reason: str, message: str) -> None:
        self.status = status
        self.reason = reason
        super().__init__(f"{method} {path}: {status} {reason}: {message}")
