"""Which finished requests get a record: all of it or none of it, and why not.

Beside a drafting method serving comes first: a record that the disk, a budget or a quota has no room for is skipped
whole, and counted by its reason. Nothing here waits.
"""

import logging
import os
import threading
import time
import zlib
from collections.abc import Callable

from proposers.hidden_states.request import Settings

logger = logging.getLogger("vllm.proposers.hidden_states")

SAMPLING, BUDGET, QUOTA, LAG, LOADED = "sampling", "budget", "quota", "lag", "loaded"

REASONS = {
    SAMPLING: "it was not among the share that `sample_rate` takes",
    BUDGET: "`bytes_per_second` were spent",
    QUOTA: "`disk_quota_bytes` are in use",
    LAG: "the disk is behind by as much as the ring holds",
    LOADED: "another KV connector loaded keys and values of its prefix, which come without hidden states",
}

# How often a folder is counted anew that has no room left.
RECOUNT_S = 5.0


class Admission:
    """Decides in the scheduler, when a request has ended.

    Attributes:
        backlog_bytes: of records that were admitted and are not written yet, as far as is known here.
        quota_reached: the last record that was asked for had no room under the quota.
    """

    def __init__(self, settings: Settings, waits: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._sample_rate = settings.sample_rate
        self._max_backlog = None if waits else settings.ring_bytes
        self._budget = None if settings.bytes_per_second is None else _Budget(settings.bytes_per_second, clock)
        self._quota = settings.disk_quota_bytes
        self._usage = None if self._quota is None else _DiskUsage(settings.storage_root, clock)
        self._admitted_bytes = self._drained_bytes = 0
        self._in_flight: dict[str, int] = {}
        self.quota_reached = False

    @property
    def backlog_bytes(self) -> int:
        return self._admitted_bytes - self._drained_bytes

    @property
    def num_in_flight(self) -> int:
        """Records that were admitted and of which it is not known yet what became of them."""
        return len(self._in_flight)

    def is_sampled(self, request_id: str) -> bool:
        """Whether a request that doesn't ask for a record is in the share; the same answer each time."""
        return zlib.crc32(request_id.encode()) < self._sample_rate * 2**32

    def admit(self, request_id: str, num_bytes: int) -> str | None:
        """Admits a record of that size, or says why it is skipped."""
        reason = self._why_not(num_bytes)
        if reason is None:
            self._admitted_bytes += num_bytes
            self._in_flight[request_id] = num_bytes
            if self._budget is not None:
                self._budget.spend(num_bytes)
            if self._usage is not None:
                self._usage.added += num_bytes
        return reason

    def _why_not(self, num_bytes: int) -> str | None:
        if not self._has_room_on_disk(num_bytes):
            return QUOTA
        # A record that is longer than the ring goes out in pieces, and alone.
        if self._max_backlog is not None and 0 < self.backlog_bytes > self._max_backlog - num_bytes:
            return LAG
        if self._budget is not None and not self._budget.allows():
            return BUDGET
        return None

    def _has_room_on_disk(self, num_bytes: int) -> bool:
        if self._usage is None or self._quota is None:
            return True
        full = self._usage.num_bytes + num_bytes > self._quota
        if full:
            self._usage.count_again(sum(self._in_flight.values()))
        if full != self.quota_reached:
            self.quota_reached = full
            if full:
                logger.warning(
                    "disk_quota_bytes=%d are in use under the storage root: no more records are written, and requests "
                    "are served as before. Move records away, or raise the quota.",
                    self._quota,
                )
            else:
                logger.info("There is room under disk_quota_bytes=%d again: records are written.", self._quota)
        return not full

    def drained(self, num_bytes: int) -> None:
        """Takes note of how many bytes of all admitted ones have left the worker's memory by now."""
        self._drained_bytes = num_bytes

    def settle(self, request_id: str, written_bytes: int) -> None:
        """Takes note of what became of a record: how many bytes it takes on the disk, 0 where it failed."""
        num_bytes = self._in_flight.pop(request_id, 0)
        if self._usage is not None:
            self._usage.added += written_bytes - num_bytes


class _Budget:
    """Bytes per second, with what a second brings saved up at most. The last record may overdraw it."""

    def __init__(self, bytes_per_second: int, clock: Callable[[], float]) -> None:
        self._rate, self._clock = bytes_per_second, clock
        self._balance, self._seen = float(bytes_per_second), clock()

    def allows(self) -> bool:
        now = self._clock()
        self._balance = min(self._balance + (now - self._seen) * self._rate, self._rate)
        self._seen = now
        return self._balance > 0

    def spend(self, num_bytes: int) -> None:
        self._balance -= num_bytes


class _DiskUsage:
    """Bytes under a folder: those counted last, and what was added since.

    Attributes:
        added: to be changed by who adds.
    """

    def __init__(self, folder: str, clock: Callable[[], float]) -> None:
        self._folder, self._clock = folder, clock
        self._counted, self.added = _bytes_under(folder), 0
        self._last_count = clock()
        self._recount: list[int] | None = None

    @property
    def num_bytes(self) -> int:
        if self._recount:
            self._counted, self._recount = self._recount[0], None
            self.added -= self._added_before
        return self._counted + self.added

    def count_again(self, in_flight: int) -> None:
        """Counts in a thread, unless that was done a moment ago. What is in flight may be counted twice, not missed."""
        if self._recount is not None or self._clock() - self._last_count < RECOUNT_S:
            return
        self._last_count = self._clock()
        self._recount, self._added_before = [], self.added - in_flight
        found = self._recount
        threading.Thread(target=lambda: found.append(_bytes_under(self._folder)), daemon=True).start()


def _bytes_under(folder: str) -> int:
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(here, name)).st_size
            except FileNotFoundError:  # a temporary file that has its name by now
                continue
    return total
