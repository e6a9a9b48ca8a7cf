import dataclasses

import pytest

from tidegate_engine.executor.hardware import (
    A100_80G,
    CPU_2_CORES,
    GPUS,
    H100_80G,
    H200,
    LLAMA_3_1_8B,
    LLAMA_3_1_70B_TP8,
    MODELS,
    QWEN3_0_6B,
    SMOLLM2_135M,
    ModelShape,
    ModelTooLargeError,
    fitting_capacity,
)
from tidegate_testing.executors import a_torch_executor
from tidegate_testing.models import TINY, tiny_model

FEED_FORWARD = {
    "Llama-3.1-8B": 14336,
    "Llama-3.1-70B-TP8": 28672,
    "Qwen3-0.6B": 3072,
    "SmolLM2-135M": 1536,
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_number_of_parameters_is_that_of_the_shape(model: ModelShape) -> None:
    queries = model.num_heads * model.head_size
    keys = model.num_kv_heads * model.head_size
    layer = 2 * model.hidden_size * (queries + keys + 1)
    layer += 3 * model.hidden_size * FEED_FORWARD[model.name]
    if model is QWEN3_0_6B:
        layer += 2 * model.head_size  # it normalises queries and keys
    assert model.body_parameters == model.num_layers * layer + model.hidden_size


def test_a_token_takes_as_much_kv_as_in_a_real_pool() -> None:
    model = tiny_model()
    executor = a_torch_executor(model)
    shape = dataclasses.replace(
        SMOLLM2_135M,
        num_layers=TINY.num_layers,
        num_kv_heads=TINY.num_kv_heads,
        head_size=TINY.head_size,
    )
    block = executor._kv_cache.pool[0]
    assert shape.kv_token_bytes * executor.capacity.block_size == block.nbytes


def test_what_fits_is_what_the_weights_leave() -> None:
    # 72 GB of 80 are usable, 16.06 are weights; a block of 16 tokens takes 2 MiB.
    capacity = fitting_capacity(H100_80G, LLAMA_3_1_8B)
    assert capacity.num_blocks == int((72e9 - 2 * 8_030_261_248) / 2**21)
    assert (capacity.num_host_blocks, capacity.block_size) == (0, 16)
    assert fitting_capacity(H200, LLAMA_3_1_8B).num_blocks > 1.9 * capacity.num_blocks
    smaller = fitting_capacity(H100_80G, LLAMA_3_1_8B, block_size=8)
    assert smaller.num_blocks // 2 == capacity.num_blocks


def test_host_memory_holds_the_parts_of_all_gpus() -> None:
    for model in (LLAMA_3_1_8B, LLAMA_3_1_70B_TP8):
        whole = 2 * model.num_layers * model.num_kv_heads * model.head_size * 2 * 16
        capacity = fitting_capacity(A100_80G, model, host_bytes=10.5 * whole)
        assert capacity.num_host_blocks == 10


def test_kv_heads_are_repeated_where_gpus_are_more() -> None:
    sixteen = dataclasses.replace(LLAMA_3_1_70B_TP8, tensor_parallel=16)
    assert sixteen.kv_token_bytes == LLAMA_3_1_70B_TP8.kv_token_bytes == 80 * 2 * 128 * 2


def test_a_model_that_does_not_fit_names_itself_the_gpu_and_both_sizes() -> None:
    alone = dataclasses.replace(LLAMA_3_1_70B_TP8, name="70B", tensor_parallel=1)
    with pytest.raises(ModelTooLargeError, match=r"70B on H200: .*141.1 GB.* 126.9 GB") as caught:
        fitting_capacity(H200, alone)
    assert (caught.value.model, caught.value.gpu) == ("70B", "H200")


def test_every_name_finds_its_own() -> None:
    assert GPUS["CPU-2-cores"] is CPU_2_CORES
    assert all(gpu.name == name for name, gpu in GPUS.items())
    assert all(model.name == name for name, model in MODELS.items())
