import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.hf_directory import HfDirectory
from tidegate_engine.model.rope_scaling import linear, llama3, yarn
from tidegate_testing.model_files import shard, write_hf_directory, write_json
from tidegate_testing.models import CHAT_TEMPLATE, TINY, random_tensors

CHAT = [{"role": "user", "content": "hello"}]
LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NORM = "model.norm.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_hf_directory(tmp_path / "hf", random_tensors())


def edit(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    write_json(path, {**content, **fields})


def config_with(directory: Path, **fields: Any) -> LlamaConfig:
    edit(directory / "config.json", **fields)
    return HfDirectory(directory).config


def test_positions_may_be_stretched_under_old_names_and_new(directory: Path) -> None:
    expected = linear(4.0, head_size=TINY.head_size)
    for fields in (
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4}},
        {
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
        },
    ):
        config = config_with(directory, **fields)
        assert config.rope_scaling == expected
        assert config.max_context_tokens == TINY.max_context_tokens


def test_llama_3_is_stretched_from_the_context_it_was_trained_for(directory: Path) -> None:
    scaling = {"rope_type": "llama3", **LLAMA_3, "original_max_position_embeddings": 64}
    config = config_with(directory, rope_scaling=scaling)
    assert config.rope_scaling == llama3(
        **LLAMA_3,
        original_context_tokens=64,
        rope_theta=TINY.rope_theta,
        head_size=TINY.head_size,
    )


def test_yarn_serves_the_stretched_context(directory: Path) -> None:
    config = config_with(directory, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert config.max_context_tokens == 4 * TINY.max_context_tokens
    assert config.rope_scaling == yarn(
        4.0,
        original_context_tokens=TINY.max_context_tokens,
        rope_theta=TINY.rope_theta,
        head_size=TINY.head_size,
    )


def test_a_frequency_base_may_stand_beside_the_scaling(directory: Path) -> None:
    assert config_with(directory, rope_theta=5e5).rope_theta == 5e5
    assert config_with(directory, rope_parameters={"rope_theta": 1e6}).rope_theta == 1e6


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({"model_type": "mistral", "sliding_window": 100}, 100),
        ({"model_type": "mistral", "sliding_window": None}, 512),
        ({"model_type": "mistral", "sliding_window": 4096}, 512),
        ({"model_type": "qwen2", "sliding_window": 100}, 512),
        ({"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": True}, 512),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 100,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            100,
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 100,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            100,
        ),
    ],
)
def test_a_window_that_binds_limits_the_context(
    directory: Path, fields: dict[str, Any], context: int
) -> None:
    assert config_with(directory, **fields).max_context_tokens == context


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model_type": "mamba"}, "architecture 'mamba' isn't supported, only llama, mistral"),
        ({"model_type": None}, "architecture None isn't supported"),
        ({"hidden_size": "32"}, "hidden_size: Input should be a valid integer, got '32'"),
        ({"hidden_size": 0}, "hidden_size: Input should be greater than 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps: Input should be a valid number"),
        ({"num_key_value_heads": 3}, "num_kv_heads must divide"),
        ({"head_dim": 7}, "head_size must be even"),
        ({"hidden_act": "gelu"}, "hidden_act: Input should be 'silu' or 'swish', got 'gelu'"),
        ({"attention_bias": True}, "attention_bias: Input should be False, got True"),
        ({"mlp_bias": True}, "mlp_bias: Input should be False"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: Input should be greater than"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: Input should be"),
        ({"layer_types": ["linear_attention"]}, "layer_types.0: Input should be 'full_attention'"),
        ({"rope_scaling": {"type": "dynamic"}}, "RoPE scaling 'dynamic' isn't supported, only"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE scaling 'longrope' isn't supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "RoPE scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "RoPE scaling: factor: Input should"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}},
            "RoPE scaling: mscale isn't supported",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA_3, "high_freq_factor": 1.0}},
            "high_freq_factor must be above low_freq_factor",
        ),
        ({"rope_parameters": {"mrope_section": [1]}}, "RoPE scaling: mrope_section isn't"),
    ],
)
def test_what_is_broken_or_not_implemented_is_refused_by_its_field(
    directory: Path, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        config_with(directory, **fields)
    path = directory / "config.json"
    assert caught.value.path == path
    assert f"{caught.value}".startswith(f"{path}: {problem}")


def test_a_missing_field_is_named(directory: Path) -> None:
    content = json.loads((directory / "config.json").read_text())
    del content["intermediate_size"]
    write_json(directory / "config.json", content)
    with pytest.raises(ModelLoadError, match=r"config\.json: intermediate_size is missing"):
        HfDirectory(directory)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_directory_without_a_file_names_it(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(ModelLoadError, match=r"is missing|can't be read") as caught:
        HfDirectory(directory).tokenizer()
    assert caught.value.path == directory / name


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "model.safetensors",
    ],
)
@pytest.mark.parametrize("content", [b'{"half": ', b"[]", b"\xff\xfe", b""])
def test_a_broken_file_is_named(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        HfDirectory(directory).tokenizer()
    assert caught.value.path == directory / name


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"weight_map": None}, "weight_map must map"),
        ({"weight_map": {NORM: 5}}, "weight_map must map"),
    ],
)
def test_a_broken_index_is_named(directory: Path, fields: dict[str, Any], problem: str) -> None:
    index = shard(directory)
    edit(index, **fields)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        HfDirectory(directory)
    assert caught.value.path == index


def test_a_missing_shard_is_named(directory: Path) -> None:
    shard(directory)
    missing = directory / "model-00002-of-00002.safetensors"
    missing.unlink()
    with pytest.raises(ModelLoadError, match="is missing") as caught:
        HfDirectory(directory)
    assert caught.value.path == missing


def test_a_shard_without_a_tensor_that_the_index_promises_is_named(directory: Path) -> None:
    index = shard(directory)
    weight_map = json.loads(index.read_text())["weight_map"]
    file = directory / weight_map[NORM]
    tensors = load_file(file)
    del tensors[NORM]
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=r"is missing, though model\.safet") as caught:
        HfDirectory(directory)
    assert (caught.value.path, caught.value.tensor) == (file, NORM)


def test_a_tensor_of_no_shard_is_looked_for_in_the_index(directory: Path) -> None:
    index = shard(directory)
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map[NORM]
    edit(index, weight_map=weight_map)
    with pytest.raises(ModelLoadError, match="is missing") as caught:
        HfDirectory(directory).read(NORM)
    assert (caught.value.path, caught.value.tensor) == (index, NORM)


def test_a_file_cut_short_names_the_first_tensor_that_lacks_bytes(directory: Path) -> None:
    file = directory / "model.safetensors"
    os.truncate(file, file.stat().st_size - 40)
    with pytest.raises(ModelLoadError, match="the file ends 40 bytes early") as caught:
        HfDirectory(directory)
    assert (caught.value.path, caught.value.tensor) == (file, NORM)


@pytest.mark.parametrize("size", [0, 5, 8, 100])
def test_a_file_cut_inside_its_header_is_named(directory: Path, size: int) -> None:
    os.truncate(directory / "model.safetensors", size)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: can't be read as safetensors"):
        HfDirectory(directory)


def test_numbers_of_another_kind_name_the_tensor(directory: Path) -> None:
    file = directory / "model.safetensors"
    save_file({**random_tensors(), NORM: torch.ones(32, dtype=torch.int8)}, file)
    with pytest.raises(ModelLoadError, match="is stored as int8, only float32") as caught:
        HfDirectory(directory).read(NORM)
    assert (caught.value.path, caught.value.tensor) == (file, NORM)


def test_frequencies_and_a_tied_output_that_old_files_store_are_left_aside(tmp_path: Path) -> None:
    stored = {
        "lm_head.weight": torch.ones(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        NORM: torch.ones(32),
    }
    directory = write_hf_directory(tmp_path / "hf", stored)
    assert HfDirectory(directory).unread() == [(directory / "model.safetensors", NORM)]


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (0, None, {0, 2}),
        ([0, 5], None, {0, 2, 5}),
        (0, {"eos_token_id": [7, 8], "temperature": 0.6}, {2, 7, 8}),
        (0, {"temperature": 0.6}, {0, 2}),
        (None, None, {2}),
    ],
)
def test_answers_end_where_the_generation_settings_say_or_else_the_model_s(
    directory: Path, config: object, generation: dict[str, Any] | None, expected: set[int]
) -> None:
    edit(directory / "config.json", eos_token_id=config)
    if generation is not None:
        write_json(directory / "generation_config.json", generation)
    assert HfDirectory(directory).tokenizer().eos_token_ids == expected


def test_an_end_that_is_no_token_id_is_named(directory: Path) -> None:
    write_json(directory / "generation_config.json", {"eos_token_id": "</s>"})
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id"):
        HfDirectory(directory)


def rendered(directory: Path) -> str:
    return HfDirectory(directory).tokenizer().render_chat(CHAT)


def test_a_chat_template_may_be_a_file_or_one_of_several(directory: Path) -> None:
    settings = directory / "tokenizer_config.json"
    own = rendered(directory)
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": CHAT_TEMPLATE}]
    edit(settings, chat_template=named)
    assert rendered(directory) == own
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}, {{ eos_token }}")
    assert rendered(directory) == "hello, <|im_end|>"


def test_special_tokens_may_stand_in_a_file_of_their_own(directory: Path) -> None:
    write_json(directory / "tokenizer_config.json", {"chat_template": "{{ bos_token }}"})
    write_json(directory / "special_tokens_map.json", {"bos_token": {"content": "<|im_start|>"}})
    assert rendered(directory) == "<|im_start|>"


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template must be text, got 5"),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}, "the chat template isn't valid"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token must be a token's text, got 5"),
        (
            "tokenizer_config.json",
            {"bos_token": "<none>", "add_bos_token": True},
            "'<none>' isn't in the vocabulary",
        ),
    ],
)
def test_broken_settings_of_the_tokenizer_are_named(
    directory: Path, name: str, fields: dict[str, Any], problem: str
) -> None:
    edit(directory / name, **fields)
    with pytest.raises(ModelLoadError, match=problem) as caught:
        HfDirectory(directory).tokenizer()
    assert caught.value.path == directory / name


def change_backend(directory: Path, change: Callable[[Backend], None]) -> None:
    path = directory / "tokenizer.json"
    backend = Backend.from_file(str(path))
    change(backend)
    backend.save(str(path))


def test_settings_decide_whether_prompts_begin_with_a_token(directory: Path) -> None:
    def begin(backend: Backend) -> None:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )

    def first() -> int:
        return HfDirectory(directory).tokenizer().encode("hello")[0]

    change_backend(directory, begin)
    assert first() == 0
    edit(directory / "tokenizer_config.json", bos_token="<|im_start|>", add_bos_token=True)
    assert first() == 1
    edit(directory / "tokenizer_config.json", add_bos_token=False)
    assert first() > 2


def test_prompts_are_not_cut_or_filled_as_in_training(directory: Path) -> None:
    def limit(backend: Backend) -> None:
        backend.enable_truncation(4)
        backend.enable_padding(length=6)

    change_backend(directory, limit)
    tokenizer = HfDirectory(directory).tokenizer()
    assert len(tokenizer.encode("hello" * 10)) == 10
    assert len(tokenizer.encode("hello")) == 1


def test_a_tokenizer_whose_tokens_are_not_bytes_is_refused(directory: Path) -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(directory / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match="decoded by WordPiece aren't supported") as caught:
        HfDirectory(directory).tokenizer()
    assert caught.value.path == directory / "tokenizer.json"
