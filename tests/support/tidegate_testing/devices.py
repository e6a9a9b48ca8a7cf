"""The devices that a test runs on: a CPU always, CUDA where there is one."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tidegate_engine.model.loader import LoadedModel

ON_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)
"""Marks of what runs on CUDA alone."""

DEVICES = ("cpu", pytest.param("cuda", marks=ON_CUDA))
"""Parameters of a test that runs on each device."""


def moved(model: LoadedModel, device: str) -> LoadedModel:
    """Return a model with its weights on another device."""
    return dataclasses.replace(model, weights=_moved(model.weights, device))


def _moved(value: Any, device: str) -> Any:  # noqa: ANN401 - whatever a model is made of
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(each, device) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(
            value, **{name: _moved(getattr(value, name), device) for name in names}
        )
    return value
