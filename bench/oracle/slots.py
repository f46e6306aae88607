"""The slots of the target's rows: by this package and by the host, they must be the same in every group of a proposer.

A drafter and an extractor bind their KV cache groups alike, so one check holds for both: `write_slot_mappings` of the
rows that the target runs in a step gives the slots that the host made for them.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mtp.groups import KVGroup


def count_wrong_slots(
    groups: "Iterable[KVGroup]", first_positions: Tensor, query_lens: Tensor, max_model_len: int
) -> tuple[int, int]:
    """Compares the slots of all rows of a step, in every group.

    Args:
        first_positions, query_lens: `[num_reqs]` integers, where each request's rows begin and how many they are.

    Returns:
        how many slots were compared, and how many are others than the host's.
    """
    from mtp.slots import write_slot_mappings

    query_lens = query_lens.long()
    num_reqs, num_tokens = len(query_lens), int(query_lens.sum())
    req_indices = torch.arange(num_reqs, device=query_lens.device).repeat_interleave(query_lens)
    starts = query_lens.cumsum(0) - query_lens
    positions = (first_positions - starts)[req_indices] + torch.arange(num_tokens, device=query_lens.device)
    compared = wrong = 0
    for group in groups:
        assert group.target_slot_mapping is not None, f"Group {group.kv_cache_group_id} has no slots of the host's."
        ours = replace(group, slot_mapping=torch.full_like(group.slot_mapping[:num_tokens], -7))
        write_slot_mappings([ours], num_reqs, req_indices, positions, max_model_len, num_tokens)
        hosts = group.target_slot_mapping[:num_tokens]
        compared += num_tokens
        wrong += int((ours.slot_mapping != hosts.to(ours.slot_mapping.device)).sum())
    return compared, wrong


def rows_in_forward(layer_name: str) -> tuple[Tensor, Tensor] | None:
    """`first_positions` and `query_lens` of the forward that is being run, by a layer's metadata.

    None in a forward that attends to nothing.
    """
    from vllm.forward_context import get_forward_context

    metadata: Any = (get_forward_context().attn_metadata or {}).get(layer_name)
    if metadata is None:
        return None
    query_lens = metadata.query_start_loc.long().diff()
    return metadata.seq_lens[: len(query_lens)].long() - query_lens, query_lens
