"""Where the KV of a request is when it is cancelled: swapped out, or on its way."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tidegate_policies.rules import PreemptionMode, PreemptionRule
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    MODEL,
    RunningEngine,
    StepGate,
    a_keyed_tenant,
    a_paced_executor,
    a_running_engine,
)
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_completion, a_raw_request, connect, read_events

PROMPT = "x" * 320
BLOCKS = 20
"""Of that prompt; a few more are soon in use."""


@contextmanager
def one_place(swap_block_seconds: float, *, blocks: int = 4096) -> Iterator[RunningEngine]:
    """An engine in which gold takes batch's only place; batch's KV goes to the host meanwhile."""
    swaps = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=0)
    policy = a_snapshot(
        a_keyed_tenant("batch", tier="low", preemption=swaps),
        a_keyed_tenant("gold", tier="high"),
        tiers={"high": 10, "low": 0},
    )
    gate = StepGate()
    executor = a_paced_executor(
        gate,
        blocks=blocks,
        host_blocks=1024,
        step_seconds=0.002,
        swap_block_seconds=swap_block_seconds,
    )
    with a_running_engine(policy, executor=executor, max_num_seqs=1) as engine:
        engine.gate = gate
        try:
            yield engine
        finally:
            gate.open()


def wait_until_displaced(engine: RunningEngine) -> None:
    eventually(lambda: engine.stats().scheduler.host_used_blocks >= BLOCKS, "a swap")


@pytest.mark.parametrize("swap_block_seconds", [0.0001, 0.05], ids=["swapped", "copying"])
@pytest.mark.parametrize("way", ["hang up", "delete"])
def test_who_is_cancelled_outside_of_the_batch_leaves_no_kv_anywhere(
    swap_block_seconds: float, way: str
) -> None:
    with one_place(swap_block_seconds) as engine, connect(engine.port) as batch:
        batch.sendall(a_completion(tenant="batch", prompt=PROMPT, stream=True))
        assert batch.recv(1 << 16).startswith(b"HTTP/1.1 200")
        [request_id] = engine.service.generations.running_ids
        with a_raw_request(engine.port, tenant="gold", stream=True) as gold:
            wait_until_displaced(engine)
            if way == "delete":
                answer = engine.http("batch").delete(f"/v1/requests/{request_id}")
                assert answer.status_code == 200
                assert b'"code":"request_cancelled"' in read_events(batch)
            else:
                batch.close()
            eventually(lambda: engine.stats().cancelled, "its cancel")
            stats = engine.stats()
            assert [key.state for key in stats.cancelled] == ["swapped"]
            # Until the copy's fence: nobody else may have blocks that are still read.
            assert (stats.scheduler.host_used_blocks > 0) == (swap_block_seconds > 0.01)
            eventually(lambda: engine.stats().scheduler.host_used_blocks == 0, "the fence")
            assert engine.stats().scheduler.tenants["batch"].kv_used_blocks == 0
            assert gold.recv(1 << 16)
        eventually(engine.is_idle, "an idle engine")
        stats = engine.stats()
        assert stats.scheduler.kv_used_blocks == stats.tokens_after_cancel == 0


def test_who_leaves_while_coming_back_leaves_no_kv_anywhere() -> None:
    # So few that gold's prompt takes what would be found in the prefix cache.
    with one_place(0.05, blocks=26) as engine, connect(engine.port) as batch:
        batch.sendall(a_completion(tenant="batch", prompt=PROMPT, stream=True))
        assert batch.recv(1 << 16).startswith(b"HTTP/1.1 200")
        gold = engine.http("gold").post(
            "/v1/completions", json={"model": MODEL, "prompt": "y" * 320, "max_tokens": 20}
        )
        assert gold.status_code == 200
        engine.gate.shut()  # at the fence of its way back
        batch.close()
        eventually(lambda: not engine.service.generations.running_ids, "the client's end")
        engine.gate.open()
        eventually(engine.is_idle, "an idle engine")
        eventually(lambda: engine.stats().scheduler.host_used_blocks == 0, "the fence")
        stats = engine.stats()
        assert stats.scheduler.kv_used_blocks == stats.tokens_after_cancel == 0
        assert [key.state for key in stats.cancelled] == ["swapped"]
        assert stats.scheduler.swap_in_blocks > 0
