"""Products with weights of 8 bits: few rows of activations, so that a product takes as long as reading its weight does.

Weights are e4m3 with a scale for each output channel; activations keep their dtype, and products are summed up in
float32. Scales are powers of two. An 8-bit float is as precise near its largest value as elsewhere, so that costs
nothing, and in bfloat16 and float32 `dequantise` is exact: many rows, a CPU and a reference compute with the weights
that the kernel has.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from vllm.triton_utils import tl, triton

from mtp.kernels import has_kernels

FP8 = torch.float8_e4m3fn
MOST_ROWS = 256
"""Of a product by the kernel. With more it is arithmetic that takes the time, and a library's GEMM is the faster, even
though the weight has to be widened for it first."""
MOST_ROWS_BESIDE_WIDE = 64
"""The same where the weight is kept in 16 bits, too (`bench/micro/products.py`)."""

# Rows of a weight in one piece, where a copy of it is made.
PIECE = 16384
# Columns that one program widens.
WIDENED = 4096
# Programs that a device should have at the least, so that all of its multiprocessors read.
PROGRAMS = 128
# Pieces of a product whose columns are shared out, at the most.
MOST_SHARED = 8192


class Blocks(NamedTuple):
    """Of one program.

    Attributes:
        rows: of activations.
        channels: rows of the weight.
        columns: of both at a time.
        num_stages: how many of these less one are under way at a time.
        weight_first: the weight is the first factor of the product and the activations, turned, are the second. A
            tensor core takes no less than 64 rows of the first by itself, and that out of registers, where a weight is
            once it is widened.
        shares: programs among which the columns are shared out. Each reads its share of the activations alone, which
            in a product of more than a few rows are as many bytes as the weight.
    """

    rows: int
    channels: int
    columns: int
    num_stages: int
    num_warps: int
    weight_first: bool = False
    shares: int = 1


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in 8 bits.

    Args:
        weight: `[channels, columns]` of a floating-point dtype, finite.

    Returns:
        `[channels, columns]` e4m3 and `[channels]` float32, whose product the weight is nearly.
    """
    quantised = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    parts = (torch.split(x, PIECE) for x in (weight, quantised, scales))
    for part, to, scale in zip(*parts, strict=True):
        largest = part.abs().amax(dim=1).float().clamp(min=torch.finfo(torch.float32).tiny)
        # The smallest power of two by which the largest fits. Those near the end of float32's range have none.
        exponent = (largest / torch.finfo(FP8).max).log2().ceil().clamp(-120, 120)
        torch.exp2(exponent, out=scale)
        to.copy_((part.float() / scale[:, None]).clamp(torch.finfo(FP8).min, torch.finfo(FP8).max))
    return quantised, scales


def dequantise(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a quantised weight stands for, `[channels, columns]`."""
    if not (has_kernels(weight) and weight.is_contiguous() and dtype.itemsize <= 4):
        return dequantise_by_ops(weight, scale, dtype)
    channels, columns = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if out.numel():
        _dequantise[channels, triton.cdiv(columns, WIDENED)](weight, scale, out, columns, WIDENED, num_warps=4)
    return out


def dequantise_by_ops(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) * scale[:, None].to(dtype)


@triton.jit
def _dequantise(weight_ptr, scale_ptr, out_ptr, num_columns, BLOCK: tl.constexpr):
    channel = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    at = channel * num_columns + columns
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (weight * tl.load(scale_ptr + channel)).to(out_ptr.dtype.element_ty), mask=inside)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor | None = None,
    wide: torch.Tensor | None = None,
) -> torch.Tensor:
    """`F.linear` with a quantised weight.

    Args:
        x: `[..., columns]` of a 16-bit dtype, or float32.
        weight: `[channels, columns]` e4m3, contiguous.
        scale: `[channels]` float32, powers of two.
        residual: `[..., channels]`, to be added before anything is rounded.
        wide: what the weight stands for, in the dtype of `x`, for a product of more rows than the kernel is good for.

    Returns:
        `[..., channels]` of the dtype of `x`, memory of its own.
    """
    rows = x.reshape(-1, x.shape[-1])
    most_rows = MOST_ROWS if wide is None else MOST_ROWS_BESIDE_WIDE
    by_kernel = has_kernels(x) and x.element_size() == 2 and len(rows) <= most_rows and rows.stride(-1) == 1
    if not by_kernel:
        return fp8_linear_by_ops(x, weight, scale, residual, wide)
    num_rows, (channels, columns) = len(rows), weight.shape
    out = torch.empty(*x.shape[:-1], channels, dtype=x.dtype, device=x.device)
    if out.numel():
        blocks = _blocks(num_rows, channels, columns)
        grid = triton.cdiv(num_rows, blocks.rows), triton.cdiv(channels, blocks.channels), blocks.shares
        parts, arrivals = out, out
        if blocks.shares > 1:
            tile = blocks.rows * blocks.channels
            parts = torch.empty(math.prod(grid) * tile, dtype=torch.float32, device=x.device)
            arrivals = _arrivals(x.device)
        _fp8_linear[grid](
            rows,
            weight,
            scale,
            rows if residual is None else residual,
            out,
            parts,
            arrivals,
            num_rows,
            channels,
            columns,
            triton.cdiv(triton.cdiv(columns, blocks.columns), blocks.shares) * blocks.columns,
            rows.stride(0),
            0 if residual is None else residual.stride(-2),
            residual is not None,
            columns % (blocks.columns * blocks.shares) == 0,
            blocks.weight_first,
            blocks.shares,
            blocks.rows,
            blocks.channels,
            blocks.columns,
            num_stages=blocks.num_stages,
            num_warps=blocks.num_warps,
        )
    return out


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Of each piece of a product how many programs are done with their shares: zeros, before and after.

    One for all products of a device, which follow each other on a stream, as a pass's do.
    """
    return torch.zeros(MOST_SHARED, dtype=torch.int32, device=device)


def fp8_linear_by_ops(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor | None = None,
    wide: torch.Tensor | None = None,
) -> torch.Tensor:
    if wide is not None:
        if residual is None or x.dim() != 2:
            out = F.linear(x, wide)
            return out if residual is None else out + residual
        return torch.addmm(residual, x, wide.t())
    # In pieces: a head's weight would take a gigabyte for as long as the product takes.
    parts = [
        F.linear(x, dequantise(part, its_scale, x.dtype))
        for part, its_scale in zip(torch.split(weight, PIECE), torch.split(scale, PIECE), strict=True)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return out if residual is None else out + residual


def _blocks(num_rows: int, channels: int, columns: int) -> Blocks:
    """Of a product of so many rows: the fastest of those tried on an H200 (`bench/micro/products.py --blocks`)."""
    # Too few channels to have every multiprocessor read some, and columns enough to share out.
    if channels < 64 * PROGRAMS and columns >= 2048:
        if num_rows <= 16:
            return Blocks(16, 64, 256, num_stages=4, num_warps=4, shares=4)
        if num_rows <= 32:
            return Blocks(32, 64, 128, num_stages=4, num_warps=4, shares=4)
        return Blocks(64 if num_rows <= 64 else 128, 64, 128, num_stages=3, num_warps=4, weight_first=True, shares=4)
    if num_rows <= 16:
        return Blocks(16, 64, 256, num_stages=3, num_warps=4)
    if num_rows <= 32 and channels >= 256 * PROGRAMS:
        return Blocks(32, 128, 128, num_stages=3, num_warps=4)
    if num_rows <= 64:
        return Blocks(32 if num_rows <= 32 else 64, 64, 128, num_stages=3, num_warps=4, weight_first=True)
    if channels >= 64 * PROGRAMS:
        return Blocks(128, 128, 64, num_stages=4, num_warps=8, weight_first=True)
    return Blocks(128, 64, 128, num_stages=3, num_warps=4, weight_first=True)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_linear(
    x_ptr,
    weight_ptr,
    scale_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    num_rows,
    num_channels,
    num_columns,
    share,
    x_stride,
    residual_stride,
    ADDS: tl.constexpr,
    EVEN: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program has some channels of some rows, and a share of their columns. Those of the same channels follow each
    other: the weight is in the cache for all but the first.

    Of the programs with shares of the same columns the last to be done sums up what all have left in memory. It does
    so in the order of the shares, so that the sum doesn't depend on which one it is.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    columns = tl.arange(0, COLUMNS)
    if WEIGHT_FIRST:
        row, channel, x_column, weight_column = rows[None, :], channels[:, None], columns[:, None], columns[None, :]
        total = tl.zeros((CHANNELS, ROWS), dtype=tl.float32)
    else:
        row, channel, x_column, weight_column = rows[:, None], channels[None, :], columns[None, :], columns[:, None]
        total = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    row_there, channel_there = row < num_rows, channel < num_channels
    x_at = x_ptr + row.to(tl.int64) * x_stride + x_column
    # Channels past the last read the last one's weight, which needs no mask.
    weight_at = weight_ptr + tl.minimum(channel, num_channels - 1).to(tl.int64) * num_columns + weight_column
    begin = tl.program_id(2) * share
    x_at += begin
    weight_at += begin
    for first in range(begin, tl.minimum(begin + share, num_columns), COLUMNS):
        if EVEN:
            x = tl.load(x_at, mask=row_there, other=0.0)
            weight = tl.load(weight_at)
        else:
            left = num_columns - first
            x = tl.load(x_at, mask=row_there & (x_column < left), other=0.0)
            weight = tl.load(weight_at, mask=weight_column < left, other=0.0)
        # By way of float32: straight to bfloat16 is an instruction with a fraction of the throughput.
        widened = weight.to(tl.float32).to(x.dtype)
        total = tl.dot(widened, x, total) if WEIGHT_FIRST else tl.dot(x, widened, total)
        x_at += COLUMNS
        weight_at += COLUMNS
    if SHARES > 1:
        piece = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
        if WEIGHT_FIRST:
            inside = tl.arange(0, CHANNELS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        else:
            inside = tl.arange(0, ROWS)[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        parts_at = parts_ptr + piece.to(tl.int64) * SHARES * ROWS * CHANNELS + inside
        tl.store(parts_at + tl.program_id(2) * ROWS * CHANNELS, total)
        tl.debug_barrier()  # all of a program's threads have stored when it says that it is done
        if tl.atomic_add(arrivals_ptr + piece, 1, sem="acq_rel") != SHARES - 1:
            return
        tl.store(arrivals_ptr + piece, 0)
        tl.debug_barrier()
        total = tl.zeros_like(total)
        for other in tl.static_range(SHARES):
            total += tl.load(parts_at + other * ROWS * CHANNELS, cache_modifier=".cg")
    total *= tl.load(scale_ptr + channel, mask=channel_there, other=0.0)
    there = row_there & channel_there
    if ADDS:
        residual_at = residual_ptr + row.to(tl.int64) * residual_stride + channel
        total += tl.load(residual_at, mask=there, other=0.0).to(tl.float32)
    out_at = out_ptr + row.to(tl.int64) * num_channels + channel
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=there)
