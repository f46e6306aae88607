"""Slot mappings: where in each KV cache group a row's key and value go.

The sequence position of a row, which is what the block table is indexed by, is not its rotary position: under M-RoPE
the two differ (vLLM issue 54498). `mtp/window.py` has it from the lengths alone.
"""

from collections.abc import Sequence

import torch
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from mtp.groups import DraftGroup


def write_slot_mappings(
    groups: Sequence[DraftGroup],
    num_reqs: int,
    req_indices: torch.Tensor,
    positions: torch.Tensor,
    max_model_len: int,
    num_padded_tokens: int,
) -> None:
    """Fills `slot_mapping[:num_padded_tokens]` of every group.

    Args:
        req_indices: `[num_tokens]` integer, each row's request.
        positions: `[num_tokens]` integer, each row's sequence position. A row outside `[0, max_model_len)` is padding.
        num_padded_tokens: rows of the pass as it is run; those past `num_tokens` are padding.

    Raises:
        RuntimeError: a group has no block table for these requests.
    """
    num_tokens = positions.shape[0]
    valid = (positions >= 0) & (positions < max_model_len)
    positions = positions.long()
    for group in groups:
        table = group.table(num_reqs)
        # A position past the table is not the row's to write either; the clamp only keeps the look-up in bounds.
        in_table = valid & (positions < table.shape[1] * group.block_size)
        block_index = (positions // group.block_size).clamp(0, table.shape[1] - 1)
        slots = table[req_indices, block_index].long() * group.block_size + positions % group.block_size
        group.slot_mapping[:num_tokens] = torch.where(in_table, slots, PADDING_SLOT_ID)
        group.slot_mapping[num_tokens:num_padded_tokens] = PADDING_SLOT_ID
