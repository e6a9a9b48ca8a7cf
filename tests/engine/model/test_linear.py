import torch

from tidegate_engine.model.linear import DenseLinear, Int8Linear, quantise

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(48, 64, generator=GENERATOR)
ROWS = torch.randn(7, 64, generator=GENERATOR) * torch.tensor([1e-3, 1, 5, 1, 40, 1, 1])[:, None]


def test_a_dense_product_is_the_weights_own() -> None:
    linear = DenseLinear(WEIGHT)
    assert torch.allclose(linear.multiply(ROWS), ROWS @ WEIGHT.T, rtol=1e-5, atol=1e-5)


def test_quantised_rows_are_the_rows_to_half_a_step() -> None:
    values, scales = quantise(ROWS)
    assert values.abs().amax(dim=1).tolist() == [127] * 7
    error = (values.float() * scales[:, None] - ROWS).abs().amax(dim=1)
    assert bool((error <= scales * 0.501).all())


def test_a_row_of_zeros_stays_zero() -> None:
    values, scales = quantise(torch.zeros(1, 16))
    assert not values.any()
    assert scales.tolist() == [0.0]


def test_an_8_bit_product_is_that_of_the_dequantised_numbers() -> None:
    linear = Int8Linear(WEIGHT)
    rows, row_scales = quantise(ROWS)
    weight, scales = quantise(WEIGHT)
    exact = (rows.double() * row_scales[:, None]) @ (weight.double() * scales[:, None]).T
    assert torch.allclose(linear.multiply(ROWS).double(), exact, rtol=1e-5, atol=0)


def test_an_8_bit_product_loses_little() -> None:
    exact = ROWS @ WEIGHT.T
    error = (Int8Linear(WEIGHT).multiply(ROWS) - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(error.max()) < 0.02


def test_sums_of_8_bit_rows_do_not_depend_on_the_other_rows() -> None:
    linear = Int8Linear(WEIGHT)
    rows, _ = quantise(ROWS)
    out = torch.zeros(7, 48, dtype=torch.int32)
    linear.multiply_into(out, rows)
    for i in range(7):
        alone = torch.zeros(1, 48, dtype=torch.int32)
        linear.multiply_into(alone, rows[i : i + 1])
        assert torch.equal(alone[0], out[i])
