"""Every implementation of `Executor`, as one parametrised fixture."""

import dataclasses

import pytest

from tidegate_engine.executor.base import Executor
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.torch_executor import TorchExecutor
from tidegate_engine.model.loader import LoadedModel
from tidegate_testing.models import TINY, one_torch_thread, smollm2, tiny_model
from tidegate_testing.scheduling import a_simulated_executor

__all__ = ["one_torch_thread", "smollm2"]


@pytest.fixture(params=["simulated", "torch", pytest.param("smollm2", marks=pytest.mark.model)])
def executor(request: pytest.FixtureRequest) -> Executor:
    if request.param == "simulated":
        return a_simulated_executor()
    if request.param == "smollm2":
        return a_torch_executor(request.getfixturevalue("smollm2"))
    # Tied, a random model mostly repeats its input.
    return a_torch_executor(tiny_model(dataclasses.replace(TINY, has_tied_embeddings=False)))


def a_torch_executor(model: LoadedModel) -> TorchExecutor:
    return TorchExecutor(model, KvCache.allocate(model.config, num_blocks=64, block_size=4))
