"""Looks requests up."""

from collections.abc import Awaitable, Callable, Sequence

from tidegate_cli.console.requests import Json
from tidegate_cli.errors import CommandError

Explain = Callable[[str], Awaitable[Sequence[Json]]]
"""Returns what all engines know of a request, by its id or by what its client called it."""


class ExplainError(CommandError):
    """A request can't be looked up; the message says why."""
