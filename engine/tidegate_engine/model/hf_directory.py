"""Hugging Face model directories: safetensors, and the tokenizer's files."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from torch import Tensor

from tidegate_engine.model.chat_template import ChatTemplateError
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.hf_config import read_config
from tidegate_engine.model.json_file import read_json
from tidegate_engine.model.safetensors_file import SafetensorsFile
from tidegate_engine.model.spelling import UnsupportedTokenizerError
from tidegate_engine.model.tokenizer import Tokenizer, add_around_prompts, load_backend

_CONFIG_FILE = "config.json"
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_SETTINGS_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"


class HfDirectory:
    """A directory as `save_pretrained` writes it. A `TensorSource`.

    Raises:
        ModelLoadError: A file is missing or broken, or it needs what isn't implemented.
    """

    def __init__(self, path: Path) -> None:
        self._directory = path
        self.config, self._eos_token_ids = read_config(path / _CONFIG_FILE)
        self._files = _find_tensors(path)
        self._read: set[str] = set()

    def locate(self, name: str) -> tuple[Path, str]:
        """Return the file that holds a tensor, or ought to."""
        if name in self._files:
            return self._files[name].path, name
        single = self._directory / _WEIGHTS_FILE
        return single if single.is_file() else self._directory / _INDEX_FILE, name

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""
        if name not in self._files:
            path, _ = self.locate(name)
            raise ModelLoadError(path, "is missing", tensor=name)
        tensor = self._files[name].read(name)
        self._read.add(name)
        return tensor

    def unread(self) -> list[tuple[Path, str]]:
        """File and name of the tensors that `read` never returned."""
        # Old files store the rotary frequencies, which follow from the configuration; some
        # store a tied output projection too.
        known = {"lm_head.weight"} if self.config.has_tied_embeddings else set()
        return [
            self.locate(name)
            for name in sorted(self._files)
            if name not in self._read | known and not name.endswith("rotary_emb.inv_freq")
        ]

    def tokenizer(self) -> Tokenizer:
        """Read tokenizer.json, and the chat template and special tokens from the files beside it.

        Raises:
            ModelLoadError: It is of a kind that isn't implemented, or a file is broken.
        """
        path = self._directory / _TOKENIZER_FILE
        backend = load_backend(path)
        settings = read_json(self._directory / "special_tokens_map.json", optional=True)
        settings |= read_json(self._directory / _TOKENIZER_SETTINGS_FILE, optional=True)
        bos_token, eos_token = (self._token_text(settings, name) for name in ("bos", "eos"))
        self._frame_prompts(backend, settings, bos_token, eos_token)
        template, template_path = self._chat_template(settings)
        eos_token_id = backend.token_to_id(eos_token)
        own_end = frozenset() if eos_token_id is None else frozenset([eos_token_id])
        try:
            return Tokenizer(
                backend,
                chat_template=template,
                eos_token_ids=self._eos_token_ids | own_end,
                bos_token=bos_token,
                eos_token=eos_token,
            )
        except UnsupportedTokenizerError as error:
            raise ModelLoadError(path, f"{error}") from error
        except ChatTemplateError as error:
            raise ModelLoadError(template_path, f"{error}") from error

    def _frame_prompts(
        self, backend: Backend, settings: dict[str, Any], bos_token: str, eos_token: str
    ) -> None:
        """Follow the settings where they say what is around prompts; else tokenizer.json does."""
        adds_bos, adds_eos = settings.get("add_bos_token"), settings.get("add_eos_token")
        if adds_bos is None and adds_eos is None:
            return
        try:
            add_around_prompts(
                backend, bos_token if adds_bos else "", eos_token if adds_eos else ""
            )
        except UnsupportedTokenizerError as error:
            raise ModelLoadError(self._directory / _TOKENIZER_SETTINGS_FILE, f"{error}") from error

    def _chat_template(self, settings: dict[str, Any]) -> tuple[str | None, Path]:
        """Return the template and the file that it is from."""
        path = self._directory / _TEMPLATE_FILE
        if path.is_file():
            try:
                return path.read_text(encoding="utf-8"), path
            except (OSError, ValueError) as error:
                raise ModelLoadError(path, f"can't be read: {error}") from error
        path = self._directory / _TOKENIZER_SETTINGS_FILE
        found = settings.get("chat_template")
        if isinstance(found, list):
            # Several by name; the others are for tools and retrieval.
            named = {entry.get("name"): entry.get("template") for entry in found}
            found = named.get("default")
        if found is not None and not isinstance(found, str):
            raise ModelLoadError(path, f"chat_template must be text, got {found!r}")
        return found, path

    def _token_text(self, settings: dict[str, Any], name: str) -> str:
        token = settings.get(f"{name}_token")
        if token is None:
            return ""
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            problem = f"{name}_token must be a token's text, got {token!r}"
            raise ModelLoadError(self._directory / _TOKENIZER_SETTINGS_FILE, problem)
        return text


def _find_tensors(path: Path) -> dict[str, SafetensorsFile]:
    """The file of each tensor, sharded or not."""
    if (path / _WEIGHTS_FILE).is_file() or not (path / _INDEX_FILE).is_file():
        file = SafetensorsFile(path / _WEIGHTS_FILE)
        return dict.fromkeys(file.names, file)
    index = path / _INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise ModelLoadError(index, "weight_map must map names of tensors to names of files")
    shards = {name: SafetensorsFile(path / name) for name in sorted({*weight_map.values()})}
    for name, shard in weight_map.items():
        if name not in shards[shard].names:
            problem = f"is missing, though {_INDEX_FILE} says that it is here"
            raise ModelLoadError(path / shard, problem, tensor=name)
    return {name: shards[shard] for name, shard in weight_map.items()}
