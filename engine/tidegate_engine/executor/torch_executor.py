"""Steps computed by a real model on PyTorch, on a CPU or on CUDA."""

import torch

from tidegate_engine.core.plan import StepPlan, StepResult
from tidegate_engine.executor.base import Capacity, ExecutorError
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.model.batch import BatchError, build_batch
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import LoadedModel
from tidegate_engine.model.sampler import sample


class TorchExecutor:
    """An `Executor` over a loaded model and its KV pool, both on the same device.

    Not for concurrent use: steps follow one another. `num_threads` is the CPU threads of a step
    (None leaves PyTorch's choice, one a core), and holds for the whole process. Engines that share
    a machine should divide its cores: threads that wait for one without a core spin, and lose far
    more than the additional ones gain.
    """

    def __init__(
        self, model: LoadedModel, kv_cache: KvCache, *, num_threads: int | None = None
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._model = Llama(model.config, model.weights)
        self._kv_cache = kv_cache

    @property
    def capacity(self) -> Capacity:
        """KV memory, fixed at start-up."""
        return Capacity(
            num_blocks=self._kv_cache.num_blocks,
            num_host_blocks=0,
            block_size=self._kv_cache.block_size,
        )

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step.

        Raises:
            ExecutorError: A row can't be computed (nothing was then written), or the device failed
                (the blocks of the plan's rows are then undefined).
        """
        if not plan.rows:
            return StepResult()
        try:
            with torch.inference_mode():
                return self._execute(plan)
        except (BatchError, RuntimeError) as error:
            raise ExecutorError(f"step {plan.step}: {error}") from error

    def _execute(self, plan: StepPlan) -> StepResult:
        batch = build_batch(
            plan.rows,
            self._model.config,
            num_blocks=self._kv_cache.num_blocks,
            block_size=self._kv_cache.block_size,
            dtype=self._kv_cache.pool.dtype,
            device=self._kv_cache.pool.device,
        )
        logits = self._model.forward(batch, self._kv_cache.pool)
        sampling = [row for row in plan.rows if row.samples]
        tokens = sample(logits, [row.sampling for row in sampling], [row.end for row in sampling])
        return StepResult(
            tokens={row.request_id: token for row, token in zip(sampling, tokens, strict=True)}
        )
