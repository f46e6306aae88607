"""Rows in eight bits: e4m3, each layer of each row with a scale of its own.

Layers' streams differ in size by orders of magnitude, and tokens' do too, so a scale is of one row of one layer. The
names and shapes are those that the fp8 transfer of speculators' `hs-connectors` reads; its scales are of a row.
"""

import torch

DTYPE = torch.float8_e4m3fn

# Of rows in float32, which quantizing needs memory for, some rows at a time.
EXACT_BYTES = 32 << 20


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[T, L, H]` as e4m3 and their scales `[T, L, 1]` in float32: a row is the product of both."""
    values = torch.empty_like(rows, dtype=DTYPE)
    scales = rows.new_empty(*rows.shape[:-1], 1, dtype=torch.float32)
    at_once = max(1, EXACT_BYTES // (rows.shape[1:].numel() * torch.float32.itemsize))
    for some, of_some, scale in zip(rows.split(at_once), values.split(at_once), scales.split(at_once), strict=True):
        exact = some.float()
        scale.copy_(exact.abs().amax(-1, keepdim=True) / torch.finfo(DTYPE).max)
        scale.masked_fill_(scale == 0, 1)
        of_some.copy_(exact / scale)
    return values, scales


def dequantize(rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows `[T, L, H]` in that dtype."""
    return (rows.float() * scales).to(dtype)
