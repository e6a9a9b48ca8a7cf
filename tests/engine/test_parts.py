import base64
import os
import subprocess
import sys

import pytest

from tidegate_engine.executor.hardware import H100_80G, LLAMA_3_1_8B, fitting_capacity
from tidegate_engine.executor.step_cost import Roofline
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.parts import Parts, load_parts
from tidegate_engine.settings import Settings

# OpenMP's library tells what it found in the environment when it was loaded.
LOADING = """
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.parts import load_parts
from tidegate_engine.settings import Settings

try:
    load_parts(Settings(pool="a/b", redis_url="redis://x", verify_key="A" * 43 + "=",
                        model="/nowhere", threads=1), created=0)
except ModelLoadError:
    pass
"""


def simulated(**settings: object) -> Parts:
    """Load a simulated engine."""
    fields: dict[str, object] = {
        "pool": "serving/main",
        "redis_url": "redis://127.0.0.1",
        "verify_key": base64.b64encode(bytes(32)).decode(),
        "executor": "simulated",
        **settings,
    }
    return load_parts(Settings(**fields), created=0)  # type: ignore[arg-type]


def test_simulated_steps_take_what_the_settings_say() -> None:
    parts = simulated(simulated_step_seconds=0.5, simulated_decode_seconds=0.25)
    costs = parts.executor.measure()
    assert (costs.step_seconds, costs.decode_seconds) == (0.5, 0.25)
    assert costs.prefill_token_seconds == 0.0001


def test_the_host_has_half_as_many_blocks_unless_told_otherwise() -> None:
    capacity = simulated(kv_blocks=99, block_size=8).executor.capacity
    assert (capacity.num_blocks, capacity.num_host_blocks) == (99, 49)
    assert capacity.block_size == 8
    for count in (0, 7):
        capacity = simulated(kv_blocks=99, host_kv_blocks=count).executor.capacity
        assert capacity.num_host_blocks == count


def test_a_named_gpu_sets_costs_and_kv_memory() -> None:
    parts = simulated(simulated_gpu="H100-80G")
    fitting = fitting_capacity(H100_80G, LLAMA_3_1_8B)
    assert parts.executor.capacity.num_blocks == fitting.num_blocks
    assert parts.executor.capacity.num_host_blocks == fitting.num_blocks // 2
    assert parts.executor.measure() == Roofline(gpu=H100_80G, model=LLAMA_3_1_8B).costs
    assert parts.costs == parts.executor.measure()
    assert dict(parts.summary)["model"] == (
        "simulated, tokens of bytes, as fast as Llama-3.1-8B on H100-80G"
    )


def test_kv_memory_that_was_set_stays() -> None:
    parts = simulated(simulated_gpu="H200", simulated_model="Qwen3-0.6B", kv_blocks=1024)
    assert parts.executor.capacity.num_blocks == 1024


def test_a_model_too_large_for_its_gpu_cannot_be_loaded() -> None:
    with pytest.raises(ModelLoadError, match="8B on CPU-2-cores: weights take"):
        simulated(simulated_gpu="CPU-2-cores")


@pytest.mark.parametrize(
    ("environment", "spins"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
)
def test_threads_that_wait_spin_briefly_unless_told_otherwise(
    environment: dict[str, str], spins: str
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOADING],
        env={"PATH": os.environ["PATH"], "OMP_DISPLAY_ENV": "verbose", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in run.stderr:
        pytest.skip("PyTorch runs on another OpenMP library than GNU's")
    assert f"GOMP_SPINCOUNT = '{spins}'" in run.stderr
