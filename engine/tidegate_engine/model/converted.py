"""Converted models, kept between starts.

A GGUF file is dequantised once for each dtype; what comes out is kept as safetensors in a directory
named by the file's content, and later loads map that into memory. Engines on one machine share
those pages.
"""

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.file_lock import locked
from tidegate_engine.model.gguf_file import GgufFile
from tidegate_engine.model.json_file import read_json
from tidegate_engine.model.rope_scaling import RopeScaling
from tidegate_engine.model.safetensors_file import SafetensorsFile
from tidegate_engine.model.tokenizer import Tokenizer
from tidegate_engine.model.weights import assemble

# Part of the directory's name: raise it when what is stored, or how it is computed, changes.
_FORMAT = 2
# Written last, so that it vouches for the other files.
_CONFIG_FILE = "config.json"


class ConvertedModel:
    """The directory of one converted model.

    Raises:
        ModelLoadError: The source, or what was kept of it, can't be read.
    """

    def __init__(self, source: Path, cache_dir: Path, dtype: torch.dtype) -> None:
        self.path = _converted(source, cache_dir, dtype)
        self.config = _read_config(self.path / _CONFIG_FILE)

    def tokenizer(self) -> Tokenizer:
        """Read the tokenizer.

        Raises:
            ModelLoadError: A file is broken.
        """
        return Tokenizer.load(self.path)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors as views of the mapped files, named as `from_tensors` takes them.

        Raises:
            ModelLoadError: A file is broken.
        """
        for path in sorted(self.path.glob("*.safetensors")):
            file = SafetensorsFile(path)
            for name in sorted(file.names):
                yield name, file.read(name)


def _converted(source: Path, cache_dir: Path, dtype: torch.dtype) -> Path:
    """Return the directory with the converted model, made now if this is the first time."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = str(dtype).removeprefix("torch.")
    directory = cache_dir / f"{digest[:16]}-{name}-v{_FORMAT}"
    if _is_complete(directory):
        return directory
    with locked(cache_dir / f"{directory.name}.lock"):
        # Another engine may have done it while this one waited.
        if not _is_complete(directory):
            _convert(source, directory, dtype)
    return directory


def _convert(path: Path, directory: Path, dtype: torch.dtype) -> None:
    part = directory.with_name(f"{directory.name}.part")
    # The lock is ours: what lies there was left by a conversion that was killed.
    for stale in (part, directory):
        if stale.exists():
            shutil.rmtree(stale)
    part.mkdir()
    source = GgufFile(path)
    # First, since it takes the shortest and may fail.
    source.tokenizer().save(part)
    # A file a layer: so the whole model is never in memory.
    tensors = assemble(source.config, source, dtype=dtype)
    for stem, members in itertools.groupby(tensors, key=lambda entry: _file_stem(entry[0])):
        save_file(dict(members), part / f"{stem}.safetensors")
    content = {
        "source": path.name,
        "weights_bytes": _weights_bytes(part),
        "llama": dataclasses.asdict(source.config),
    }
    (part / _CONFIG_FILE).write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.rename(directory)


def _file_stem(tensor: str) -> str:
    """`layers.3.qkv` goes to `layers.3`; `embedding` to a file of its own."""
    return tensor.rpartition(".")[0] or tensor


def _weights_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _is_complete(directory: Path) -> bool:
    try:
        content = read_json(directory / _CONFIG_FILE)
    except ModelLoadError:
        return False
    # The size guards against a machine that went down before all pages were on disk.
    return "llama" in content and content.get("weights_bytes") == _weights_bytes(directory)


def _read_config(path: Path) -> LlamaConfig:
    try:
        content = read_json(path)["llama"]
        if (scaling := content["rope_scaling"]) is not None:
            content["rope_scaling"] = RopeScaling(
                tuple(scaling["divisors"]), scaling["attention_factor"]
            )
        return LlamaConfig(**content)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(path, f"can't be read: {error}") from error
