"""How long steps tell what they do: whole lines, so that a CI log reads as well as a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = Callable[[str], None]
"""Takes one line that says what is being done and how far it is."""

INTERVAL_SECONDS = 15.0
"""Longest silence during a step; CI services take a longer one for a hang."""


def to_stderr(line: str) -> None:
    """Prints the line to standard error, unbuffered."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
