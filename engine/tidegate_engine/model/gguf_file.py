"""GGUF files: configuration, tokenizer and dequantised tensors of a Llama-family model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from torch import Tensor

from tidegate_engine.model.config import LlamaConfig, ModelConfigError
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.tokenizer import Tokenizer

_TENSOR_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SPECIAL_TOKEN_TYPE = 3
# How text is cut before BPE, by the name that GGUF gives to the scheme.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
}


class GgufFile:
    """One GGUF file, open for reading. A `TensorSource`.

    Raises:
        ModelLoadError: It isn't a GGUF file, is cut short, or needs what isn't implemented.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _CheckedReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise ModelLoadError(path, f"can't be read as GGUF: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._read: set[str] = set()
        architecture = self._metadata("general.architecture")
        if architecture != "llama":
            raise ModelLoadError(path, f"architecture {architecture!r} isn't supported, only llama")
        self.config = self._parse_config()

    def read(self, name: str) -> Tensor:
        """Dequantise a tensor, named as in Hugging Face's models, to float32."""
        own_name = _own_name(name)
        if own_name not in self._tensors:
            raise ModelLoadError(self.path, "is missing", tensor=own_name)
        found = self._tensors[own_name]
        try:
            values = dequantize(found.data, found.tensor_type)
        except NotImplementedError as error:
            raise ModelLoadError(self.path, f"{error}", tensor=own_name) from error
        self._read.add(own_name)
        # GGUF counts the fastest-varying dimension first.
        tensor = torch.from_numpy(np.array(values, np.float32)).view(
            *reversed(found.shape.tolist())
        )
        if own_name.endswith("attn_q.weight"):
            return _unpermute(tensor, self.config.num_heads)
        if own_name.endswith("attn_k.weight"):
            return _unpermute(tensor, self.config.num_kv_heads)
        return tensor

    def unread(self) -> tuple[str, ...]:
        """Names of the tensors that `read` never returned."""
        return tuple(name for name in self._tensors if name not in self._read)

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer from the vocabulary, merges and chat template of the metadata.

        Raises:
            ModelLoadError: It is of a kind that isn't implemented.
        """
        kind = self._metadata("tokenizer.ggml.model")
        scheme = self._metadata("tokenizer.ggml.pre")
        if kind != "gpt2" or scheme not in _PRE_TOKENIZERS:
            known = ", ".join(sorted(_PRE_TOKENIZERS))
            problem = f"tokenizer {kind!r} cut as {scheme!r} isn't supported, only gpt2 as {known}"
            raise ModelLoadError(self.path, problem)
        tokens: list[str] = self._metadata("tokenizer.ggml.tokens")
        merges = [tuple(m.split(" ", 1)) for m in self._metadata("tokenizer.ggml.merges")]
        backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        backend.pre_tokenizer = _PRE_TOKENIZERS[scheme]()
        backend.decoder = decoders.ByteLevel()
        types = self._metadata("tokenizer.ggml.token_type")
        backend.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, token_type in zip(tokens, types, strict=True)
                if token_type == _SPECIAL_TOKEN_TYPE
            ]
        )
        bos = self._metadata("tokenizer.ggml.bos_token_id", default=None)
        if self._metadata("tokenizer.ggml.add_bos_token", default=False):
            backend.post_processor = processors.TemplateProcessing(
                single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
            )
        eos = self._metadata("tokenizer.ggml.eos_token_id")
        end_of_turn = self._metadata("tokenizer.ggml.eot_token_id", default=eos)
        return Tokenizer(
            backend,
            chat_template=self._metadata("tokenizer.chat_template", default=None),
            eos_token_ids=frozenset((eos, end_of_turn)),
            bos_token="" if bos is None else tokens[bos],
            eos_token=tokens[eos],
        )

    def _parse_config(self) -> LlamaConfig:
        hidden = self._metadata("llama.embedding_length")
        heads = self._metadata("llama.attention.head_count")
        head_size = self._metadata("llama.attention.key_length", default=hidden // heads)
        scaling = self._metadata("llama.rope.scaling.type", default="none")
        if scaling != "none":
            raise ModelLoadError(self.path, f"RoPE scaling {scaling!r} isn't supported")
        turned = self._metadata("llama.rope.dimension_count", default=head_size)
        if turned != head_size:
            problem = f"RoPE over {turned} of {head_size} elements of a head isn't supported"
            raise ModelLoadError(self.path, problem)
        tokens = self._reader.get_field("tokenizer.ggml.tokens")
        try:
            return LlamaConfig(
                num_layers=self._metadata("llama.block_count"),
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=self._metadata("llama.attention.head_count_kv", default=heads),
                head_size=head_size,
                intermediate_size=self._metadata("llama.feed_forward_length"),
                vocab_size=self._metadata(
                    "llama.vocab_size", default=len(tokens.data) if tokens else 0
                ),
                max_context_tokens=self._metadata("llama.context_length"),
                rope_theta=self._metadata("llama.rope.freq_base", default=10_000.0),
                rms_norm_epsilon=self._metadata("llama.attention.layer_norm_rms_epsilon"),
                has_tied_embeddings="output.weight" not in self._tensors,
            )
        except ModelConfigError as error:
            raise ModelLoadError(self.path, f"{error}") from error

    def _metadata(self, key: str, **default: Any) -> Any:  # noqa: ANN401 (GGUF values)
        field = self._reader.get_field(key)
        if field is not None:
            return field.contents()
        if "default" in default:
            return default["default"]
        raise ModelLoadError(self.path, f"metadata {key} is missing")


class _CheckedReader(GGUFReader):
    """Names the tensor at which a file is cut short; the plain reader reports a shape mismatch."""

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
            num_bytes = int(np.prod(dims)) * block_bytes // block_size
            missing = start_offs + int(offset[0]) + num_bytes - len(self.data)
            if missing > 0:
                path, tensor = Path(str(self.data.filename)), bytes(name).decode()
                raise ModelLoadError(path, f"the file ends {missing} bytes early", tensor=tensor)
        super()._build_tensors(start_offs, fields)


def _own_name(name: str) -> str:
    """Translate `model.layers.3.mlp.up_proj.weight` to `blk.3.ffn_up.weight`."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_TENSOR_NAMES[part]}.{suffix}"
    return f"{_TENSOR_NAMES[stem]}.{suffix}"


def _unpermute(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of rows, which pairs neighbours for RoPE; we pair halves of a head."""
    rows, columns = tensor.shape
    paired = tensor.view(heads, rows // heads // 2, 2, columns)
    return paired.transpose(1, 2).reshape(rows, columns)
