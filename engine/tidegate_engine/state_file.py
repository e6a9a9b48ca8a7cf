"""One small text on disk, replaced whole or not at all."""

import os
import tempfile
from pathlib import Path


class StateFile:
    """A file whose readers see the old text or the new one, whatever happens in between."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str | None:
        """Return the text; None when there is none, or none that can be read."""
        try:
            return self._path.read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def write(self, text: str) -> None:
        """Replace the text, durably.

        Raises:
            OSError: The old text is still there.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(part).replace(self._path)
        except OSError:
            Path(part).unlink(missing_ok=True)
            raise
