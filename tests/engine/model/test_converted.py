import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from torch import Tensor

from tidegate_engine.model.converted import ConvertedModel
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.weights import assemble
from tidegate_testing.model_files import write_gguf
from tidegate_testing.models import TINY, TensorTable, random_tensors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", random_tensors(), kind=GGMLQuantizationType.F32)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def convert(source: Path, cache: Path, dtype: torch.dtype = torch.float32) -> ConvertedModel:
    return ConvertedModel(source, cache, dtype)


def directories(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def is_model(tensors: dict[str, Tensor], seed: int = 0) -> bool:
    expected = dict(assemble(TINY, TensorTable(random_tensors(seed=seed))))
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], expected[name]) for name in expected
    )


def test_what_was_converted_is_what_is_read(source: Path, cache: Path) -> None:
    assert is_model(dict(convert(source, cache).tensors()))
    assert is_model(dict(convert(source, cache).tensors()))


def test_a_file_is_converted_once(source: Path, cache: Path) -> None:
    def stats() -> list[tuple[int, int]]:
        files = sorted(convert(source, cache).path.iterdir())
        return [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files]

    assert stats() == stats()


def test_every_dtype_has_its_own_conversion(source: Path, cache: Path) -> None:
    exact = dict(convert(source, cache).tensors())
    rounded = dict(convert(source, cache, torch.bfloat16).tensors())
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)
    assert len(directories(cache)) == 2


def test_a_file_with_other_content_is_converted_anew(source: Path, cache: Path) -> None:
    first = convert(source, cache).path
    write_gguf(source, random_tensors(seed=1), kind=GGMLQuantizationType.F32)
    assert is_model(dict(convert(source, cache).tensors()), seed=1)
    assert first.is_dir()


def test_the_same_file_elsewhere_is_not_converted_again(
    source: Path, cache: Path, tmp_path: Path
) -> None:
    first = convert(source, cache).path
    assert convert(source.rename(tmp_path / "moved.gguf"), cache).path == first


def test_stretched_positions_survive(tmp_path: Path, cache: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)

    source = write_gguf(tmp_path / "yarn.gguf", random_tensors(), add=add)
    first, second = (convert(source, cache).config for _ in range(2))
    assert first == second
    assert first.rope_scaling is not None
    assert first.rope_scaling.attention_factor == pytest.approx(1.138629)


def test_what_a_killed_conversion_left_is_replaced(source: Path, cache: Path) -> None:
    directory = convert(source, cache).path
    os.truncate(directory / "layers.1.safetensors", 100)
    part = directory.with_name(f"{directory.name}.part")
    part.mkdir()
    (part / "embedding.safetensors").write_bytes(b"half")
    assert is_model(dict(convert(source, cache).tensors()))
    assert not part.exists()


def test_two_engines_that_start_together_convert_once(source: Path, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        models = [*pool.map(lambda _: dict(convert(source, cache).tensors()), range(2))]
    assert all(map(is_model, models))
    # A second conversion would have taken the files away from under the first one's mapping.
    mapped = [m for m in Path("/proc/self/maps").read_text().splitlines() if str(cache) in m]
    assert mapped
    assert not [mapping for mapping in mapped if mapping.endswith("(deleted)")]


def test_a_conversion_that_fails_leaves_nothing_that_is_taken_for_one(
    tmp_path: Path, cache: Path
) -> None:
    tensors = random_tensors()
    del tensors["model.norm.weight"]
    broken = write_gguf(tmp_path / "broken.gguf", tensors)
    for _ in range(2):
        with pytest.raises(ModelLoadError, match=r"output_norm\.weight: is missing"):
            convert(broken, cache)


@pytest.mark.parametrize("content", ["{}", "[]", "no json", '{"llama": {"num_layers": 1}}'])
def test_a_broken_configuration_beside_sound_weights_is_made_anew(
    source: Path, cache: Path, content: str
) -> None:
    directory = convert(source, cache).path
    (directory / "config.json").write_text(content)
    config = convert(source, cache).config
    assert dataclasses.replace(config, rms_norm_epsilon=1e-5) == TINY
