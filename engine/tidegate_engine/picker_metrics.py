"""The series by which the endpoint picker of the Gateway API inference extension chooses an engine.

Their names, types and meaning are those of its model server protocol
(kubernetes-sigs/gateway-api-inference-extension, docs/proposals/003-model-server-protocol). The
picker takes them under the names below unless it is told of others. Adapters are not served, so
there is nothing to say of them.
"""

from collections.abc import Iterator

from tidegate_engine.core.request import SchedulerStats
from tidegate_engine.executor.base import Capacity
from tidegate_engine.text_format import Family


def picker_series(
    engine: SchedulerStats, capacity: Capacity, *, pool: str, model: str
) -> Iterator[Family]:
    """Yield the series of one engine.

    Args:
        engine: The scheduler now.
        capacity: KV memory of its executor.
        pool: `namespace/name`.
        model: As clients name it.
    """
    # What waits for its KV to come back from the host isn't served, so it queues.
    waiting = engine.waiting + engine.swapped
    used = engine.kv_used_blocks / engine.kv_blocks if engine.kv_blocks else 0.0
    for name, text, value in (
        ("num_requests_waiting", "Requests in the queue", waiting),
        ("num_requests_running", "Requests in the batch", engine.running),
        ("kv_cache_usage_perc", "Share of the KV blocks in use, from 0 to 1", used),
    ):
        gauge = Family(f"vllm:{name}", "gauge", text, ("pool", "model_name"))
        gauge.add((pool, model), value)
        yield gauge
    config = Family(
        "vllm:cache_config_info",
        "gauge",
        "Tokens in a KV block and KV blocks on the device, as labels",
        ("pool", "model_name", "block_size", "num_gpu_blocks"),
    )
    sizes = (str(capacity.block_size), str(capacity.num_blocks))
    config.add((pool, model, *sizes), 1)
    yield config
