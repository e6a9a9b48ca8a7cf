"""What tenants held KV blocks for, in virtual time."""

import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.kv_time import HeldBlocks, KvClock
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_policies.rules import PreemptionMode, PreemptionRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import (
    BLOCK_SIZE,
    Simulation,
    a_prompt,
    a_simulation,
    admitting_by_present_need,
)

SWAPPED = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=0)


def a_policy(*names: str) -> PolicySnapshot:
    return admitting_by_present_need(
        *(a_tenant(name, preemption=SWAPPED) for name in names), a_tenant("gold", tier="high")
    )


def kv_seconds(engine: Simulation, tenant: str) -> float:
    return engine.scheduler.stats().tenants[tenant].kv_seconds


def test_blocks_count_for_the_time_that_they_are_held() -> None:
    engine = a_simulation(a_policy("acme", "other"), blocks=40)
    engine.arrive("long", blocks=4, output=2)
    engine.arrive("short", tenant="other", blocks=1, output=2)
    began = engine.clock.now()
    engine.drain()
    seconds = engine.clock.now() - began
    assert seconds > 0.02
    assert kv_seconds(engine, "acme") == pytest.approx(4 * seconds, abs=1e-5)
    assert kv_seconds(engine, "other") == pytest.approx(seconds, abs=1e-5)
    assert engine.scheduler.stats().kv_seconds == pytest.approx(5 * seconds, abs=1e-5)


def test_a_request_that_waits_or_is_swapped_out_costs_nothing() -> None:
    engine = a_simulation(a_policy("acme"), blocks=40, host_blocks=40, max_num_seqs=1)
    engine.arrive("victim", output=100)
    engine.arrive("waits", output=100)
    engine.steps(3)
    engine.arrive("g", tenant="gold", blocks=2, output=40)
    engine.steps(6)
    assert engine.scheduler.stats().tenants["acme"].swapped == 1
    before = kv_seconds(engine, "acme"), kv_seconds(engine, "gold")
    engine.steps(5)
    assert kv_seconds(engine, "acme") == before[0]
    assert kv_seconds(engine, "gold") > before[1]


def test_a_block_that_requests_of_a_tenant_share_counts_once() -> None:
    engine = a_simulation(a_policy("acme"), blocks=40)
    prompt = a_prompt(1, 4 * BLOCK_SIZE + 4)
    for number in range(2):
        engine.accept(a_request(prompt=prompt, output=10, request_id=f"r{number}"))
        engine.steps(2)
    before = kv_seconds(engine, "acme"), engine.clock.now()
    engine.step()
    per_second = (kv_seconds(engine, "acme") - before[0]) / (engine.clock.now() - before[1])
    assert per_second == pytest.approx(4 + 2, rel=1e-3)


def test_what_copies_hold_of_a_tenant_that_is_gone_is_counted_with_those_that_are_gone() -> None:
    slow = AffineCost(ExecutorCosts(swap_block_seconds=0.1))
    engine = a_simulation(a_policy("acme"), blocks=40, host_blocks=40, max_num_seqs=1, cost=slow)
    engine.arrive("victim", blocks=8, output=100)
    engine.steps(3)
    engine.arrive("g", tenant="gold", output=40)
    engine.steps(2)
    assert engine.executor.copying
    engine.cancel("victim")
    engine.obey(a_policy("another"))
    engine.step()
    assert engine.executor.copying
    gone = engine.scheduler.stats().gone.kv_seconds
    engine.drain()
    stats = engine.scheduler.stats()
    assert "acme" not in stats.tenants
    assert stats.gone.kv_seconds > gone + 0.1
    parts = stats.gone.kv_seconds + sum(t.kv_seconds for t in stats.tenants.values())
    assert parts == pytest.approx(stats.kv_seconds, abs=1e-6)


def test_a_clock_that_goes_back_counts_nothing_twice() -> None:
    clock, held = KvClock(), HeldBlocks()
    clock.advance(10.0, num_held=0)
    held.change(3, clock.now)
    clock.advance(12.0, num_held=3)
    clock.advance(5.0, num_held=3)
    assert held.block_microseconds(clock.now) == clock.block_microseconds == 6_000_000
