import dataclasses
import sys
from types import FrameType

import pytest

from tidegate_cli.bench.engine_profile import REST, ProfiledExecutor, part_of
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.torch_executor import TorchExecutor
from tidegate_engine.model.llama import Llama
from tidegate_testing.models import TINY, plan_row, tiny_model


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


def test_every_product_with_weights_is_a_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    product = pytest.importorskip("tidegate_engine.model.cpu_product").PanelLinear
    multiply_into, parts = product.multiply_into, []

    def watched(*arguments: object) -> None:
        parts.append(part_of(sys._getframe(1)))
        multiply_into(*arguments)

    monkeypatch.setattr(product, "multiply_into", watched)
    config = dataclasses.replace(
        TINY, hidden_size=64, head_size=32, intermediate_size=96, vocab_size=288
    )
    model = tiny_model(config)
    llama = Llama(config, model.weights)
    if not llama.has_kernels(16):
        pytest.skip("no kernels on this processor")
    executor = TorchExecutor(llama, KvCache.allocate(config, num_blocks=4, block_size=16))
    executor.execute(StepPlan(step=1, revision=1, rows=(plan_row([1, 2], [0]),)))
    assert parts == ["linear layers"] * (4 * config.num_layers + 1)


def test_what_the_engine_does_not_do_is_all_else() -> None:
    assert part_of(own_frame()) == REST


def own_frame() -> FrameType:
    return sys._getframe()
