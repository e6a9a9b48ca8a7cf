"""Steps computed by a real model on PyTorch, on a CPU or on CUDA."""

from collections.abc import Mapping, Sequence

import torch

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import PlanRow, SampledToken, StepPlan, StepResult
from tidegate_engine.executor.base import Capacity, ExecutorError
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.kv_copies import KvCopies
from tidegate_engine.executor.measuring import measure_costs
from tidegate_engine.executor.open_swaps import OpenSwaps
from tidegate_engine.model.batch import BatchError, build_batch
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.sampler import sample

_NO_DISTRIBUTION = "the model's logits for this request are not finite"


class TorchExecutor:
    """An `Executor` over a model and its KV pool, both on the same device.

    Swaps run beside the steps, as `KvCopies` says. Not for concurrent use: steps follow one
    another. A step has as many CPU threads as PyTorch is told, for the whole process. Engines that
    share a machine should divide its cores: threads that wait for one without a core spin, and
    lose far more than the additional ones gain.
    """

    def __init__(self, model: Llama, kv_cache: KvCache) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._copies = KvCopies(kv_cache, model.copy_blocks)
        self._open_swaps = OpenSwaps(self.capacity)

    @property
    def capacity(self) -> Capacity:
        """KV memory, fixed at start-up."""
        return Capacity(
            num_blocks=self._kv_cache.num_blocks,
            num_host_blocks=self._kv_cache.num_host_blocks,
            block_size=self._kv_cache.block_size,
            block_bytes=self._kv_cache.pool[0].nbytes,
        )

    @property
    def has_kernels(self) -> bool:
        """Whether steps are computed by the CPU's own kernels, not by PyTorch's operations."""
        return self._model.has_kernels(self._kv_cache.block_size)

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan.

        Raises:
            ExecutorError: The plan touches what it mustn't (nothing was then done), a row can't be
                computed (no row was then written), or the device failed (the blocks of the plan are
                then undefined). The plan's own swaps have ended by then. A swap of an earlier plan
                that broke off fails every step: what it was to write is lost, and nobody knows.
        """
        self._open_swaps.begin(plan)
        try:
            with torch.inference_mode():
                return self._execute(plan)
        except (BatchError, RuntimeError) as error:
            self._end_swaps(plan)
            raise ExecutorError(f"step {plan.step}: {error}") from error

    def measure(self) -> ExecutorCosts:
        """Return how long steps and copies take here, measured in at most some seconds.

        It is done in KV memory of its own, which is given back.
        """
        own = self._kv_cache
        with torch.inference_mode():
            return measure_costs(
                lambda rows, cache: self._compute(rows, cache),
                self._model.config,
                block_size=own.block_size,
                dtype=own.pool.dtype,
                device=own.pool.device,
            )

    def _execute(self, plan: StepPlan) -> StepResult:
        for swap in plan.swap_out:
            self._copies.swap_out(swap)
        for swap in plan.swap_in:
            self._copies.swap_in(swap)
        self._copies.copy(plan.copies)
        tokens = self._compute(plan.rows, self._kv_cache) if plan.rows else {}
        passed = self._copies.pass_fences(must_wait=not plan.rows)
        for fence in passed:
            self._open_swaps.end(fence)
        broken = [row for row in plan.rows if row.samples and row.request_id not in tokens]
        for row in broken:
            self._cleanse(row)
        failures = {row.request_id: _NO_DISTRIBUTION for row in broken}
        return StepResult(tokens=tokens, passed_fences=passed, failures=failures)

    def _cleanse(self, row: PlanRow) -> None:
        """Leave only numbers in the blocks of a row that has failed.

        Whoever has them next masks what it hasn't written itself, but a weight of 0 doesn't stop
        what is no number. Blocks that are shared with sound requests stay as they are.
        """
        blocks = list(row.block_ids)
        pool = self._kv_cache.pool
        pool[blocks] = pool[blocks].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    def _end_swaps(self, plan: StepPlan) -> None:
        """Let go of a failed step's swaps: its requests are dropped, and their blocks go on."""
        fences = [swap.fence for swap in (*plan.swap_out, *plan.swap_in)]
        self._copies.end(fences)
        for fence in fences:
            self._open_swaps.end(fence)

    def _compute(self, rows: Sequence[PlanRow], cache: KvCache) -> Mapping[str, SampledToken]:
        batch = build_batch(
            rows,
            self._model.config,
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            device=cache.pool.device,
        )
        logits = self._model.forward(batch, cache.pool)
        sampling = [row for row in rows if row.samples]
        tokens = sample(logits, [row.sampling for row in sampling], [row.end for row in sampling])
        return {
            row.request_id: token
            for row, token in zip(sampling, tokens, strict=True)
            if token is not None
        }
