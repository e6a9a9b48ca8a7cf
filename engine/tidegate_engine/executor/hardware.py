"""Named GPUs and models, as the few numbers that decide how long a step takes and what fits.

GPUs: NVIDIA's data sheets of A100 (SXM, 80 GB), H100 (SXM5) and H200 (SXM): dense BF16 FLOPs,
memory bandwidth and size, NVLink and PCIe bandwidth of one direction. Models: their published
`config.json`; the parameter counts follow from it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tidegate_engine.executor.base import Capacity

MEMORY_FRACTION = 0.9
"""Share of a GPU's memory for weights and KV blocks; activations and the runtime take the rest."""


class ModelTooLargeError(ValueError):
    """A model's weights leave no room for a KV block.

    Attributes:
        model: Its name.
        gpu: The GPU's name.
    """

    def __init__(self, model: str, gpu: str, problem: str) -> None:
        super().__init__(f"{model} on {gpu}: {problem}")
        self.model = model
        self.gpu = gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What computes: a GPU, or whatever can be described like one.

    Attributes:
        flops_per_second: Peak, dense, in the format that the models are computed in.
        memory_bytes_per_second: Peak bandwidth of its memory.
        host_bytes_per_second: Peak bandwidth between its memory and the host's, one direction.
        link_bytes_per_second: Peak bandwidth to the other GPUs of a group, one direction.
        link_seconds: Fixed time of one all-reduce in a group.
        step_overhead_seconds: Of a step beside computing and memory traffic: launching kernels,
            sampling, copying tokens. About a millisecond with captured graphs: an assumption.
        compute_efficiency: Share of the peak FLOPs that the large matrix products of a prefill
            reach; 0.5 to 0.6 is what engines report as model FLOPs utilisation.
        memory_efficiency: Share of each peak bandwidth that streaming reads reach; about 0.8.
        has_overlap: Computing and memory traffic of a step overlap, so that the longer one counts;
            else they add up, as they nearly do on a few CPU cores.
    """

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    memory_bytes: float
    host_bytes_per_second: float
    link_bytes_per_second: float = math.inf
    link_seconds: float = 0.0
    step_overhead_seconds: float = 0.001
    compute_efficiency: float = 0.55
    memory_efficiency: float = 0.8
    has_overlap: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        parameters: All, embeddings included.
        has_tied_embeddings: The output projection is the embedding table.
        dtype_bytes: Of an element of weights and KV.
        tensor_parallel: GPUs that each hold a slice of every layer.
    """

    name: str
    parameters: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    has_tied_embeddings: bool = False
    dtype_bytes: int = 2
    tensor_parallel: int = 1

    @property
    def output_parameters(self) -> int:
        """Of the output projection, which is applied to sampled positions alone."""
        return self.vocab_size * self.hidden_size

    @property
    def body_parameters(self) -> int:
        """Of the layers: those that every token is multiplied with."""
        tables = 1 if self.has_tied_embeddings else 2
        return self.parameters - tables * self.output_parameters

    @property
    def pair_flops(self) -> int:
        """FLOPs of attention for one query and one position that it sees: scores and values."""
        return 4 * self.num_layers * self.num_heads * self.head_size

    @property
    def kv_token_bytes(self) -> int:
        """Memory of a token's keys and values on each GPU.

        A head is on one GPU at least: with fewer KV heads than GPUs they are repeated.
        """
        heads = -(-self.num_kv_heads // self.tensor_parallel)
        return 2 * self.num_layers * heads * self.head_size * self.dtype_bytes

    @property
    def weight_bytes(self) -> float:
        """Memory of the weights on each GPU."""
        return self.parameters * self.dtype_bytes / self.tensor_parallel

    @property
    def read_bytes(self) -> float:
        """Of the weights, on each GPU, what a step reads: not the table of input embeddings."""
        read = self.body_parameters + self.output_parameters
        return read * self.dtype_bytes / self.tensor_parallel


def fitting_capacity(
    gpu: Gpu, model: ModelShape, *, block_size: int = 16, host_bytes: float = 0.0
) -> Capacity:
    """Return the KV memory that is left beside the weights, and in so much memory of the host.

    Args:
        gpu: One of `model.tensor_parallel` equal ones.
        model: Whose weights and KV.
        block_size: Tokens in a KV block.
        host_bytes: For swapped-out blocks, of all GPUs together.

    Raises:
        ModelTooLargeError: Not a single block fits.
    """
    block_bytes = model.kv_token_bytes * block_size
    left = gpu.memory_bytes * MEMORY_FRACTION - model.weight_bytes
    if left < block_bytes:
        usable = f"{gpu.memory_bytes * MEMORY_FRACTION / 1e9:.1f} GB of each GPU are usable"
        problem = f"weights take {model.weight_bytes / 1e9:.1f} GB, {usable}"
        raise ModelTooLargeError(model.name, gpu.name, problem)
    return Capacity(
        num_blocks=int(left // block_bytes),
        num_host_blocks=int(host_bytes // (block_bytes * model.tensor_parallel)),
        block_size=block_size,
        block_bytes=block_bytes,
    )


A100_80G = Gpu(
    name="A100-80G",
    flops_per_second=312e12,
    memory_bytes_per_second=2.039e12,
    memory_bytes=80e9,
    host_bytes_per_second=32e9,
    link_bytes_per_second=300e9,
    link_seconds=8e-6,
)
H100_80G = Gpu(
    name="H100-80G",
    flops_per_second=989.4e12,
    memory_bytes_per_second=3.35e12,
    memory_bytes=80e9,
    host_bytes_per_second=64e9,
    link_bytes_per_second=450e9,
    link_seconds=8e-6,
)
H200 = Gpu(
    name="H200",
    flops_per_second=989.4e12,
    memory_bytes_per_second=4.8e12,
    memory_bytes=141e9,
    host_bytes_per_second=64e9,
    link_bytes_per_second=450e9,
    link_seconds=8e-6,
)

# Fitted by `step_cost.fit_gpu` to what the PyTorch executor measured of SmolLM2 in float32 on one
# thread of a 2-core Xeon with AVX-512, while others used the cores too: medians of eight.
CPU_2_CORES = Gpu(
    name="CPU-2-cores",
    flops_per_second=200e9,
    memory_bytes_per_second=5.4e9,
    memory_bytes=8e9,
    host_bytes_per_second=8e9,
    step_overhead_seconds=0.013,
    compute_efficiency=1.0,
    memory_efficiency=1.0,
    has_overlap=False,
)

LLAMA_3_1_8B = ModelShape(
    name="Llama-3.1-8B",
    parameters=8_030_261_248,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    vocab_size=128_256,
)
LLAMA_3_1_70B_TP8 = ModelShape(
    name="Llama-3.1-70B-TP8",
    parameters=70_553_706_496,
    num_layers=80,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=8,
    head_size=128,
    vocab_size=128_256,
    tensor_parallel=8,
)
QWEN3_0_6B = ModelShape(
    name="Qwen3-0.6B",
    parameters=596_049_920,
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    vocab_size=151_936,
    has_tied_embeddings=True,
)
SMOLLM2_135M = ModelShape(
    name="SmolLM2-135M",
    parameters=134_515_008,
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    vocab_size=49_152,
    has_tied_embeddings=True,
    # As the PyTorch engine computes it on a CPU.
    dtype_bytes=4,
)

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {gpu.name: gpu for gpu in (A100_80G, H100_80G, H200, CPU_2_CORES)}
)
"""By name."""

MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {model.name: model for model in (LLAMA_3_1_8B, LLAMA_3_1_70B_TP8, QWEN3_0_6B, SMOLLM2_135M)}
)
"""By name."""
