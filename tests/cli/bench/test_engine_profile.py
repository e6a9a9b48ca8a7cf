import sys
from types import FrameType

import pytest

from tidegate_cli.bench.engine_profile import REST, ProfiledExecutor, part_of
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.torch_executor import TorchExecutor
from tidegate_engine.model.llama import Llama
from tidegate_testing.models import plan_row, tiny_model


def test_a_step_spends_its_time_on_what_models_are_made_of() -> None:
    model = tiny_model()
    cache = KvCache.allocate(model.config, num_blocks=64, block_size=16)
    executor = ProfiledExecutor(TorchExecutor(Llama(model.config, model.weights), cache))
    rows = tuple(
        plan_row([1] * 256, [*range(i * 16, i * 16 + 16)], request_id=str(i)) for i in range(4)
    )

    for step in range(1, 40):
        executor.execute(StepPlan(step=step, revision=1, rows=rows))

    shares = executor.shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert {"linear layers", "attention"} <= set(shares)
    assert shares.get(REST, 0.0) < 0.5


def test_what_the_engine_does_not_do_is_all_else() -> None:
    assert part_of(own_frame()) == REST


def own_frame() -> FrameType:
    return sys._getframe()
