"""Rows in eight bits: e4m3, each layer of each row with a scale of its own.

Layers' streams differ in size by orders of magnitude, and tokens' do too, so a scale is of one row of one layer. The
names and shapes are those that the fp8 transfer of speculators' `hs-connectors` reads; its scales are of a row.
"""

import torch

ENCODING = "fp8_e4m3"
DTYPE = torch.float8_e4m3fn
SCALES = "hidden_states_scales"


def row_bytes(num_layers: int, hidden_size: int) -> int:
    """Bytes that a token's rows take, with their scales."""
    return num_layers * (hidden_size + torch.float32.itemsize)


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[T, L, H]` as e4m3 and their scales `[T, L, 1]` in float32: a row is the product of both."""
    exact = rows.float()
    scales = exact.abs().amax(-1, keepdim=True) / torch.finfo(DTYPE).max
    scales[scales == 0] = 1
    return (exact / scales).to(DTYPE), scales


def dequantize(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows `[T, L, H]` in that dtype."""
    return (rows.float() * scales).to(dtype)
