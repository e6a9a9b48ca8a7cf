"""What can go wrong in a benchmark beside what can go wrong in any command."""

from tidegate_cli.errors import CommandError


class BenchError(CommandError):
    """A benchmark can't measure what it is about, or can't show it; the message says why."""
