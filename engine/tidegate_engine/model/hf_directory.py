"""Hugging Face model directories: config.json, safetensors, tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tidegate_engine.model.config import LlamaConfig, ModelConfigError
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.tokenizer import Tokenizer, load_backend


class HfDirectory:
    """A directory as `save_pretrained` writes it. A `TensorSource`.

    Raises:
        ModelLoadError: A file is missing or broken, or it needs what isn't implemented.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config = _read_json(path / "config.json")
        self.config = self._parse_config()
        self._files = self._find_tensors()
        self._read: set[str] = set()

    def read(self, name: str) -> Tensor:
        """Return a tensor in float32."""
        if name not in self._files:
            raise ModelLoadError(self.path, "is missing", tensor=name)
        file = self._files[name]
        try:
            with safe_open(file, framework="pt") as tensors:
                tensor: Tensor = tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(file, f"can't be read: {error}", tensor=name) from error
        self._read.add(name)
        return tensor.to(torch.float32)

    def unread(self) -> tuple[str, ...]:
        """Names of the tensors that `read` never returned."""
        # Old files store the rotary frequencies, which follow from the configuration; some
        # store a tied output projection too.
        known = {"lm_head.weight"} if self.config.has_tied_embeddings else set()
        return tuple(
            name
            for name in sorted(self._files)
            if name not in self._read | known and not name.endswith("rotary_emb.inv_freq")
        )

    def tokenizer(self) -> Tokenizer:
        """Read tokenizer.json, and the chat template and end tokens from the files beside it.

        Raises:
            ModelLoadError: It isn't a byte-level tokenizer, or a file is broken.
        """
        path = self.path / "tokenizer.json"
        backend = load_backend(path)
        decoder = _read_json(path).get("decoder") or {}
        steps = decoder.get("decoders", [decoder])
        if not any(step.get("type") == "ByteLevel" for step in steps):
            raise ModelLoadError(path, "only byte-level tokenizers are supported")
        settings = _read_json(self.path / "tokenizer_config.json", optional=True)
        eos_token = _token_text(settings.get("eos_token"))
        return Tokenizer(
            backend,
            chat_template=self._chat_template(settings),
            eos_token_ids=self._eos_token_ids(backend.token_to_id(eos_token)),
            bos_token=_token_text(settings.get("bos_token")),
            eos_token=eos_token,
        )

    def _chat_template(self, settings: dict[str, Any]) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text()
        template: str | None = settings.get("chat_template")
        return template

    def _eos_token_ids(self, from_tokenizer: int | None) -> frozenset[int]:
        generation = _read_json(self.path / "generation_config.json", optional=True)
        found = generation.get("eos_token_id", self._config.get("eos_token_id"))
        ids = [*found] if isinstance(found, list) else [found]
        return frozenset(i for i in (*ids, from_tokenizer) if i is not None)

    def _parse_config(self) -> LlamaConfig:
        path, raw = self.path / "config.json", self._config
        if raw.get("model_type") != "llama":
            problem = f"architecture {raw.get('model_type')!r} isn't supported, only llama"
            raise ModelLoadError(path, problem)
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise ModelLoadError(path, f"RoPE scaling {rope_type!r} isn't supported")
        try:
            heads = raw["num_attention_heads"]
            return LlamaConfig(
                num_layers=raw["num_hidden_layers"],
                hidden_size=raw["hidden_size"],
                num_heads=heads,
                num_kv_heads=raw.get("num_key_value_heads") or heads,
                head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
                intermediate_size=raw["intermediate_size"],
                vocab_size=raw["vocab_size"],
                max_context_tokens=raw["max_position_embeddings"],
                rope_theta=rope.get("rope_theta") or raw.get("rope_theta", 10_000.0),
                rms_norm_epsilon=raw["rms_norm_eps"],
                has_tied_embeddings=raw.get("tie_word_embeddings", False),
            )
        except KeyError as error:
            raise ModelLoadError(path, f"{error} is missing") from error
        except ModelConfigError as error:
            raise ModelLoadError(path, f"{error}") from error

    def _find_tensors(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            shards: dict[str, str] = _read_json(index).get("weight_map", {})
            return {name: self.path / shard for name, shard in shards.items()}
        file = self.path / "model.safetensors"
        if not file.is_file():
            raise ModelLoadError(file, "is missing")
        try:
            with safe_open(file, framework="pt") as tensors:
                return dict.fromkeys(tensors.keys(), file)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(file, f"can't be read: {error}") from error


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(path, f"can't be read: {error}") from error
    return content


def _token_text(token: str | dict[str, Any] | None) -> str:
    if token is None:
        return ""
    return token if isinstance(token, str) else str(token["content"])
