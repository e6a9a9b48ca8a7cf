"""Figures as people read them."""

import math

NOTHING = "—"
"""Where there is no figure."""

_SPACE = "\N{NO-BREAK SPACE}"


def seconds_text(seconds: float) -> str:
    """Write a duration with at most three digits: `0.4 ms`, `1.25 s`, `3.5 min`, `never`."""
    if math.isinf(seconds):
        return "never"
    if seconds < 0.001:
        return f"{1000 * seconds:.1f}{_SPACE}ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g}{_SPACE}ms"
    return f"{seconds:.3g}{_SPACE}s" if seconds < 120 else f"{seconds / 60:.3g}{_SPACE}min"


def count_text(count: float) -> str:
    """Write a number with at most four digits: `982`, `14.2k`, `3.81M`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= 10 * size or (size > 1e3 and count >= size):
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def percent_text(percent: float) -> str:
    """Write a percentage without digits behind the point, but never 0 for something."""
    return f"<1{_SPACE}%" if 0 < percent < 0.5 else f"{percent:.0f}{_SPACE}%"


def counted(count: float, noun: str) -> str:
    """Write a number of things; a line never breaks inside."""
    return f"{count_text(count)}{_SPACE}{noun}"
