"""How long simulated steps take."""

import math
from dataclasses import dataclass
from typing import Protocol

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.executor.hardware import Gpu, ModelShape


class StepCost(Protocol):
    """Time of steps and of copies."""

    def seconds(self, plan: StepPlan) -> float:
        """Return how long the rows and the copies on write of `plan` take, in one step."""
        ...

    @property
    def costs(self) -> ExecutorCosts:
        """The same as a sum of parts, exactly or nearly; swaps take what it says."""
        ...


@dataclass(frozen=True, slots=True)
class AffineCost:
    """The sum of the parts of `costs`: what an executor measured, or what one wants."""

    costs: ExecutorCosts

    def seconds(self, plan: StepPlan) -> float:
        """Return the sum over the rows; copies on write are free."""
        prefill = pairs = decodes = context = 0
        for row in plan.rows:
            count, start = len(row.token_ids), row.start
            if row.is_decode:
                decodes += 1
                context += start + count
            else:
                prefill += count
                pairs += count * start + count * (count - 1) // 2
        costs = self.costs
        return (
            costs.step_seconds
            + costs.prefill_token_seconds * prefill
            + costs.prefill_pair_seconds * pairs
            + costs.decode_seconds * decodes
            + costs.context_token_seconds * context
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Either computing or memory traffic is what a step waits for.

    Computing: two FLOPs for each weight and token, and attention's for each pair of a query and a
    position that it sees. Traffic: the weights once, the context of every row once (of a prompt
    chunk, too: its queries share it), and the new keys and values. Peak rates are taken at the
    efficiencies of `gpu`. With tensor parallelism each GPU has its share of both, and two
    all-reduces a layer come on top (ring: 2 (n - 1) / n of the bytes pass each link).

    Source: the roofline model (Williams et al., CACM 2009).
    """

    gpu: Gpu
    model: ModelShape
    block_size: int = 16

    def seconds(self, plan: StepPlan) -> float:
        """Return the time of the step; padding rows take as long as others."""
        tokens = sampled = context = pairs = 0
        for row in plan.rows:
            count, start = len(row.token_ids), row.start
            tokens += count
            sampled += row.samples
            context += start + count
            pairs += count * start + count * (count + 1) // 2
        # A copy on write reads a block and writes one.
        moved = context + tokens + 2 * self.block_size * len(plan.copies)
        computing = self._computing_seconds(tokens, sampled, pairs)
        traffic = self._weights_seconds + moved * self._kv_token_seconds
        busy = max(computing, traffic) if self.gpu.has_overlap else computing + traffic
        return self.gpu.step_overhead_seconds + busy + self._all_reduce_seconds(tokens)

    @property
    def costs(self) -> ExecutorCosts:
        """Computing and traffic added up, as if they didn't overlap: never less than half too much.

        What it leaves out is the context that a prompt chunk reads, which matters only to chunks of
        a few tokens.
        """
        per_token = self._all_reduce_seconds(1) - self._all_reduce_seconds(0)
        per_token += 2 * self._kv_token_seconds
        return ExecutorCosts(
            step_seconds=self.gpu.step_overhead_seconds
            + self._weights_seconds
            + self._all_reduce_seconds(0),
            prefill_token_seconds=self._computing_seconds(1, 0, 1) + per_token,
            decode_seconds=self._computing_seconds(1, 1, 0) + per_token,
            context_token_seconds=self._computing_seconds(0, 0, 1) + self._kv_token_seconds,
            prefill_pair_seconds=self._computing_seconds(0, 0, 1),
            swap_block_seconds=self._swap_block_seconds,
        )

    def _computing_seconds(self, tokens: int, sampled: int, pairs: int) -> float:
        model, gpu = self.model, self.gpu
        flops = (
            2 * model.body_parameters * tokens
            + 2 * model.output_parameters * sampled
            + model.pair_flops * pairs
        )
        rate = gpu.flops_per_second * gpu.compute_efficiency
        return flops / model.tensor_parallel / rate

    @property
    def _memory_rate(self) -> float:
        return self.gpu.memory_bytes_per_second * self.gpu.memory_efficiency

    @property
    def _weights_seconds(self) -> float:
        return self.model.read_bytes / self._memory_rate

    @property
    def _kv_token_seconds(self) -> float:
        return self.model.kv_token_bytes / self._memory_rate

    @property
    def _swap_block_seconds(self) -> float:
        # Every GPU moves its own part, over its own bus.
        rate = self.gpu.host_bytes_per_second * self.gpu.memory_efficiency
        return self.model.kv_token_bytes * self.block_size / rate

    def _all_reduce_seconds(self, tokens: int) -> float:
        model, gpu = self.model, self.gpu
        gpus = model.tensor_parallel
        if gpus == 1:
            return 0.0
        passed = 2 * (gpus - 1) / gpus * tokens * model.hidden_size * model.dtype_bytes
        rate = gpu.link_bytes_per_second * gpu.memory_efficiency
        return 2 * model.num_layers * (gpu.link_seconds + passed / rate)


def fit_gpu(
    name: str, costs: ExecutorCosts, model: ModelShape, *, block_size: int, memory_bytes: float
) -> Gpu:
    """Describe as a GPU what has measured `costs` with `model`; for CPUs, where nothing overlaps.

    It is for other models on the same machine: for the same one `AffineCost(costs)` is exact.

    Args:
        name: The result's.
        costs: As `Executor.measure` returns them.
        model: With which they were measured.
        block_size: With which they were measured.
        memory_bytes: For weights and KV.
    """
    flops = _rate(2 * model.body_parameters, costs.prefill_token_seconds)
    read_seconds = costs.context_token_seconds - model.pair_flops / flops
    kv_rate = model.kv_token_bytes / read_seconds if read_seconds > 0 else 0.0
    # Weights can't take longer than the step that reads them.
    bandwidth = max(kv_rate, _rate(model.read_bytes, costs.step_seconds))
    return Gpu(
        name=name,
        flops_per_second=flops,
        memory_bytes_per_second=bandwidth,
        memory_bytes=memory_bytes,
        host_bytes_per_second=_rate(model.kv_token_bytes * block_size, costs.swap_block_seconds),
        step_overhead_seconds=costs.step_seconds - model.read_bytes / bandwidth,
        compute_efficiency=1.0,
        memory_efficiency=1.0,
        has_overlap=False,
    )


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else math.inf
