"""Every implementation of `Executor`, as one parametrised fixture."""

import dataclasses

import pytest

from tidegate_engine.executor.base import Executor
from tidegate_engine.executor.clock import VirtualClock
from tidegate_testing.devices import ON_CUDA
from tidegate_testing.executors import a_slow_executor, a_torch_executor
from tidegate_testing.lab import Lab
from tidegate_testing.models import TINY, one_torch_thread, smollm2, tiny_model

__all__ = ["one_torch_thread", "smollm2"]


@pytest.fixture
def clock() -> VirtualClock:
    """Time passes on it with simulated steps; real ones leave it alone."""
    return VirtualClock()


@pytest.fixture(
    params=[
        "simulated",
        "torch",
        pytest.param("torch-cuda", marks=ON_CUDA),
        pytest.param("smollm2", marks=pytest.mark.model),
        pytest.param("smollm2-cuda", marks=[pytest.mark.model, *ON_CUDA]),
    ]
)
def executor(request: pytest.FixtureRequest, clock: VirtualClock) -> Executor:
    name, _, device = request.param.partition("-")
    if name == "simulated":
        return a_slow_executor(clock)
    if name == "smollm2":
        return a_torch_executor(request.getfixturevalue("smollm2"), device or "cpu")
    # Tied, a random model mostly repeats its input.
    model = tiny_model(dataclasses.replace(TINY, has_tied_embeddings=False))
    return a_torch_executor(model, device or "cpu")


@pytest.fixture
def lab(executor: Executor, clock: VirtualClock) -> Lab:
    return Lab(executor, clock)
