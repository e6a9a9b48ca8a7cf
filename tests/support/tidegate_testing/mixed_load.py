"""Traffic that makes a scheduler do all that it can do, the same for the same seed."""

import hashlib
import random

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.request import Request
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_policies.rules import (
    BatchingRule,
    KvEstimate,
    PreemptionMode,
    PreemptionRule,
    ServiceRule,
    TierRule,
    WatermarkRule,
)
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import Simulation, a_prompt, a_simulation

TIERS = {
    "high": TierRule(name="high", value=10),
    "middle": TierRule(name="middle", value=0, reserved_share_percent=20),
    "low": TierRule(name="low", value=-10, wait_window_seconds=0.2),
}
TENANTS = [f"tenant-{number}" for number in range(12)]


def a_policy(draw: random.Random) -> PolicySnapshot:
    """Draw the rules of the tenants."""
    return a_snapshot(
        *(
            a_tenant(
                name,
                tier=draw.choice([*TIERS]),
                weight=draw.choice([0, 1, 1, 3]),
                kv_nominal_percent=20 * (number % 3 == 0),
                kv_lendable_percent=draw.choice([50, 100]),
                max_running=draw.choice([None, 2]),
                preemption=PreemptionRule(
                    mode=draw.choice([*PreemptionMode]),
                    min_quantum_tokens=4,
                    preemptible=draw.random() < 0.9,
                ),
                service=ServiceRule(
                    ttft_seconds=draw.choice([None, 1.0]),
                    itl_seconds=draw.choice([None, 0.02]),
                    queue_timeout_seconds=draw.choice([None, 3.0]),
                ),
            )
            for number, name in enumerate(TENANTS)
        ),
        tiers=TIERS,
        batching=BatchingRule(max_num_seqs=draw.choice([12, 24])),
        watermarks=WatermarkRule(low_percent=90, high_percent=97),
        kv_estimate=draw.choice([*KvEstimate]),
    )


def arrivals(draw: random.Random, step: int) -> list[Request]:
    """Draw who comes before a step; some prompts begin like earlier ones."""
    return [
        a_request(
            draw.choice(TENANTS),
            prompt=a_prompt(draw.randrange(8), 8 * draw.randint(1, 18)),
            output=draw.randint(1, 80),
            request_id=f"r{step}-{number}",
        )
        for number in range(draw.choice([0, 0, 0, 1, 2]))
    ]


def run_mixed_load(seed: int, *, steps: int = 300) -> tuple[Simulation, str]:
    """Let requests come and be cancelled, and policies change; then run until all have ended.

    Returns:
        The engine, and a digest of all plans.
    """
    draw = random.Random(seed)
    engine = a_simulation(
        a_policy(draw),
        blocks=80,
        host_blocks=60,
        max_batched_tokens=128,
        cost=AffineCost(ExecutorCosts(swap_block_seconds=0.004)),
        check_every=50,
    )
    digest = hashlib.sha256()
    for step in range(steps):
        for request in arrivals(draw, step):
            engine.submit(request)
        if draw.random() < 0.05:
            engine.cancel(draw.choice(sorted(engine.log.requests) or ["nobody"]))
        if step % 60 == 59:
            engine.obey(a_policy(draw))
        digest.update(repr(engine.step()).encode())
    engine.drain()
    digest.update(repr([trace.token_ids for trace in engine.log.requests.values()]).encode())
    return engine, digest.hexdigest()
