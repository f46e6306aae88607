"""From the store to the ring: the rows of all requests that finished in a step, in one gather and one copy.

Rows that the ring has no room for stay in the store, whose blocks are kept for them, and are copied in later steps: a
step waits for the disk only once a good part of the KV cache waits as well.

Of tensor-parallel ranks each has a slice of the rows in its store, and the first one the ring. All of them go through
the same pieces, whose slices are gathered on the first, and before each it tells the others whether there is room.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from mtp.slots import slots_of
from mtp.store import RowStore
from proposers.hidden_states.fp8 import quantize
from proposers.hidden_states.layout import PLAIN, RowBytes, dtype_name
from proposers.hidden_states.ring import Region, Ring
from proposers.hidden_states.slices import Slices
from proposers.hidden_states.writer import HERE, Arrival, Part, Recipient

MAX_PIECE_BYTES = 64 << 20  # of the device

# Of the KV cache's blocks that many may be kept for rows that wait. More, and requests that run would be preempted for
# want of blocks; less, and steps would wait where the requests of one step end together.
KEPT_BLOCKS = 1 / 4


class RowTransfer:
    """Copies rows out of the store.

    A batch of more than `piece_bytes` is copied in pieces of that size: the ring holds two, so that one is written
    while the next is copied, and the device holds one.

    Args:
        ring: on a rank that isn't the first, one without memory.
        encoding: how rows are stored. Those of eight bits are made here, on the device, so that half as much crosses to
            the host and waits there.
        waits: for room in the ring, where too many blocks are kept for rows. Without, no step waits for the disk, and
            the caller sees to it that there isn't much to keep.

    Attributes:
        gathers, copies: how often rows were gathered, and copied from the device.

    Raises:
        ValueError: the ring can't hold two rows.
    """

    def __init__(
        self, store: RowStore, ring: Ring, waits: bool = True, slices: Slices | None = None, encoding: str = PLAIN
    ) -> None:
        self._ring, self._waits, self._slices, self._encoding = ring, waits, slices or Slices(), encoding
        self._pieces: deque[_Piece] = deque()
        self._kept_blocks = 0
        self.gathers = self.copies = 0
        self.bind(store)

    def bind(self, store: RowStore) -> None:
        """Reads from this store from now on; what waits is copied out of the old one before."""
        self.finish()
        self._store = store
        self._rows = store.rows.flatten(0, 1)
        num_layers, slice_size = self._rows.shape[1:]
        size, dtype = slice_size * self._slices.count, dtype_name(self._rows.dtype)
        self._row = RowBytes.of(self._encoding, num_layers, size, dtype)
        row_bytes = self._row_bytes = sum(self._row)
        on_device = self._rows[0].numel() * self._rows.dtype.itemsize * self._slices.count
        self._piece_rows = min(self._ring.num_bytes // 2 // row_bytes, MAX_PIECE_BYTES // on_device)
        if not self._piece_rows:
            raise ValueError(
                f"ring_bytes={self._ring.num_bytes} and the hidden states of one token take {row_bytes}: the ring "
                "has to hold two tokens at least, and holds many better."
            )
        self._stream = torch.cuda.Stream(self._rows.device) if self._rows.is_cuda else None
        self.begin_step()

    @property
    def block_size(self) -> int:
        return self._store.block_size

    @property
    def waiting(self) -> bool:
        """Whether there are rows that the ring had no room for."""
        return bool(self._pieces)

    @property
    def waiting_bytes(self) -> int:
        """Of those rows."""
        return sum(len(piece.slots) for piece in self._pieces) * self._row_bytes

    def begin_step(self) -> None:
        """Copies of a step wait for the steps before, and not for its own forward, which has none of their rows.

        To be called before a forward in whose step rows are submitted, or wait.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._rows.device))

    def submit(self, batch: Sequence[tuple[Recipient, Sequence[int], int]]) -> list[Callable[[], bool]]:
        """Copies the rows of these jobs, whose first position is `job.info.first_position`, or has them wait.

        Args:
            batch: jobs, each with the block ids of its request in the store's group, and how many blocks of all groups
                are kept until its rows have been read.

        Returns:
            for each job, what says whether its rows have been, so that the blocks can be somebody else's.
        """
        block_size = self._store.block_size
        parts = [slots_of(block_ids, job.info.first_position, job.info.rows, block_size) for job, block_ids, _ in batch]
        slots = np.concatenate(parts)
        readings = [_Reading(job, kept_blocks, job.info.rows) for job, _, kept_blocks in batch]
        spans = _Spans(readings)
        for first in range(0, len(slots), self._piece_rows):
            piece = slots[first : first + self._piece_rows]
            self._pieces.append(_Piece(piece, list(spans.next(len(piece)))))
        self._kept_blocks += sum(reading.kept_blocks for reading in readings)
        self.advance()
        while self._waits and self._kept_blocks > KEPT_BLOCKS * len(self._store.rows):
            self._copy_next(wait=True)
        return [reading.is_done for reading in readings]

    def copy_drafts(self, slots: np.ndarray) -> torch.Tensor:
        """Asks for the drafts at these slots `[num_steps]`: they are there when rows that are submitted later are.

        Returns:
            `[num_steps, num_drafts]` int32.
        """
        assert self._store.drafts is not None
        drafts, indices = self._store.drafts.flatten(0, 1).flatten(1), torch.from_numpy(slots)
        if self._stream is None:
            return drafts.index_select(0, indices)
        host = torch.empty(len(slots), drafts.shape[1], dtype=drafts.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(drafts.index_select(0, async_tensor_h2d(indices, device=drafts.device)), non_blocking=True)
        return host

    def advance(self) -> None:
        """Copies of what waits as much as the ring has room for."""
        while self._pieces and self._copy_next(wait=False):
            pass

    def finish(self) -> None:
        """Copies all that waits, and waits for room."""
        try:
            while self._pieces:
                self._copy_next(wait=True)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Tells the writers that nothing more will come."""
        for piece in self._pieces:
            for reading, *_ in piece.owners:
                reading.job.put(None)
        self._pieces.clear()

    def _copy_next(self, wait: bool) -> bool:
        """Copies the piece whose turn it is, and says whether there was room for it."""
        piece = self._pieces[0]
        region = self._take_room(piece, wait) if self._slices.is_first else None
        if not self._slices.as_the_first_says(region is not None):
            return False
        try:
            arrived = self._copy(piece.slots, region)
        except BaseException:
            self._give_up()
            raise
        self._pieces.popleft()
        for reading, first, last in piece.owners:
            if region is not None:
                reading.job.put(Part(region, *self._places(len(piece.slots), first, last), arrived))
            if reading.copied(last - first, arrived.query):
                self._kept_blocks -= reading.kept_blocks
        return True

    def _take_room(self, piece: "_Piece", wait: bool) -> Region | None:
        size = len(piece.slots) * self._row_bytes, len(piece.owners)
        return self._ring.take(*size) if wait else self._ring.take_now(*size)

    def _copy(self, slots: npt.NDArray[np.int64], region: Region | None) -> Arrival:
        self.gathers += 1
        if self._stream is None:
            self._copy_on_host(torch.from_numpy(slots), region)
            return HERE
        rows = None
        if self._slices.count > 1:
            # A collective takes its turn among the model's: two that run at once may wait for each other.
            rows = self._gather(slots)
            self._stream.wait_stream(torch.cuda.current_stream(self._rows.device))
        with torch.cuda.stream(self._stream):
            if self._slices.count == 1:
                rows = self._gather(slots)
            if rows is not None:
                rows.record_stream(self._stream)
                self._copy_encoded(self._encode(rows), region)
                self.copies += 1
            event = torch.cuda.Event()
            event.record(self._stream)
        return Arrival(event.query, event.synchronize)

    def _copy_on_host(self, slots: torch.Tensor, region: Region | None) -> None:
        if region is not None and self._slices.count == 1 and not self._row.scales:
            host = region.memory.view(self._rows.dtype).view(len(slots), *self._rows.shape[1:])
            torch.index_select(self._rows, 0, slots, out=host)
        elif (rows := self._slices.assemble(self._rows.index_select(0, slots))) is not None:
            self._copy_encoded(self._encode(rows), region)

    def _gather(self, slots: npt.NDArray[np.int64]) -> torch.Tensor | None:
        """Whole rows on the first rank, as of `Slices.assemble`."""
        indices = async_tensor_h2d(slots, device=self._rows.device)
        return self._slices.assemble(self._rows.index_select(0, indices))

    def _encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Whole rows `[num_rows, num_layers, hidden_size]` as they are stored: values, and scales if there are any."""
        return quantize(rows) if self._row.scales else (rows,)

    def _copy_encoded(self, encoded: tuple[torch.Tensor, ...], region: Region | None) -> None:
        assert region is not None  # the rank that has the rows has the ring
        num_rows = len(encoded[0])
        for place, part in zip(self._places(num_rows, 0, num_rows), encoded, strict=False):
            memory = region.memory[place.start : place.stop]
            memory.copy_(part.reshape(-1).view(torch.uint8), non_blocking=True)

    def _places(self, num_rows: int, first: int, last: int) -> tuple[range, range]:
        """Of a region of so many rows, where the values of `[first, last)` lie, and where their scales do."""
        values, scales = self._row
        behind = num_rows * values
        return range(first * values, last * values), range(behind + first * scales, behind + last * scales)


class _Reading:
    """A job's rows on their way out of the store; `rows` is how many are still to be copied."""

    def __init__(self, job: Recipient, kept_blocks: int, rows: int) -> None:
        self.job, self.kept_blocks, self.rows = job, kept_blocks, rows
        self._arrived: Callable[[], bool] | None = None

    def is_done(self) -> bool:
        return self._arrived is not None and self._arrived()

    def copied(self, rows: int, arrived: Callable[[], bool]) -> bool:
        """Counts rows whose copy has been asked for; whether they were the last."""
        self.rows -= rows
        if not self.rows:
            self._arrived = arrived
        return not self.rows


class _Piece(NamedTuple):
    """Rows that are copied at once.

    Attributes:
        slots: `[num_rows]` int64.
        owners: each with its range among them.
    """

    slots: npt.NDArray[np.int64]
    owners: list[tuple[_Reading, int, int]]


class _Spans:
    """Cuts the jobs' rows, laid end to end, into pieces."""

    def __init__(self, readings: Sequence[_Reading]) -> None:
        self._left = deque((reading, reading.rows) for reading in readings)

    def next(self, num_rows: int) -> Iterator[tuple[_Reading, int, int]]:
        """The owners of the next rows, each with its range among them."""
        first = 0
        while first < num_rows:
            reading, left = self._left.popleft()
            last = min(first + left, num_rows)
            if left > last - first:
                self._left.appendleft((reading, left - (last - first)))
            yield reading, first, last
            first = last
