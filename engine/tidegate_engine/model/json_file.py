"""JSON files that come with a model."""

import json
from pathlib import Path
from typing import Any

from tidegate_engine.model.errors import ModelLoadError


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Read an object; an optional file that isn't there is an empty one.

    Raises:
        ModelLoadError: The file is missing or holds no JSON object.
    """
    if optional and not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(path, f"can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(path, f"must hold a JSON object, not {type(content).__name__}")
    return content
