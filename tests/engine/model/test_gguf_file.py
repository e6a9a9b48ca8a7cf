import dataclasses
import math
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from torch import Tensor

from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.gguf_file import GgufFile
from tidegate_engine.model.rope_scaling import linear, yarn
from tidegate_engine.model.weights import assemble
from tidegate_testing.ggml_blocks import BLOCKS
from tidegate_testing.model_files import finish, write_gguf
from tidegate_testing.models import TINY, random_tensors

Add = Callable[[GGUFWriter], None]
DOWN = "model.layers.1.mlp.down_proj.weight"
NUM_DIVISORS = TINY.head_size // 2


def write(tmp_path: Path, add: Add, *, architecture: str = "llama") -> Path:
    return write_gguf(tmp_path / "m.gguf", random_tensors(), architecture=architecture, add=add)


def config_of(tmp_path: Path, add: Add) -> LlamaConfig:
    return GgufFile(write(tmp_path, add)).config


def random_blocks(kind: GGMLQuantizationType, count: int, seed: int) -> list[bytes]:
    """Blocks of random bytes, but with sound scales."""
    num_bytes, scales, _ = BLOCKS[kind]
    source = random.Random(seed)
    blocks = []
    for _ in range(count):
        block = bytearray(source.randbytes(num_bytes))
        if kind == GGMLQuantizationType.F32:
            block[:] = struct.pack("<f", source.gauss(0, 1))
        elif kind == GGMLQuantizationType.BF16:
            block[:] = struct.pack("<f", source.gauss(0, 1))[2:]
        elif kind == GGMLQuantizationType.F16:
            block[:] = struct.pack("<e", source.gauss(0, 1))
        for start in scales:
            block[start : start + 2] = struct.pack("<e", source.uniform(-1, 1))
        blocks.append(bytes(block))
    return blocks


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_quantised_tensors_are_what_the_format_says(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    rows, columns = 3, 512
    num_bytes, _, decode = BLOCKS[kind]
    per_row = columns // len(decode(bytes(num_bytes)))
    blocks = random_blocks(kind, rows * per_row, seed=kind.value)
    raw = np.frombuffer(b"".join(blocks), np.uint8).reshape(rows, -1)

    def add(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.7.ffn_down.weight", raw, raw_dtype=kind)

    read = GgufFile(write(tmp_path, add)).read("model.layers.7.mlp.down_proj.weight")
    expected = torch.tensor([number for block in blocks for number in decode(block)])
    assert read.shape == (rows, columns)
    assert read.dtype == torch.float32
    assert torch.allclose(read.flatten(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_only_llamas_have_their_rows_put_back(architecture: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    file = write_gguf(
        tmp_path / "m.gguf",
        tensors,
        architecture=architecture,
        kind=GGMLQuantizationType.F32,
    )
    source = GgufFile(file)
    for part in "qkv":
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        assert torch.equal(source.read(name), tensors[name])


def test_positions_may_be_stretched_linearly(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    expected = linear(4.0, head_size=TINY.head_size)
    assert config_of(tmp_path, add).rope_scaling == expected
    old = config_of(tmp_path, lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0))
    assert old.rope_scaling == expected


def test_positions_may_be_stretched_by_yarn(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    assert config_of(tmp_path, add).rope_scaling == yarn(
        4.0, original_context_tokens=128, rope_theta=TINY.rope_theta, head_size=TINY.head_size
    )


def test_llama_3_brings_its_divisors_as_a_tensor(tmp_path: Path) -> None:
    divisors = np.array([1.0, 1.0, 3.5, 8.0], np.float32)

    def add(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", divisors)

    source = GgufFile(write(tmp_path, add))
    assert source.config.rope_scaling is not None
    assert source.config.rope_scaling.divisors == (1.0, 1.0, 3.5, 8.0)
    # It has its place, and so isn't refused.
    assert len(dict(assemble(source.config, source))) == 3 + 6 * TINY.num_layers - 1


@pytest.mark.parametrize("factor", [None, 0.0, 1.0])
def test_without_a_factor_nothing_is_stretched(factor: float | None, tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        if factor is not None:
            writer.add_rope_scaling_factor(factor)

    assert config_of(tmp_path, add).rope_scaling is None


def test_a_sliding_window_limits_the_context(tmp_path: Path) -> None:
    config = config_of(tmp_path, lambda writer: writer.add_sliding_window(100))
    assert config.max_context_tokens == 100


def set_experts(writer: GGUFWriter) -> None:
    writer.add_expert_count(8)


def set_split(writer: GGUFWriter) -> None:
    writer.add_uint16("split.count", 3)


def set_partial_rope(writer: GGUFWriter) -> None:
    writer.add_rope_dimension_count(4)


def set_value_length(writer: GGUFWriter) -> None:
    writer.add_value_length(16)


def set_longrope(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.LONGROPE)


def set_attention_factor(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_attn_factors(1.5)


def set_both_scalings(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_factor(4.0)
    writer.add_tensor("rope_freqs.weight", np.ones(NUM_DIVISORS, np.float32))


def set_text_for_a_number(writer: GGUFWriter) -> None:
    writer.add_string("llama.rope.scale_linear", "four")


def set_too_few_divisors(writer: GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", np.ones(NUM_DIVISORS - 1, np.float32))


@pytest.mark.parametrize(
    ("add", "problem"),
    [
        (set_experts, "metadata llama.expert_count: mixtures of experts"),
        (set_split, "metadata split.count"),
        (set_partial_rope, "metadata llama.rope.dimension_count: must be the head size 8, is 4"),
        (set_value_length, "metadata llama.attention.value_length"),
        (set_longrope, "metadata llama.rope.scaling.type: 'longrope' isn't supported"),
        (set_attention_factor, "metadata llama.rope.scaling.attn_factor: only 1.0"),
        (set_both_scalings, "metadata llama.rope.scaling.type: rope_freqs.weight scales already"),
        (set_text_for_a_number, "metadata llama.rope.scale_linear must be of type float"),
        (set_too_few_divisors, "rope_scaling must have 4 divisors"),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_key(
    add: Add, problem: str, tmp_path: Path
) -> None:
    file = write(tmp_path, add)
    with pytest.raises(ModelLoadError) as caught:
        GgufFile(file)
    assert f"{caught.value}".startswith(f"{file}: {problem}")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, lambda _: None, architecture="mamba")
    with pytest.raises(ModelLoadError, match="architecture 'mamba' isn't supported, only llama"):
        GgufFile(file)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_embedding_length(32)
    finish(writer)
    with pytest.raises(ModelLoadError, match=r"metadata llama\.attention\.head_count is missing"):
        GgufFile(tmp_path / "m.gguf")


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(TINY, head_size=8)
    object.__setattr__(config, "num_kv_heads", 3)
    file = write_gguf(tmp_path / "m.gguf", {}, config=config)
    with pytest.raises(ModelLoadError, match="num_kv_heads must divide num_heads 4, got 3"):
        GgufFile(file)


def test_a_type_that_cannot_be_dequantised_names_the_tensor(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_up.scale", np.zeros((1, 4), np.int32))

    source = GgufFile(write(tmp_path, add))
    with pytest.raises(ModelLoadError, match="I32") as caught:
        source.read("model.layers.0.mlp.up_proj.scale")
    assert caught.value.tensor == "blk.0.ffn_up.scale"


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    file = tmp_path / "notes.gguf"
    file.write_text("not a model")
    with pytest.raises(ModelLoadError, match=r"notes\.gguf: can't be read as GGUF"):
        GgufFile(file)


def test_a_file_cut_short_names_the_first_tensor_that_lacks_bytes(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", random_tensors())
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ModelLoadError, match="bytes early") as caught:
        GgufFile(file)
    assert (caught.value.path, caught.value.tensor) == (file, "output_norm.weight")


def read_everything(file: Path) -> dict[str, Tensor]:
    source = GgufFile(file)
    source.tokenizer()
    return dict(assemble(source.config, source))


def test_wherever_a_file_is_cut_the_error_names_it(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", random_tensors()).read_bytes()
    file = tmp_path / "cut.gguf"
    for size in range(0, len(whole), len(whole) // 60):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError) as caught:
            read_everything(file)
        assert caught.value.path == file


def test_whatever_byte_is_wrong_the_file_is_read_or_named(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", random_tensors()).read_bytes()
    file = tmp_path / "broken.gguf"
    source = random.Random(5)
    named = []
    for _ in range(60):
        broken = bytearray(whole)
        # The header, keys and descriptions of tensors; weights may be any numbers.
        broken[source.randrange(9000)] ^= 1 << source.randrange(8)
        file.write_bytes(broken)
        try:
            read_everything(file)
        except ModelLoadError as error:
            named.append(error.path)
    assert named == [file] * len(named)
    assert 10 < len(named) < 50


def test_a_token_that_is_no_text_is_named_by_its_key(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", random_tensors())
    file.write_bytes(file.read_bytes().replace(b"hello", b"h\xffllo"))
    with pytest.raises(ModelLoadError, match=r"metadata tokenizer\.ggml\.tokens: 'utf-8'"):
        GgufFile(file).tokenizer()


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.norm.weight"][5] = math.nan
    source = GgufFile(write_gguf(tmp_path / "m.gguf", tensors))
    with pytest.raises(ModelLoadError, match="numbers that aren't finite") as caught:
        source.read("model.norm.weight")
    assert caught.value.tensor == "output_norm.weight"
