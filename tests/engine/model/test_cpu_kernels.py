"""Single kernels of the CPU, where numbers are large and processes begin together."""

import ctypes
import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tidegate_engine.model import cpu_product, cpu_rows
from tidegate_engine.model.cpu_copy import StreamingCopy, copy_bytes
from tidegate_engine.model.cpu_kernels import KernelCompiler
from tidegate_engine.model.linear import is_exact_in_8_bits

REFUSED = """
import torch
from tidegate_engine.model.linear import Int8Linear, UnsupportedProductError

try:
    Int8Linear(torch.ones(32, 64))
except UnsupportedProductError as error:
    print(error)
"""


def gated(gates: Tensor) -> Tensor:
    """SwiGLU by the kernel, all ups being 1; the gates are [1, a multiple of 16]."""
    size = gates.shape[1]
    compiler = KernelCompiler(None)
    address = compiler.compile(cpu_rows.gate_kernel(size, is_int8=False))
    product = torch.cat((gates, torch.ones(1, size)), dim=1)
    out, scratch = torch.zeros(1, size), torch.zeros(size)
    arguments = np.array(
        [0, 0, 1, 1, product.data_ptr(), 0, 0, out.data_ptr(), 0, scratch.data_ptr()], np.int64
    )
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(arguments.ctypes.data)
    return out


@pytest.mark.parametrize("largest", [10.0, 87.0, 100.0, 1e4, 1e30])
def test_a_gate_of_any_size_is_what_pytorch_says(largest: float) -> None:
    gates = torch.linspace(-largest, largest, 512)[None]
    expected = functional.silu(gates.double()).float()
    assert torch.allclose(gated(gates), expected, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def streaming_copy() -> StreamingCopy:
    compiler = KernelCompiler(None)
    return StreamingCopy(compiler.compile(copy_bytes), compiler)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 4096, 737_280])
@pytest.mark.parametrize(("target_at", "source_at"), [(0, 0), (0, 1), (1, 0), (32, 7), (64, 64)])
def test_a_copy_past_the_caches_writes_its_bytes_and_no_other(
    streaming_copy: StreamingCopy, size: int, target_at: int, source_at: int
) -> None:
    source, target = aligned(size + 64), aligned(size + 128)
    source[:] = np.random.default_rng(size).integers(0, 256, source.size)
    expected = target.copy()
    expected[target_at : target_at + size] = source[source_at : source_at + size]

    streaming_copy(target[target_at : target_at + size], source[source_at : source_at + size])

    assert np.array_equal(target, expected)


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Return bytes, all 7, that begin at a multiple of 64."""
    memory = np.full(size + 64, 7, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size]


def test_nobody_else_compiles_into_a_directory_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compiled = numba.cfunc, []

    def watched(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        (lock,) = tmp_path.rglob("lock")
        with lock.open("w") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        compiled.append(lock)
        return plain(*arguments, **options)

    monkeypatch.setattr(numba, "cfunc", watched)
    KernelCompiler(tmp_path).compile(cpu_product.product_kernel(64, 32))
    assert compiled


def test_kernels_that_cannot_be_kept_are_compiled_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    compiler = KernelCompiler(tmp_path / "file" / "kernels")
    assert compiler.compile(cpu_product.product_kernel(64, 32))
    assert "compiled kernels can't be kept" in caplog.text
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_where_8_bit_products_saturate_they_are_refused() -> None:
    environment = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", REFUSED],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    if not run.stdout:
        pytest.skip("oneDNN multiplies exactly here even so")
    assert run.stdout == "8-bit products saturate on cpu: a CPU has to know VNNI\n"


def test_8_bit_products_are_exact_here_or_known_not_to_be() -> None:
    rows = torch.full((1, 64), 127, dtype=torch.int8)
    sums = torch._int_mm(rows, torch.full((64, 32), 127, dtype=torch.int8))
    assert is_exact_in_8_bits(torch.device("cpu")) is bool((sums == 64 * 127 * 127).all())
