"""The forward pass on the CPU's kernels, in float32 or with 8-bit products.

Between two products with weights there are one or two calls of a kernel, where PyTorch would take a
dozen operations that each read and write the whole state.
"""

import torch
from torch import Tensor

from tidegate_engine.model.batch import Batch
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.cpu_kernels import CpuKernels
from tidegate_engine.model.cpu_tables import Workspace
from tidegate_engine.model.layers import Layers
from tidegate_engine.model.linear import BareLinear
from tidegate_engine.model.openmp import Team
from tidegate_engine.model.rotary import RotaryTable

_MIN_CAPACITY = 256


class CpuForward:
    """A `ForwardPass` over a float32 pool."""

    def __init__(
        self,
        config: LlamaConfig,
        layers: Layers[BareLinear],
        rotary: RotaryTable,
        *,
        kernels: CpuKernels,
        team: Team,
    ) -> None:
        self._config = config
        self._layers = layers
        self._turns = torch.cat((rotary.cos, rotary.sin), dim=-1)
        self._kernels = kernels
        self._team = team
        self._space = self._reserve(_MIN_CAPACITY)

    def forward(self, batch: Batch, pool: Tensor) -> Tensor:
        """Compute a step."""
        num_tokens = len(batch.positions)
        self._make_room(num_tokens)
        space, layers = self._space, self._layers
        hidden = space.hidden[:num_tokens]
        torch.index_select(layers.embedding, 0, batch.token_ids, out=hidden)
        space.begin(batch, pool)
        for i, layer in enumerate(layers.layers):
            space.norms.call(2 * i)
            space.qkv.compute(layer.qkv, num_tokens)
            space.rotations.call(i)
            space.attentions.call(i)
            if space.quantisations is not None:
                space.quantisations.call(i)
            space.attention_output.compute(layer.attention_output, num_tokens)
            space.norms.call(2 * i + 1)
            space.gate_up.compute(layer.gate_up, num_tokens)
            space.gates.call(i)
            space.down.compute(layer.down, num_tokens)
        return self._logits(batch.sampled)

    def _logits(self, sampled: Tensor) -> Tensor:
        count, space, output = len(sampled), self._space, self._layers.output
        logits = torch.empty(count, output.num_outputs, dtype=space.gate_up.out.dtype)
        if count:
            space.begin_logits(sampled, logits)
            space.final_norm.call(0)
            output.multiply_into(logits, space.last_rows[:count])
            if space.dequantisation is not None:
                space.dequantisation.call(0)
        return logits.view(torch.float32)

    def _make_room(self, num_tokens: int) -> None:
        """Take more memory where a step is larger than any before, or has more threads."""
        capacity = self._space.capacity
        if num_tokens > capacity or torch.get_num_threads() > self._space.num_threads:
            self._space = self._reserve(max(num_tokens, capacity))

    def _reserve(self, capacity: int) -> Workspace:
        return Workspace(
            self._config,
            self._layers,
            self._turns.view(len(self._turns), -1),
            kernels=self._kernels,
            team=self._team,
            capacity=capacity,
            num_threads=torch.get_num_threads(),
        )
