"""The key-value part of a GGUF file, with its values' types checked."""

from pathlib import Path
from typing import Any, TypeVar

from gguf import GGUFReader

from tidegate_engine.model.errors import ModelLoadError

_T = TypeVar("_T", str, int, float, bool)


class GgufMetadata:
    """What a file says about its model beside the tensors.

    Attributes:
        path: For messages.
    """

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self._reader = reader

    def __contains__(self, key: str) -> bool:
        return self._reader.get_field(key) is not None

    def value(self, key: str, kind: type[_T], *, default: _T | None = None) -> _T:
        """Return one value; without a default it must be there.

        Raises:
            ModelLoadError: It is missing, or of another kind.
        """
        found = self._find(key)
        if found is None:
            if default is None:
                raise ModelLoadError(self.path, f"metadata {key} is missing")
            return default
        return self._checked(key, found, kind)

    def optional(self, key: str, kind: type[_T]) -> _T | None:
        """Return one value, or None where there is none.

        Raises:
            ModelLoadError: It is of another kind.
        """
        return self.value(key, kind) if key in self else None

    def values(self, key: str, kind: type[_T]) -> list[_T]:
        """Return all values of an array.

        Raises:
            ModelLoadError: It is missing, or of another kind.
        """
        found = self._find(key)
        if found is None:
            raise ModelLoadError(self.path, f"metadata {key} is missing")
        if not isinstance(found, list):
            raise ModelLoadError(self.path, f"metadata {key} must be an array, got {found!r}")
        return [self._checked(key, value, kind) for value in found]

    def length(self, key: str) -> int:
        """Return the number of elements of an array, without reading them; 0 if it is missing."""
        field = self._reader.get_field(key)
        return 0 if field is None else len(field.data)

    def refuse(self, key: str, problem: str) -> ModelLoadError:
        """Make the error that a key's value asks for what isn't implemented."""
        return ModelLoadError(self.path, f"metadata {key}: {problem}")

    def _find(self, key: str) -> Any:  # noqa: ANN401 (whatever the file holds)
        field = self._reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except ValueError as error:
            raise self.refuse(key, f"{error}") from error

    def _checked(self, key: str, found: Any, kind: type[_T]) -> _T:  # noqa: ANN401 (as above)
        is_whole_for_float = kind is float and type(found) is int
        if type(found) is not kind and not is_whole_for_float:
            raise ModelLoadError(
                self.path, f"metadata {key} must be of type {kind.__name__}, got {found!r:.80}"
            )
        return kind(found)
