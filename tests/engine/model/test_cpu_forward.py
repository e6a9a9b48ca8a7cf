"""The CPU's kernels against the portable forward pass, and against themselves."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.model.batch import Batch, build_batch
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.cpu import CpuBackend
from tidegate_engine.model.cpu_product import rows_of_task
from tidegate_engine.model.layers import Layers
from tidegate_engine.model.linear import Int8Linear, Quantization
from tidegate_engine.model.llama import ForwardPass
from tidegate_engine.model.portable import PortableForward
from tidegate_engine.model.rotary import RotaryTable
from tidegate_testing.model_files import quantised
from tidegate_testing.models import TINY, plan_row, tiny_model

pytest.importorskip("numba")

NUM_BLOCKS = 96
GROUPED = dataclasses.replace(
    TINY, hidden_size=64, head_size=32, intermediate_size=96, vocab_size=288
)
SHAPES = {
    "grouped": GROUPED,
    "qwen3-like": dataclasses.replace(GROUPED, num_heads=3, num_kv_heads=3, has_qk_norm=True),
    "qwen2-like": dataclasses.replace(GROUPED, num_heads=7, num_kv_heads=1, has_qkv_bias=True),
    "wide-heads": dataclasses.replace(GROUPED, num_heads=6, num_kv_heads=2, head_size=64),
}


@dataclasses.dataclass(frozen=True)
class Model:
    config: LlamaConfig
    block_size: int
    kernels: ForwardPass
    portable: ForwardPass

    def batch(self, *rows: PlanRow) -> Batch:
        return build_batch(rows, self.config, num_blocks=NUM_BLOCKS, block_size=self.block_size)

    def new_pool(self, fill: float = 0.0) -> Tensor:
        config = self.config
        sizes = (self.block_size, config.num_kv_heads, config.head_size)
        return torch.full((NUM_BLOCKS + 1, config.num_layers, 2, *sizes), fill)


def new_model(
    config: LlamaConfig, cache: Path, *, block_size: int = 16, quantization: Quantization = "none"
) -> Model:
    model = tiny_model(config)
    backend = CpuBackend.find(config, model.weights.embedding, cache)
    if backend is None:
        pytest.skip("no OpenMP library that kernels can run on")
    new_linear = Int8Linear if quantization == "int8" else backend.new_linear
    layers = Layers.pack(model.weights, new_linear)
    rotary = RotaryTable.of(config, layers.embedding)
    kernels = backend.new_forward(layers, rotary, block_size)
    if kernels is None:
        raise AssertionError(f"{config} with blocks of {block_size}")
    return Model(config, block_size, kernels, PortableForward(config, layers, rotary))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(GROUPED.vocab_size), k=count)


def mixed_rows(block_size: int) -> list[PlanRow]:
    blocks = iter(random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS))
    rows = []
    for i, (start, count) in enumerate(
        ((3, 6), (21, 1), (0, 30), (0, 1), (130, 2), (160, 1), (1, 29), (15, 1), (16, 17))
    ):
        table = [next(blocks) for _ in range(-(-(start + count) // block_size))]
        rows.append(plan_row(tokens(count, i), table, start=start, samples=i % 3 != 1))
    return rows


@pytest.mark.parametrize(
    ("shape", "block_size"), [*((shape, 16) for shape in SHAPES), ("grouped", 32)]
)
def test_kernels_compute_what_pytorch_does(shape: str, block_size: int, cache: Path) -> None:
    model = new_model(SHAPES[shape], cache, block_size=block_size)
    torch.manual_seed(0)
    rows = mixed_rows(block_size)
    # What is in others' blocks must not matter, nor what is behind a row's last position.
    pools = [model.new_pool(torch.nan) for _ in range(2)]
    for row in rows:
        context = torch.randn(len(row.block_ids), *pools[0].shape[1:])
        for position in range(row.start, len(row.block_ids) * block_size):
            context[position // block_size, :, :, position % block_size] = torch.nan
        for pool in pools:
            pool[list(row.block_ids)] = context
    batch = model.batch(*rows)
    with torch.inference_mode():
        ours = model.kernels.forward(batch, pools[0])
        theirs = model.portable.forward(batch, pools[1])
    assert ours.shape == theirs.shape == (6, model.config.vocab_size)
    assert torch.allclose(ours, theirs, rtol=0, atol=5e-5)
    assert torch.allclose(pools[0], pools[1], rtol=0, atol=5e-5, equal_nan=True)


def test_8_bit_kernels_compute_what_pytorch_does_but_for_rounding(cache: Path) -> None:
    model = new_model(SHAPES["qwen2-like"], cache, quantization="int8")
    batch = model.batch(plan_row(tokens(40, 0), [4, 9, 1]), plan_row(tokens(9, 1), [5]))
    with torch.inference_mode():
        ours = model.kernels.forward(batch, model.new_pool())
        theirs = model.portable.forward(batch, model.new_pool())
    # Where a number lies between two bytes, the last bit of a float decides.
    assert float((ours - theirs).norm() / theirs.norm()) < 0.01


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_neighbours_and_chunks_change_no_bit(
    quantization: Quantization, num_threads: int, cache: Path
) -> None:
    torch.set_num_threads(num_threads)
    try:
        model = new_model(GROUPED, cache, quantization=quantization)
        prompt = tokens(120, 5)
        blocks = [*range(8)]
        with torch.inference_mode():
            alone = model.kernels.forward(model.batch(plan_row(prompt, blocks)), model.new_pool())
            for seed in range(4):
                assert torch.equal(in_chunks(model, prompt, blocks, seed), alone[0])
    finally:
        torch.set_num_threads(1)


def in_chunks(model: Model, prompt: list[int], blocks: list[int], seed: int) -> Tensor:
    """Compute a prompt in chunks of any size, each beside other neighbours."""
    choose = random.Random(seed)
    pool, start, logits = model.new_pool(), 0, torch.empty(0)
    others = [[50 + 2 * i, 51 + 2 * i] for i in range(20)]
    while start < len(prompt):
        count = min(choose.choice([1, 1, 2, 5, 8, 17, 64]), len(prompt) - start)
        rows = [plan_row(prompt[start : start + count], blocks, start=start)]
        for i in range(choose.choice([0, 1, 3, 20])):
            length, at = choose.choice([(1, 0), (1, 20), (7, 13), (30, 0)])
            rows.append(plan_row(tokens(length, i), others[i], start=at))
        order = choose.sample(range(len(rows)), len(rows))
        out = model.kernels.forward(model.batch(*(rows[i] for i in order)), pool)
        logits = out[order.index(0)]
        start += count
    return logits


def test_a_step_of_more_tokens_than_ever_is_computed(cache: Path) -> None:
    model = new_model(GROUPED, cache)
    prompt = tokens(400, 7)
    batch = model.batch(plan_row(prompt, [*range(25)]))
    with torch.inference_mode():
        ours = model.kernels.forward(batch, model.new_pool())
        theirs = model.portable.forward(batch, model.new_pool())
    assert torch.allclose(ours, theirs, rtol=0, atol=5e-5)


def test_more_threads_than_at_the_first_step_may_compute_a_later_one(cache: Path) -> None:
    model = new_model(GROUPED, cache)
    batch = model.batch(plan_row(tokens(60, 7), [*range(4)]))
    with torch.inference_mode():
        alone = model.kernels.forward(batch, model.new_pool())
        torch.set_num_threads(3)
        try:
            together = model.kernels.forward(batch, model.new_pool())
        finally:
            torch.set_num_threads(1)
    assert torch.equal(alone, together)


def test_rows_that_only_pass_by_get_no_logits(cache: Path) -> None:
    model = new_model(GROUPED, cache)
    batch = model.batch(plan_row([1, 2, 3], [0], samples=False))
    with torch.inference_mode():
        assert model.kernels.forward(batch, model.new_pool()).shape == (0, 288)


def test_sizes_that_are_no_multiple_of_16_are_left_to_pytorch(cache: Path) -> None:
    assert CpuBackend.find(TINY, torch.empty(0), cache) is None
    backend = CpuBackend.find(GROUPED, torch.empty(0), cache)
    assert backend is not None
    layers = Layers.pack(tiny_model(GROUPED).weights, backend.new_linear)
    rotary = RotaryTable.of(GROUPED, layers.embedding)
    assert backend.new_forward(layers, rotary, block_size=8) is None


def test_processors_without_long_vectors_are_left_to_pytorch(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_model(GROUPED, cache)  # or this is skipped
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert CpuBackend.find(GROUPED, torch.zeros(1), cache) is None


def test_other_dtypes_are_left_to_pytorch(cache: Path) -> None:
    assert CpuBackend.find(GROUPED, torch.empty(0, dtype=torch.bfloat16), cache) is None


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 2, 11, 12, 13, 97, 200, 300])
def test_a_product_is_the_plain_one_bit_for_bit_alone(
    num_rows: int, num_threads: int, cache: Path
) -> None:
    backend = CpuBackend.find(GROUPED, torch.empty(0), cache)
    assert backend is not None
    torch.manual_seed(0)
    weight, rows = torch.randn(160, 96), torch.randn(num_rows, 96)
    linear = backend.new_linear(weight)
    torch.set_num_threads(num_threads)
    try:
        product = linear.multiply(rows)
        alone = torch.cat([linear.multiply(row[None]) for row in rows])
    finally:
        torch.set_num_threads(1)
    assert torch.equal(product, alone)
    exact = rows.double() @ weight.double().T
    assert torch.allclose(product.double(), exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_product_is_the_same_to_the_last_bit_from_codes_and_from_plain_numbers(
    kind: str, num_threads: int, cache: Path
) -> None:
    backend = CpuBackend.find(GROUPED, torch.empty(0), cache)
    assert backend is not None
    torch.manual_seed(0)
    coded = quantised(torch.randn(160, 448), GGMLQuantizationType[kind])
    torch.set_num_threads(num_threads)
    try:
        from_codes = backend.new_linear(coded)
        # Outputs without codes make all of a weight plain.
        from_plain = backend.new_linear(torch.cat((coded, torch.randn(32, 448))))
        assert from_codes.tensors[0].nbytes < coded.nbytes / 3
        for num_rows in (1, 5, 12, 13, 40, 300):
            rows = torch.randn(num_rows, 448)
            plain = from_plain.multiply(rows)[:, :160]
            assert torch.equal(from_codes.multiply(rows), plain)
    finally:
        torch.set_num_threads(1)


def test_rows_are_shared_out_where_there_are_too_few_panels_for_the_threads() -> None:
    assert rows_of_task(256, num_panels=18, num_threads=2) >= 256
    assert rows_of_task(256, num_panels=18, num_threads=8) == 132
    assert rows_of_task(1000, num_panels=96, num_threads=2) == 264
    assert rows_of_task(1, num_panels=1, num_threads=8) == 12


def test_a_product_of_no_rows_has_none(cache: Path) -> None:
    backend = CpuBackend.find(GROUPED, torch.empty(0), cache)
    assert backend is not None
    assert backend.new_linear(torch.ones(32, 96)).multiply(torch.empty(0, 96)).shape == (0, 32)


def test_compiled_kernels_are_kept_for_the_next_process(cache: Path) -> None:
    new_model(GROUPED, cache)
    kept = sorted(path for path in cache.rglob("*.nbc"))
    assert kept
    new_model(GROUPED, cache)
    assert sorted(path for path in cache.rglob("*.nbc")) == kept
