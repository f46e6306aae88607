"""`GroupProposer`: what a drafter and a hidden-state extractor have in common.

A proposer binds KV cache groups of the host once the cache is allocated, again whenever it is allocated anew, and
writes rows at slots of these groups in every step. What it writes is its own: a drafter the keys and values of its
layers at the rows of a window (`mtp/passes.py`), the extractor the target's residual stream at the target's rows
(`mtp/store.py`).
"""

import torch

from mtp.groups import KVGroups


class GroupProposer:
    """The base of all proposers, beside whatever class of a runner's they need.

    Attributes:
        groups: None until they are bound.
    """

    groups: KVGroups | None = None

    def bind_groups(self, groups: KVGroups) -> None:
        """Takes the groups of a KV cache that was just allocated, in place of an earlier one's."""
        self.release_captured()  # it holds addresses of the earlier cache
        self.groups = groups

    @property
    def bound_groups(self) -> KVGroups:
        """The groups.

        Raises:
            RuntimeError: they are not bound.
        """
        if self.groups is None:
            raise RuntimeError(
                f"The KV cache groups of {type(self).__name__} are not bound. The host does that once its KV cache is "
                "allocated: it has to call initialize_attn_backend, or set_attn on the V2 runner, before a draft."
            )
        return self.groups

    def set_per_group_attn_metadata(self, gid: int, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Takes the block table of one KV cache group, and the slots of the target's rows, for the coming step.

        Args:
            block_table: `[num_reqs, max_blocks]` int32.
            slot_mapping: `[num_tokens]` int64.
        """
        self.bound_groups.bind(gid, block_table, slot_mapping)

    def warm_up(self, num_rows: int) -> None:
        """Runs the forwards that a step of so many rows has, attending to nothing, for the host's memory profile.

        None, for a proposer that has no model of its own.
        """

    def release_captured(self) -> None:
        """Drops CUDA graphs of the proposer's own, where it has any."""

    def shutdown(self) -> None:
        """To be called before the communicators of tensor-parallel ranks are destroyed: NCCL waits for their graphs."""
        self.release_captured()
