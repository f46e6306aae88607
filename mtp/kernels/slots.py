"""Slot mappings of all groups of a pass."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.triton_utils import tl, triton
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from mtp.kernels import has_kernels

BLOCK_ROWS = 256


def write_slots(
    block_tables: Sequence[torch.Tensor],
    block_sizes: Sequence[int],
    outputs: Sequence[torch.Tensor],
    req_indices: torch.Tensor,
    positions: torch.Tensor,
    max_model_len: int,
    num_padded_tokens: int,
) -> None:
    """Writes the slots of the same rows in several groups, in one launch.

    Args:
        block_tables: of each group, `[num_reqs, max_blocks]` int32.
        block_sizes: tokens per entry of each.
        outputs: of each group, at least `num_padded_tokens` int64.
        req_indices, positions: `[num_tokens]` integer. A row outside `[0, max_model_len)`, or past the table, is
            padding.
        num_padded_tokens: entries to write; those past `num_tokens` are padding.
    """
    if not has_kernels(positions):
        write = write_slots_on_host if positions.device.type == "cpu" else write_slots_by_ops
        write(block_tables, block_sizes, outputs, req_indices, positions, max_model_len, num_padded_tokens)
        return
    described = tuple(
        (table.data_ptr(), table.stride(0), table.shape[1], block_size, output.data_ptr())
        for table, block_size, output in zip(block_tables, block_sizes, outputs, strict=True)
    )
    _write_slots[len(described), triton.cdiv(num_padded_tokens, BLOCK_ROWS)](
        _on_device(described, positions.device),
        req_indices,
        positions,
        positions.shape[0],
        num_padded_tokens,
        max_model_len,
        PADDING_SLOT_ID,
        BLOCK_ROWS,
    )


def write_slots_by_ops(
    block_tables: Sequence[torch.Tensor],
    block_sizes: Sequence[int],
    outputs: Sequence[torch.Tensor],
    req_indices: torch.Tensor,
    positions: torch.Tensor,
    max_model_len: int,
    num_padded_tokens: int,
) -> None:
    num_tokens = positions.shape[0]
    valid = (positions >= 0) & (positions < max_model_len)
    positions = positions.long()
    # Most groups have blocks of one size and tables of one width.
    located: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}
    for table, size, output in zip(block_tables, block_sizes, outputs, strict=True):
        width = table.shape[1]
        if (size, width) not in located:
            # A position past the table is not the row's to write either; the clamp only keeps the look-up in bounds.
            blocks = (positions // size).clamp(0, width - 1)
            located[size, width] = valid & (positions < width * size), blocks, positions % size
        in_table, blocks, offsets = located[size, width]
        slots = table[req_indices, blocks].long() * size + offsets
        output[:num_tokens] = torch.where(in_table, slots, PADDING_SLOT_ID)
        output[num_tokens:num_padded_tokens] = PADDING_SLOT_ID


def write_slots_on_host(
    block_tables: Sequence[torch.Tensor],
    block_sizes: Sequence[int],
    outputs: Sequence[torch.Tensor],
    req_indices: torch.Tensor,
    positions: torch.Tensor,
    max_model_len: int,
    num_padded_tokens: int,
) -> None:
    """The same in NumPy, since small operations take torch longer."""
    num_tokens, reqs, at = positions.shape[0], req_indices.numpy(), positions.numpy()
    located: dict[tuple[int, int], tuple[npt.NDArray[Any], ...]] = {}
    for table, size, output in zip(block_tables, block_sizes, outputs, strict=True):
        width = table.shape[1]
        if (size, width) not in located:
            blocks = np.minimum(np.maximum(at // size, 0), width - 1)
            outside = (at < 0) | (at >= min(max_model_len, width * size))
            located[size, width] = blocks, at - blocks * size, outside
        blocks, offsets, outside = located[size, width]
        slots = output.numpy()
        slots[:num_tokens] = table.numpy()[reqs, blocks].astype(np.int64) * size + offsets
        slots[:num_tokens][outside] = PADDING_SLOT_ID
        slots[num_tokens:num_padded_tokens] = PADDING_SLOT_ID


@functools.cache
def _on_device(described: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """The groups' tables and buffers as `[num_groups, 5]` int64.

    Kept for good, since a captured pass reads it at every replay. The host's tables stay where they are, so there are
    few of them.
    """
    return torch.tensor(described, dtype=torch.int64).to(device)


@triton.jit(do_not_specialize=["num_tokens", "num_padded_tokens", "max_model_len"])
def _write_slots(
    groups_ptr,
    req_indices_ptr,
    positions_ptr,
    num_tokens,
    num_padded_tokens,
    max_model_len,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program for each group and block of rows. It counts in 64 bits: a block times the block size overflows 32."""
    group_ptr = groups_ptr + tl.program_id(0) * 5
    table_ptr = tl.load(group_ptr).to(tl.pointer_type(tl.int32))
    stride = tl.load(group_ptr + 1)
    width = tl.load(group_ptr + 2)
    block_size = tl.load(group_ptr + 3)
    slots_ptr = tl.load(group_ptr + 4).to(tl.pointer_type(tl.int64))

    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_tokens
    positions = tl.load(positions_ptr + rows, mask=inside, other=-1).to(tl.int64)
    reqs = tl.load(req_indices_ptr + rows, mask=inside, other=0).to(tl.int64)
    valid = inside & (positions >= 0) & (positions < max_model_len) & (positions < width * block_size)
    blocks = tl.load(table_ptr + reqs * stride + positions // block_size, mask=valid, other=0).to(tl.int64)
    slots = tl.where(valid, blocks * block_size + positions % block_size, PADDING)
    tl.store(slots_ptr + rows, slots, mask=rows < num_padded_tokens)
