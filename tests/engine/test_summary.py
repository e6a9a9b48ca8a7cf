import base64

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.executor.base import Capacity
from tidegate_engine.settings import Settings
from tidegate_engine.start_errors import size_text
from tidegate_engine.summary import aligned, describe_costs, start_summary

SETTINGS = Settings(
    pool="serving/main",
    pod_name="engine-0",
    redis_url="redis://127.0.0.1",
    verify_key=base64.b64encode(bytes(32)).decode(),
    model="/models/Tiny",
    max_num_seqs=4,
    max_batched_tokens=64,
    max_waiting=10,
)
COSTS = ExecutorCosts(
    step_seconds=0.0123456,
    prefill_token_seconds=0.001,
    decode_seconds=0.0005,
    context_token_seconds=0.000002,
    prefill_pair_seconds=0.00000025,
    swap_block_seconds=0.00001,
)


def test_an_operator_reads_what_is_served_from_what_within_which_limits_at_what_cost() -> None:
    summary = start_summary(
        SETTINGS,
        (("model", "a tiny one"), ("memory", "little")),
        COSTS,
        Capacity(num_blocks=10, num_host_blocks=5, block_size=16),
        url="http://127.0.0.1:8000",
        seconds=1.26,
    )
    assert aligned(summary) == [
        "serving   Tiny at http://127.0.0.1:8000, started in 1.3 s",
        "identity  pool serving/main, pod engine-0",
        "model     a tiny one",
        "memory    little",
        "limits    160 tokens in KV blocks, 4 requests and 64 tokens a step, 10 waiting;"
        " continuous batching",
        f"costs     {describe_costs(COSTS)}",
    ]


def test_costs_are_told_in_milliseconds() -> None:
    assert describe_costs(COSTS) == (
        "a step 12.3 ms, and for each prompt token 1 ms, decode 0.5 ms, 1000 tokens of context"
        " 2 ms, 1000 pairs of prompt tokens 0.25 ms; a KV block to or from the host 0.01 ms"
    )


def test_sizes_are_told_in_units_that_fit() -> None:
    texts = [size_text(size) for size in (0, 700 << 10, 513 << 20, 3 << 30, 12 << 30)]
    assert texts == ["0 MiB", "0.68 MiB", "513 MiB", "3072 MiB", "12.0 GiB"]
