"""Real models from settings: what is loaded, chosen and refused."""

import base64
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tidegate_engine import torch_parts
from tidegate_engine.kv_sizing import KvBlocks, KvMemory, size_kv
from tidegate_engine.machine import Machine
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import LoadedModel, load_model
from tidegate_engine.settings import Settings
from tidegate_engine.start_errors import DeviceError, KvMemoryError
from tidegate_engine.torch_parts import TorchParts, load_torch
from tidegate_testing.model_files import write_gguf, write_hf_directory
from tidegate_testing.models import model_cache_dir, random_tensors, tiny_model

A_LOT = 10**12


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf_directory(tmp_path / "tiny", random_tensors())


def load(model: Path, **settings: object) -> TorchParts:
    fields: dict[str, object] = {
        "pool": "serving/main",
        "redis_url": "redis://127.0.0.1",
        "verify_key": base64.b64encode(bytes(32)).decode(),
        "model": str(model),
        "cache_dir": model_cache_dir(),
        "threads": 1,
        **settings,
    }
    return load_torch(Settings(**fields))  # type: ignore[arg-type]


def test_what_is_set_is_what_there_is(model: Path) -> None:
    parts = load(model, kv_blocks=40, host_kv_blocks=7, block_size=8, dtype="bfloat16")
    capacity = parts.executor.capacity
    assert (capacity.num_blocks, capacity.num_host_blocks) == (40, 7)
    assert capacity.block_size == 8
    assert torch.get_num_threads() == 1
    summary = dict(parts.summary)
    assert summary["model"].startswith(f"{model}, 0 M parameters: 2 layers of 32, 4 heads over 2")
    assert summary["computing"] == "bfloat16, quantization none, cpu, PyTorch, 1 thread"
    assert "; 40 KV blocks of 8 tokens, " in summary["memory"]


def test_what_is_left_to_the_engine_is_chosen_by_figures_that_it_tells(model: Path) -> None:
    parts = load(model, dtype="auto", threads="auto", kv_blocks="auto", max_num_seqs=3)
    computing = dict(parts.summary)["computing"]
    assert "(a typical step: float32 " in computing
    assert ", bfloat16 " in computing
    # A context of 512 tokens is 32 blocks, and three requests may run.
    assert parts.executor.capacity.num_blocks == 3 * 32
    assert parts.executor.capacity.num_host_blocks == 3 * 16
    assert parts.costs.step_seconds + parts.costs.decode_seconds > 0


@pytest.mark.parametrize("field", ["kv_blocks", "host_kv_blocks"])
def test_blocks_that_no_memory_holds_are_refused_with_its_size(model: Path, field: str) -> None:
    settings = {"kv_blocks": 8, "host_kv_blocks": 8, field: A_LOT}
    with pytest.raises(
        KvMemoryError, match=f"^TIDEGATE_{field.upper()}: {A_LOT} blocks of .* take"
    ) as caught:
        load(model, **settings)
    assert caught.value.needed_bytes > caught.value.limit_bytes > 0


def test_weights_are_quantised_where_that_is_asked_for(model: Path) -> None:
    parts = load(model, quantization="int8", kv_blocks=40)
    summary = dict(parts.summary)
    assert summary["computing"] == "float32, quantization int8, cpu, PyTorch, 1 thread"
    whole = dict(load(model, kv_blocks=40).summary)["memory"]
    assert summary["memory"].partition(";")[0] != whole.partition(";")[0]


def test_kv_is_sized_when_the_weights_are_quantised_and_what_was_loaded_is_gone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[weakref.ref[Tensor]] = []
    host_bytes: list[int] = []

    def load_watched(*arguments: Any) -> LoadedModel:
        whole = load_model(*arguments)
        loaded.extend(weakref.ref(layer.gate_up) for layer in whole.weights.layers)
        return whole

    def size_watched(memory: KvMemory, **asked: Any) -> KvBlocks:
        assert [reference() for reference in loaded] == [None, None]
        host_bytes.append(memory.host_bytes)
        return size_kv(memory, **asked)

    monkeypatch.setattr(torch_parts, "load_model", load_watched)
    monkeypatch.setattr(torch_parts, "size_kv", size_watched)
    load(model, quantization="int8")
    tiny = tiny_model()
    llama = Llama(tiny.config, tiny.weights, quantization="int8")
    assert host_bytes == [Machine.of_this_process().memory_bytes - llama.weight_bytes]


def test_a_device_that_is_not_there_is_named(model: Path) -> None:
    with pytest.raises(DeviceError, match="TIDEGATE_DEVICE: cuda:99 isn't there: PyTorch finds "):
        load(model, device="cuda:99")


def test_models_that_are_missing_or_cut_short_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"none\.gguf: there is no such file"):
        load(tmp_path / "none.gguf")
    path = write_gguf(tmp_path / "tiny.gguf", random_tensors())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError) as caught:
        load(path, cache_dir=tmp_path / "cache")
    assert caught.value.path == path
