"""One safetensors file, mapped into memory."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tidegate_engine.model.errors import ModelLoadError

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LENGTH_BYTES = 8


class SafetensorsFile:
    """The tensors of one file, read without copying them.

    Raises:
        ModelLoadError: It is missing, is broken, or ends early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise ModelLoadError(path, "is missing; weights are read from safetensors alone")
        try:
            self._file = _open(path)
            self.names = frozenset(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise _explained(path, error) from error

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored: a view of the mapped file.

        Raises:
            ModelLoadError: It isn't there, or isn't stored as plain floating point numbers.
        """
        if name not in self.names:
            raise ModelLoadError(self.path, "is missing", tensor=name)
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(self.path, f"can't be read: {error}", tensor=name) from error
        if tensor.dtype not in _DTYPES:
            stored = str(tensor.dtype).removeprefix("torch.")
            problem = f"is stored as {stored}, only float32, float16 and bfloat16 are read"
            raise ModelLoadError(self.path, problem, tensor=name)
        return tensor


def _open(path: Path) -> Any:  # noqa: ANN401 (the library has no types)
    return safe_open(path, framework="pt")


def _explained(path: Path, error: Exception) -> ModelLoadError:
    """Name the first tensor that a file cut short lacks bytes of; the library names none."""
    try:
        ends, available = _ends_of_tensors(path)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        ends, available = {}, 0
    cut = [name for name, end in ends.items() if end > available]
    if not cut:
        return ModelLoadError(path, f"can't be read as safetensors: {error}")
    missing = max(ends.values()) - available
    return ModelLoadError(
        path, f"the file ends {missing} bytes early", tensor=min(cut, key=ends.__getitem__)
    )


def _ends_of_tensors(path: Path) -> tuple[dict[str, int], int]:
    """Where each tensor ends behind the header, and how many bytes there are."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        available = path.stat().st_size - _LENGTH_BYTES - header_bytes
        if available < 0:
            return {}, 0
        header = json.loads(file.read(header_bytes))
    return {
        name: entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
    }, available
