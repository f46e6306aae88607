"""Slots: where in a KV cache group a row lies.

The slot of the row at sequence position p is `block_table[p // block_size] * block_size + p % block_size`. All slot
arithmetic of the package is here: `write_slot_mappings` for the rows of a pass, on the device, and `slots_of` for a
reader of rows, on the host.

The sequence position of a row, which is what the block table is indexed by, is not its rotary position: under M-RoPE
the two differ (vLLM issue 54498). `mtp/window.py` has it from the lengths alone.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mtp.groups import KVGroup
from mtp.kernels.slots import write_slots


def write_slot_mappings(
    groups: Sequence[KVGroup],
    num_reqs: int,
    req_indices: torch.Tensor,
    positions: torch.Tensor,
    max_model_len: int,
    num_padded_tokens: int,
) -> None:
    """Fills `slot_mapping[:num_padded_tokens]` of every group, on CUDA in one launch for all of them.

    Args:
        req_indices: `[num_tokens]` integer, each row's request.
        positions: `[num_tokens]` integer, each row's sequence position. A row outside `[0, max_model_len)` is padding.
        num_padded_tokens: rows of the pass as it is run; those past `num_tokens` are padding.

    Raises:
        RuntimeError: a group has no block table for these requests.
    """
    tables = [group.table(num_reqs) for group in groups]
    block_sizes = [group.block_size for group in groups]
    outputs = [group.slot_mapping for group in groups]
    write_slots(tables, block_sizes, outputs, req_indices, positions, max_model_len, num_padded_tokens)


def slots_of(block_ids: Sequence[int], first: int, count: int, block_size: int) -> npt.NDArray[np.int64]:
    """The slots `[count]` of a request's rows at the positions `[first, first + count)`.

    In NumPy, since a reader needs them for each request, and small operations take torch longer.

    Args:
        block_ids: of the request, in the group's order.
        block_size: tokens per block of those ids.

    Raises:
        ValueError: the request has fewer blocks.
    """
    first_block, skipped = divmod(first, block_size)
    end_block = -(-(first + count) // block_size)
    if end_block > len(block_ids):
        raise ValueError(
            f"The positions [{first}, {first + count}) reach into block {end_block - 1} of a request that has "
            f"{len(block_ids)} blocks of {block_size} tokens."
        )
    blocks = np.array(block_ids[first_block:end_block], dtype=np.int64)
    slots = blocks[:, None] * block_size + np.arange(block_size)
    return slots.ravel()[skipped : skipped + count]
