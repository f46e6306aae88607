"""Products with weights of 8 bits: the kernel against its PyTorch version, and both against exact arithmetic."""

import pytest
import torch

from mtp.kernels import fp8_weights
from mtp.kernels.fp8_weights import (
    MOST_ROWS,
    MOST_ROWS_BESIDE_WIDE,
    Blocks,
    dequantise,
    fp8_linear,
    fp8_linear_by_ops,
    quantise,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_weight(channels: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = torch.logspace(-3, 2, channels, device=DEVICE)[:, None]
    return quantise((torch.randn(channels, columns, device=DEVICE) * sizes).bfloat16())


# Rows, channels and columns. The interpreter, which takes long for each program, gets those of few.
SIZES = [(1, 300, 64), (16, 16, 512), (33, 70, 640), (3, 100, 2304), (0, 32, 32)]
DTYPES = [torch.bfloat16]
if torch.cuda.is_available():
    SIZES += [(4, 4096, 528), (17, 8200, 272), (65, 130, 48), (20, 4096, 4096), (60, 500, 2048), (200, 300, 3000)]
    DTYPES += [torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(("num_rows", "channels", "columns"), SIZES)
def test_a_product_of_few_rows_is_exact_but_for_its_rounding(
    num_rows: int, channels: int, columns: int, with_residual: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(channels)
    weight, scale = make_weight(channels, columns)
    x = (torch.randn(num_rows, columns + 16, device=DEVICE) / 8).to(dtype)[:, 16:]
    residual = torch.randn(num_rows, channels, device=DEVICE).to(dtype) if with_residual else None
    ours = fp8_linear(x, weight, scale, residual)
    assert ours.dtype == dtype
    exact = x.double() @ dequantise(weight, scale, torch.float64).T
    if residual is not None:
        exact += residual.double()
    # Of sums in float32 the rounding is that of their largest parts.
    scale_of_parts = (x.double().abs() @ dequantise(weight, scale, torch.float64).abs().T) * 2.0**-20
    assert ((ours.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + scale_of_parts + 1e-7).all()
    assert ours.shape == fp8_linear_by_ops(x, weight, scale, residual).shape


@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize(("columns", "shares"), [(512, 2), (300, 4)])
def test_columns_that_programs_share_out_are_summed_up_each_time(
    columns: int, shares: int, weight_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(columns)
    weight, scale = make_weight(70, columns)
    x, residual = (torch.randn(33, size, device=DEVICE).bfloat16() / 8 for size in (columns, 70))
    monkeypatch.setattr(fp8_weights, "_blocks", lambda *_: Blocks(16, 64, 64, 3, 4, weight_first, shares=1))
    alone = fp8_linear(x, weight, scale, residual)
    monkeypatch.setattr(fp8_weights, "_blocks", lambda *_: Blocks(16, 64, 64, 3, 4, weight_first, shares))
    # Twice: what the first one counted is zero again.
    first, second = (fp8_linear(x, weight, scale, residual) for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone, rtol=0.01, atol=0.01 * alone.abs().max().item())
    off = first.double() - (x.double() @ dequantise(weight, scale, torch.float64).T + residual.double())
    assert (off.abs() <= first.double().abs() * 2.0**-7 + 1e-3).all()


def test_rows_in_more_dimensions_and_more_than_the_kernel_takes() -> None:
    weight, scale = make_weight(48, 64)
    x = torch.randn(2, 3, 64, device=DEVICE).bfloat16()
    assert torch.equal(fp8_linear(x, weight, scale).flatten(0, 1), fp8_linear(x.flatten(0, 1), weight, scale))
    many = torch.randn(MOST_ROWS + 1, 64, device=DEVICE).bfloat16()
    assert torch.equal(fp8_linear(many, weight, scale), fp8_linear_by_ops(many, weight, scale))


def test_many_rows_are_the_products_of_a_weight_that_is_kept_wide() -> None:
    weight, scale = make_weight(48, 64)
    wide = dequantise(weight, scale, torch.bfloat16)
    for num_rows in (MOST_ROWS_BESIDE_WIDE, MOST_ROWS_BESIDE_WIDE + 1):
        x, residual = (torch.randn(num_rows, size, device=DEVICE).bfloat16() for size in (64, 48))
        product = fp8_linear(x, weight, scale, residual, wide)
        torch.testing.assert_close(product, fp8_linear(x, weight, scale, residual), rtol=0.02, atol=0.02)
        by_library = torch.equal(product, torch.addmm(residual, x, wide.t()))
        assert by_library or num_rows == MOST_ROWS_BESIDE_WIDE
    assert torch.equal(fp8_linear(x, weight, scale, None, wide), torch.nn.functional.linear(x, wide))


def test_a_quantised_weight_is_near_the_weight_and_its_scales_are_powers_of_two() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 1000, device=DEVICE) * torch.tensor([[1e-6], [1e-2], [1.0], [448.0], [0.0]], device=DEVICE)
    quantised, scale = quantise(weight)
    assert torch.equal(torch.exp2(scale.log2().round()), scale)
    near = dequantise(quantised, scale, torch.float64)
    step = weight.double().abs() * 2.0**-4 + scale[:, None].double() * 2.0**-10
    assert ((near - weight.double()).abs() <= step).all()
    assert (quantised.float().abs().amax(dim=1)[:4] > 200).all()
    assert torch.equal(dequantise(quantised, scale, torch.bfloat16).double(), near)


def test_a_weight_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 32, device=DEVICE)
    x = torch.randn(4, 32, device=DEVICE)
    whole = quantise(weight)
    product = fp8_linear_by_ops(x, *whole)
    monkeypatch.setattr(fp8_weights, "PIECE", 16)
    pieces = quantise(weight)
    assert torch.equal(whole[0].float(), pieces[0].float())
    assert torch.equal(whole[1], pieces[1])
    torch.testing.assert_close(fp8_linear_by_ops(x, *pieces), product)
