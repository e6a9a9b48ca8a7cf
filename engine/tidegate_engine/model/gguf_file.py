"""GGUF files: dequantised tensors of a Llama-family model."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.gguf_config import read_config
from tidegate_engine.model.gguf_metadata import GgufMetadata
from tidegate_engine.model.gguf_tokenizer import read_tokenizer
from tidegate_engine.model.tokenizer import Tokenizer

_TENSOR_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROPE_DIVISORS = "rope_freqs.weight"


class GgufFile:
    """One GGUF file, open for reading. A `TensorSource`.

    Raises:
        ModelLoadError: It isn't a GGUF file, is cut short, or needs what isn't implemented.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            reader = _CheckedReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelLoadError(path, f"can't be read as GGUF: {error}") from error
        self._metadata = GgufMetadata(path, reader)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._read: set[str] = set()
        divisors = self._load(_ROPE_DIVISORS) if _ROPE_DIVISORS in self._tensors else None
        self.config = read_config(
            self._metadata,
            has_output="output.weight" in self._tensors,
            rope_divisors=None if divisors is None else divisors.flatten().tolist(),
        )
        # llama.cpp turns neighbouring elements of a head in models of this architecture alone.
        self._is_permuted = self._metadata.value("general.architecture", str) == "llama"

    def locate(self, name: str) -> tuple[Path, str]:
        """Return this file, and the tensor's name in it."""
        return self._path, _own_name(name)

    def read(self, name: str) -> Tensor:
        """Dequantise a tensor, named as in Hugging Face's models, to float32."""
        own_name = _own_name(name)
        tensor = self._load(own_name)
        if self._is_permuted and own_name.endswith(("attn_q.weight", "attn_k.weight")):
            return _unpermute(tensor, self.config.head_size)
        return tensor

    def unread(self) -> list[tuple[Path, str]]:
        """This file and the names in it of the tensors that `read` never returned."""
        return [(self._path, name) for name in self._tensors if name not in self._read]

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer from the metadata.

        Raises:
            ModelLoadError: It is broken, or of a kind that isn't implemented.
        """
        return read_tokenizer(self._metadata)

    def _load(self, own_name: str) -> Tensor:
        if own_name not in self._tensors:
            raise ModelLoadError(self._path, "is missing", tensor=own_name)
        found: ReaderTensor = self._tensors[own_name]
        try:
            with np.errstate(all="ignore"):
                values = dequantize(found.data, found.tensor_type)
        except NotImplementedError as error:
            raise ModelLoadError(self._path, f"{error}", tensor=own_name) from error
        if not np.isfinite(values).all():
            raise ModelLoadError(self._path, "holds numbers that aren't finite", tensor=own_name)
        self._read.add(own_name)
        # GGUF counts the fastest-varying dimension first.
        shape = [*reversed(found.shape.tolist())]
        return torch.from_numpy(np.array(values, np.float32)).view(*shape)


class _CheckedReader(GGUFReader):
    """Names the tensor at which a file is cut short; the plain reader reports a shape mismatch."""

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        path = Path(str(self.data.filename))
        for field in fields:
            _, name_bytes, _, dims, kind, offset = field.parts
            name = bytes(name_bytes).decode()
            try:
                block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
            except ValueError as error:
                raise ModelLoadError(path, f"{error}", tensor=name) from error
            num_elements = int(np.prod(dims, dtype=np.uint64))
            num_bytes = num_elements * block_bytes // block_size
            missing = start_offs + int(offset[0]) + num_bytes - len(self.data)
            if missing > 0:
                raise ModelLoadError(path, f"the file ends {missing} bytes early", tensor=name)
        super()._build_tensors(start_offs, fields)


def _own_name(name: str) -> str:
    """Translate `model.layers.3.mlp.up_proj.weight` to `blk.3.ffn_up.weight`."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_TENSOR_NAMES[part]}.{suffix}"
    return f"{_TENSOR_NAMES[stem]}.{suffix}"


def _unpermute(tensor: Tensor, head_size: int) -> Tensor:
    """Undo llama.cpp's order of rows, which pairs neighbours for RoPE; we pair halves of a head."""
    rows, columns = tensor.shape
    if rows % head_size:
        return tensor  # of the wrong shape, as whoever reads it will say
    paired = tensor.view(-1, head_size // 2, 2, columns)
    return paired.transpose(1, 2).reshape(rows, columns)
