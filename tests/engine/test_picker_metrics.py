"""The Gateway API inference extension's model server protocol, as it is published.

kubernetes-sigs/gateway-api-inference-extension, docs/proposals/003-model-server-protocol/README.md:
the table of metrics, with the names under which vLLM has them and that the picker looks for first.
"""

from prometheus_client.parser import text_string_to_metric_families

from tidegate_testing.engines import (
    BLOCK_SIZE,
    MODEL,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
)
from tidegate_testing.policies import a_snapshot

PROTOCOL = {
    "TotalQueuedRequests": ("vllm:num_requests_waiting", "gauge"),
    "TotalRunningRequests": ("vllm:num_requests_running", "gauge"),
    "KVCacheUtilization": ("vllm:kv_cache_usage_perc", "gauge"),
    "BlockSize": ("vllm:cache_config_info", "gauge"),
    "NumGPUBlocks": ("vllm:cache_config_info", "gauge"),
}
BLOCK_SIZE_LABEL = "block_size"
NUM_GPU_BLOCKS_LABEL = "num_gpu_blocks"


def as_the_picker_sees(engine: RunningEngine) -> dict[str, tuple[str, float, dict[str, str]]]:
    """Scrape as it does: type, value and labels of the one series of each name."""
    families = {
        f.name: f for f in text_string_to_metric_families(engine.http().get("/metrics").text)
    }
    found = {}
    for metric, (name, _) in PROTOCOL.items():
        (sample,) = families[name].samples
        found[metric] = (families[name].type, sample.value, sample.labels)
    return found


def test_an_idle_engine_has_every_metric_of_the_protocol() -> None:
    with a_running_engine(blocks=128) as engine:
        seen = as_the_picker_sees(engine)
    for metric, (_, kind) in PROTOCOL.items():
        assert seen[metric][0] == kind, metric
    for metric in ("TotalQueuedRequests", "TotalRunningRequests", "KVCacheUtilization"):
        assert seen[metric][1] == 0
        assert seen[metric][2]["model_name"] == MODEL
    assert seen["BlockSize"][2][BLOCK_SIZE_LABEL] == str(BLOCK_SIZE)
    assert seen["NumGPUBlocks"][2][NUM_GPU_BLOCKS_LABEL] == "128"


def test_the_picker_sees_what_queues_what_runs_and_how_full_the_kv_is() -> None:
    policy = a_snapshot(a_keyed_tenant("acme"))
    with a_running_engine(policy, blocks=64, max_num_seqs=2, step_seconds=0.002) as engine:
        stream = engine.openai().completions.create(
            model=MODEL, prompt="x" * 300, max_tokens=300, stream=True, n=3
        )
        next(iter(stream))
        seen = as_the_picker_sees(engine)
        stream.close()
    assert seen["TotalRunningRequests"][1] == 2
    assert seen["TotalQueuedRequests"][1] == 1
    # The prefix is held once, and each of the two has tokens of its own.
    assert 300 // BLOCK_SIZE / 64 < seen["KVCacheUtilization"][1] <= 1
