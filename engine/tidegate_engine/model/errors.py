"""What can be wrong with a model on disk."""

from pathlib import Path


class ModelLoadError(Exception):
    """A model can't be loaded.

    Attributes:
        path: The file or directory at fault.
        tensor: The tensor at fault, by its name in that file; None when it isn't about one.
    """

    def __init__(self, path: Path | str, problem: str, *, tensor: str | None = None) -> None:
        where = f"{path}, tensor {tensor}" if tensor else f"{path}"
        super().__init__(f"{where}: {problem}")
        self.path = Path(path)
        self.tensor = tensor
