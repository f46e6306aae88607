"""From the store to the ring: the rows of all requests that finished in a step, in one gather and one copy."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from mtp.supplementary import SupplementaryStore
from proposers.hidden_states.writer import Job, Part, Ring

MAX_PIECE_BYTES = 64 << 20


class RowTransfer:
    """Copies rows out of the store.

    A batch of more than `piece_bytes` is copied in pieces of that size: the ring holds two, so that one is written
    while the next is copied, and the device holds one.

    Attributes:
        gathers, copies: how often rows were gathered, and copied from the device.

    Raises:
        ValueError: the ring can't hold two rows.
    """

    def __init__(self, store: SupplementaryStore, ring: Ring) -> None:
        self._store, self._ring = store, ring
        self._rows = store.rows.flatten(0, 1).flatten(1)
        row_bytes = self._rows.shape[1] * self._rows.dtype.itemsize
        self._piece_rows = min(len(ring.buffer) // 2, MAX_PIECE_BYTES) // row_bytes
        if not self._piece_rows:
            raise ValueError(
                f"ring_bytes={len(ring.buffer)} and the hidden states of one token take {row_bytes}: the ring has to "
                "hold two tokens at least, and holds many better."
            )
        self._row_bytes = row_bytes
        self._stream = torch.cuda.Stream(self._rows.device) if self._rows.is_cuda else None
        self.gathers = self.copies = 0

    def submit(self, batch: Sequence[tuple[Job, Sequence[int]]]) -> Callable[[], bool]:
        """Copies the rows of these jobs, whose first position is `job.info.first_position`.

        Args:
            batch: jobs, each with the block ids of its request in the store's group.

        Returns:
            says whether the store has been read, so that the blocks can be somebody else's.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._rows.device))
        parts = [self._slots(block_ids, job.info.first_position, job.info.rows) for job, block_ids in batch]
        slots = torch.from_numpy(np.concatenate(parts))
        arrived: _Arrival = _Arrival(lambda: True, lambda: None)
        spans = _Spans([job for job, _ in batch])
        for start in range(0, len(slots), self._piece_rows):
            piece = slots[start : start + self._piece_rows]
            owners = list(spans.next(len(piece)))
            region = self._ring.take(len(piece) * self._row_bytes, len(owners))
            arrived = self._copy(piece, region.memory)
            for job, first, last in owners:
                memory = region.memory[first * self._row_bytes : last * self._row_bytes]
                job.parts.put(Part(region, memory, arrived.wait))
        return arrived.query

    def _slots(self, block_ids: Sequence[int], first: int, rows: int) -> np.ndarray:
        """`[rows]` int64. In NumPy, since it is done for each request, and small operations take torch longer."""
        block_size = self._store.block_size
        first_block, skipped = divmod(first, block_size)
        blocks = np.array(block_ids[first_block : -(-(first + rows) // block_size)], dtype=np.int64)
        slots = blocks[:, None] * block_size + np.arange(block_size)
        return slots.ravel()[skipped : skipped + rows]

    def _copy(self, slots: torch.Tensor, memory: torch.Tensor) -> "_Arrival":
        host = memory.view(self._rows.dtype).view(len(slots), -1)
        self.gathers += 1
        if self._stream is None:
            torch.index_select(self._rows, 0, slots, out=host)
            return _Arrival(lambda: True, lambda: None)
        with torch.cuda.stream(self._stream):
            indices = async_tensor_h2d(slots, device=self._rows.device)
            host.copy_(self._rows.index_select(0, indices), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.copies += 1
        return _Arrival(event.query, event.synchronize)


class _Arrival(NamedTuple):
    query: Callable[[], bool]
    wait: Callable[[], Any]


class _Spans:
    """Cuts the jobs' rows, laid end to end, into pieces."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = [(job, job.info.rows) for job in jobs]

    def next(self, num_rows: int) -> Iterator[tuple[Job, int, int]]:
        """The owners of the next rows, each with its range among them."""
        first = 0
        while first < num_rows:
            job, left = self._jobs.pop(0)
            last = min(first + left, num_rows)
            if left > last - first:
                self._jobs.insert(0, (job, left - (last - first)))
            yield job, first, last
            first = last
