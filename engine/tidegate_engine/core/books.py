"""The parts of a scheduler's state that all its decisions are taken from."""

from dataclasses import dataclass

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.forecast import Forecast
from tidegate_engine.core.itl import ItlTargets
from tidegate_engine.core.kv_gate import KvGate
from tidegate_engine.core.kv_memory import KvMemory
from tidegate_engine.core.running import Running
from tidegate_engine.core.step_time import StepTimeModel
from tidegate_engine.core.tenant_table import TenantTable
from tidegate_policies.tiers import TierShares


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """One scheduler's state, shared by those who decide for it.

    Attributes:
        memory: Who holds which KV block.
        running: The batch.
        tenants: Their rules, queues and counters.
        forecast: What requests are expected to need.
        gate: What lets requests have KV blocks.
        step_times: What steps take.
        itl: What inter-token latency targets leave room for.
        shares: What each tier got lately.
    """

    memory: KvMemory
    running: Running
    tenants: TenantTable
    forecast: Forecast
    gate: KvGate
    step_times: StepTimeModel
    itl: ItlTargets
    shares: TierShares

    @classmethod
    def beginning_with(cls, memory: KvMemory, costs: ExecutorCosts) -> "Books":
        """Return the state of a scheduler that has no requests yet.

        Args:
            memory: Wholly free.
            costs: Time that the executor takes, to begin with.
        """
        running, step_times = Running(), StepTimeModel(costs)
        forecast = Forecast(block_size=memory.pool.block_size, prompt_price=costs.prompt_price)
        return cls(
            memory=memory,
            running=running,
            tenants=TenantTable(),
            forecast=forecast,
            gate=KvGate(memory=memory, running=running, forecast=forecast),
            step_times=step_times,
            itl=ItlTargets(running, step_times),
            shares=TierShares(),
        )
