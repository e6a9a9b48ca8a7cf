"""What is wrong with a text that came from outside, in one line that names the field."""

from pydantic import ValidationError


class SnapshotError(ValueError):
    """A text is not a valid policy snapshot; the message names the field."""


def first_problem(error: ValidationError, *, whole: str) -> str:
    """Return `field: problem` of the first thing that is wrong.

    Args:
        error: Of reading the text.
        whole: What to name when no field is at fault, for example because it isn't JSON.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or whole
    return f"{where}: {first['msg']}"
