"""Slices of the hidden dimension, one for each tensor-parallel rank, and the whole rows on the first.

Rows are read out by collectives, which all ranks have to enter in the same order. What they read follows from a step's
metadata, which all have alike; only when there is room for it is known to the first rank alone, who has the ring, and
says so to the others before each gather. So none is ever two gathers ahead of it, which vLLM's collectives on the CPU
don't bear: the first rank would wait forever for one that has moved on.
"""

from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group


class Slices:
    """The ranks that each have a slice; a single one has all.

    Attributes:
        count: how many.
        is_first: whether this is the rank that has rows assembled.
    """

    def __init__(self, count: int = 1, device: torch.device | None = None) -> None:
        self.count = count
        self._group: Any = None if count == 1 else get_tp_group()
        self.is_first = self._group is None or self._group.rank_in_group == 0
        # The first collective of a group on CUDA makes its communicator, which takes a request's time.
        self.as_the_first_says(True)
        self.assemble(torch.zeros(1, 1, 1, device=device))

    def as_the_first_says(self, answer: bool) -> bool:
        """The first rank's answer, on all of them; the others wait for it, however long."""
        if self._group is None:
            return answer
        said: bool = self._group.broadcast_object(answer if self.is_first else None)
        return said

    def assemble(self, slices: torch.Tensor) -> torch.Tensor | None:
        """Whole rows.

        Args:
            slices: `[num_rows, num_layers, slice_size]`, of the same rows on all ranks.

        Returns:
            `[num_rows, num_layers, hidden_size]` on the first rank, None on the others.
        """
        if self._group is None:
            return slices
        rows: torch.Tensor | None = self._group.gather(slices, dst=0, dim=-1)
        return rows
