from dataclasses import replace

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.request import TenantStats
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.events import EngineStats
from tidegate_engine.executor.base import Capacity
from tidegate_engine.metrics import EngineMetrics
from tidegate_engine.policy_board import PolicyInForce
from tidegate_testing.engines import MODEL
from tidegate_testing.policies import POOL, a_snapshot


def test_what_stood_back_for_a_higher_tier_is_counted_by_tenant() -> None:
    capacity = Capacity(num_blocks=64, num_host_blocks=0, block_size=16)
    metrics = EngineMetrics(POOL, model=MODEL, capacity=capacity)
    policy = PolicyInForce(snapshot=a_snapshot(), revision=1, digest="", step=1, at=0.0)
    metrics.use_policy(policy)
    idle = Scheduler(num_blocks=64, block_size=16, limits=EngineLimits()).stats()
    stats = EngineStats(
        scheduler=replace(idle, tenants={"acme": TenantStats(deferred_decodes=3)}),
        cancelled={},
        tokens_after_cancel=0,
        step_costs=ExecutorCosts(),
    )
    scrape = metrics.scrape(stats, miss_ratios={}, rates_are_alone=False, at=0.0)
    assert f'deferred_decodes_total{{pool="{POOL}",tenant="acme"}} 3\n' in scrape.render().decode()
