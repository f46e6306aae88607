"""Host memory that bounds what waits for the disk, shared with the process that writes it.

The engine's thread takes room, has rows copied into it and hands them on; who has written them gives the room back.
The ring is all the memory there is: when the disk is slower than the model, rows wait where they are (`RowTransfer`).
"""

import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("vllm.proposers.hidden_states")


class Region:
    """Bytes `[start, stop)` of the ring, until everyone who was given a part has released it."""

    def __init__(self, ring: "Ring", start: int, stop: int, users: int) -> None:
        self.ring, self.start, self.stop, self.users = ring, start, stop, users

    @property
    def memory(self) -> torch.Tensor:
        """`[num_bytes]` uint8."""
        return self.ring.buffer[self.start : self.stop]

    def bytes_of(self, start: int, stop: int) -> memoryview:
        """Those from `start` to `stop` within the region."""
        return self.ring.memory[self.start + start : self.start + stop]

    def release(self) -> None:
        self.ring.release(self)


class Ring:
    """A fixed amount of host memory, handed out in order and taken back in any.

    Args:
        pinned: for copies from a CUDA device.
        has_memory: False for a rank that has to know no more than how much the first one has.

    Attributes:
        num_bytes: of it all.
        buffer: `[num_bytes]` uint8.
        memory: the same bytes.
        descriptor: of a file that they are, for another process to map.
        peak_bytes: the most that was in use at one time.
        await_release: called where there is no room, and returns when some may have been given back.
    """

    def __init__(self, num_bytes: int, pinned: bool, has_memory: bool = True) -> None:
        self.num_bytes, self.peak_bytes = num_bytes, 0
        self._regions: deque[Region] = deque()
        self._changed = threading.Condition()
        self.await_release: Callable[[], Any] = self._changed.wait
        if not has_memory:
            self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
            return
        self.descriptor = _file_without_name()
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, num_bytes)
        mapped = mmap.mmap(self.descriptor, num_bytes)
        self.memory = memoryview(mapped)
        self.buffer = torch.frombuffer(mapped, dtype=torch.uint8)
        if pinned:
            self._pin()

    def _pin(self) -> None:
        runtime, address = torch.cuda.cudart(), self.buffer.data_ptr()
        if error := runtime.cudaHostRegister(address, self.num_bytes, 0).value:
            logger.warning(
                "CUDA could not pin the %d bytes of ring_bytes (error %d), so the engine waits while hidden states are "
                "copied to the host. Allow more locked memory (ulimit -l), or make ring_bytes smaller.",
                self.num_bytes,
                error,
            )
            return
        weakref.finalize(self, runtime.cudaHostUnregister, address)

    @property
    def used_bytes(self) -> int:
        """How much is in use now."""
        with self._changed:
            return sum(region.stop - region.start for region in self._regions)

    def take(self, num_bytes: int, users: int) -> Region:
        """Room for that many bytes, and waits until there is.

        Raises:
            ValueError: there never will be.
        """
        with self._changed:
            while (region := self.take_now(num_bytes, users)) is None:
                self.await_release()
            return region

    def take_now(self, num_bytes: int, users: int) -> Region | None:
        """Room for that many bytes, or None while there isn't.

        Raises:
            ValueError: there never will be.
        """
        if num_bytes > self.num_bytes:
            raise ValueError(f"{num_bytes} bytes were asked of a ring of {self.num_bytes}.")
        with self._changed:
            start = self._room(num_bytes)
            if start is None:
                return None
            region = Region(self, start, start + num_bytes, users)
            self._regions.append(region)
            self.peak_bytes = max(self.peak_bytes, sum(r.stop - r.start for r in self._regions))
            return region

    def release(self, region: Region) -> None:
        with self._changed:
            region.users -= 1
            while self._regions and self._regions[0].users == 0:
                self._regions.popleft()
            self._changed.notify_all()

    def _room(self, num_bytes: int) -> int | None:
        if not self._regions:
            return 0
        oldest, newest = self._regions[0].start, self._regions[-1].stop
        if newest > oldest:
            if newest + num_bytes <= self.num_bytes:
                return newest
            return 0 if num_bytes <= oldest else None
        return newest if newest + num_bytes <= oldest else None


def _file_without_name() -> int:
    """In memory, where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("hidden-states-ring")
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    return descriptor
