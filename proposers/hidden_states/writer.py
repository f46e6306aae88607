"""From host memory to disk: a ring that bounds what waits there, and threads that write it.

The engine's thread takes room in the ring, has rows copied into it and hands them on; a writer thread waits for the
copy, writes, and gives the room back. The ring is all the memory there is: when the disk is slower than the model, rows
wait where they are (`RowTransfer`).
"""

import json
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from proposers.hidden_states import fp8
from proposers.hidden_states.record import DTYPES, SCHEMA, SHARD_SUFFIX, RecordInfo, safetensors_header
from proposers.hidden_states.storage import Storage

logger = logging.getLogger("vllm.proposers.hidden_states")

SHARD_HEADER_BYTES = 1 << 20


class Written(NamedTuple):
    """What became of a record: where it is, or why it isn't."""

    request_id: str
    path: str | None
    name: str | None
    error: str | None
    num_bytes: int


class Region:
    """Bytes `[start, stop)` of the ring, until everyone who was given a part has released it."""

    def __init__(self, ring: "Ring", start: int, stop: int, users: int) -> None:
        self.ring, self.start, self.stop, self.users = ring, start, stop, users

    @property
    def memory(self) -> torch.Tensor:
        """`[num_bytes]` uint8."""
        return self.ring.buffer[self.start : self.stop]

    def release(self) -> None:
        self.ring.release(self)


class Ring:
    """A fixed amount of host memory, handed out in order and taken back in any.

    Args:
        device: `meta`: no memory, for a rank that has to know no more than how much the first one has.

    Attributes:
        buffer: `[num_bytes]` uint8.
        peak_bytes: the most that was in use at one time.
    """

    def __init__(self, num_bytes: int, pinned: bool, device: str = "cpu") -> None:
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned, device=device)
        self.peak_bytes = 0
        self._regions: deque[Region] = deque()
        self._changed = threading.Condition()

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
                self._changed.wait()
            return region

    def take_now(self, num_bytes: int, users: int) -> Region | None:
        """Room for that many bytes, or None while there isn't.

        Raises:
            ValueError: there never will be.
        """
        if num_bytes > len(self.buffer):
            raise ValueError(f"{num_bytes} bytes were asked of a ring of {len(self.buffer)}.")
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
            if newest + num_bytes <= len(self.buffer):
                return newest
            return 0 if num_bytes <= oldest else None
        return newest if newest + num_bytes <= oldest else None


class Part(NamedTuple):
    """Consecutive rows of one record in a region.

    Attributes:
        values, scales: `[num_bytes]` uint8, as they are stored; of rows in eight bits alone there are scales.
        wait: returns when the rows have arrived.
    """

    region: Region
    values: torch.Tensor
    scales: torch.Tensor
    wait: Callable[[], Any]


@dataclass(slots=True)
class Job:
    """One record to write; its rows come as parts, in order, and None says that no more will come.

    Attributes:
        name: path under the storage root without suffix, or the name within a shard.
        replace: the name is the connector's own, so nobody else has it.
        row_shape: `[L, H]`.
        extras: int32 tensors that come after the rows, name and shape of each.
        read_extras: gives them by name, once the rows have arrived.
    """

    name: str
    replace: bool
    info: RecordInfo
    token_ids: Sequence[int]
    row_shape: tuple[int, int]
    extras: Sequence[tuple[str, Sequence[int]]] = ()
    read_extras: Callable[[], Mapping[str, torch.Tensor]] | None = None
    parts: "queue.SimpleQueue[Part | None]" = field(default_factory=queue.SimpleQueue)
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = self.info.rows * self._row.values

    @property
    def _row(self) -> fp8.RowBytes:
        return fp8.RowBytes.of(self.info.encoding, *self.row_shape, getattr(torch, self.info.dtype))

    @property
    def row_bytes(self) -> int:
        """Bytes of all hidden states."""
        return self.info.rows * sum(self._row)

    def tensors(self, prefix: str = "") -> list[tuple[str, str, Sequence[int], int]]:
        """The record's tensors as `safetensors_header` wants them."""
        rows, (layers, hidden_size) = self.info.rows, self.row_shape
        token_ids = (f"{prefix}token_ids", "I64", (rows,), rows * 8)
        dtype = "F8_E4M3" if self._row.scales else DTYPES[self.info.dtype]
        of_rows = [(f"{prefix}hidden_states", dtype, (rows, layers, hidden_size), rows * self._row.values)]
        if self._row.scales:
            of_rows.append((f"{prefix}{fp8.SCALES}", "F32", (rows, layers, 1), rows * self._row.scales))
        extras = [(f"{prefix}{name}", "I32", shape, 4 * math.prod(shape)) for name, shape in self.extras]
        return [token_ids, *of_rows, *extras]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all that is written but the token ids."""
        return sum(num_bytes for *_, num_bytes in self.tensors()[1:])

    def chunks(self) -> Generator[memoryview, None, None]:
        """The tensors' bytes in that order. Rows are released when the next is asked for or the iterator closed."""
        yield _bytes_of(torch.tensor(self.token_ids, dtype=torch.int64))
        scales = []
        with closing(self._parts()) as parts:
            for part in parts:
                scales.append(part.scales.clone())  # they come after all values, and the room is given back
                yield _bytes_of(part.values)
        yield from map(_bytes_of, scales)
        values = {} if self.read_extras is None else self.read_extras()
        for name, _ in self.extras:
            yield _bytes_of(values[name].contiguous())

    def _parts(self) -> Generator[Part, None, None]:
        """The hidden states as they come, whole rows each. They are released when the next are asked for."""
        while self.missing:
            part = self.parts.get()
            if part is None:
                self.missing = 0
                raise RuntimeError("the engine failed before all rows were copied")
            self.missing -= len(part.values)
            try:
                part.wait()
                yield part
            finally:
                part.region.release()

    def drop(self) -> None:
        """Takes what is still to come and releases it."""
        for _ in self._parts():
            pass


class Sink(Protocol):
    """Where a writer thread writes. Each thread has one of its own."""

    def write(self, job: Job) -> list[Written]:
        """Writes one record and returns the records that are now in place, or failed; it raises nothing."""
        ...

    def flush(self, age: float) -> list[Written]:
        """Puts in place what has waited for that many seconds or longer."""
        ...


class FileSink:
    """A file per record, with a lock file beside it if somebody wants to take one."""

    def __init__(self, storage: Storage, lock_files: bool = False) -> None:
        self._storage, self._lock_files = storage, lock_files

    def write(self, job: Job) -> list[Written]:
        try:
            path, num_bytes = self._write(job)
        except Exception as error:
            job.drop()
            return [_failed(job, error)]
        return [Written(job.info.request_id, str(path), None, None, num_bytes)]

    def _write(self, job: Job) -> tuple[Path, int]:
        descriptor, temporary = self._storage.create()
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(safetensors_header(job.tensors(), job.info.to_metadata()))
                _write_all(file, job)
                _sync(file)
                num_bytes = file.tell()
            if self._lock_files:
                self._storage.touch(f"{job.name}.safetensors.lock")
            return self._storage.publish(temporary, f"{job.name}.safetensors", job.replace), num_bytes
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def flush(self, age: float) -> list[Written]:
        return []


class ShardSink:
    """Many records per file. The header has its room at the start, and is written last.

    What it needs to be closed it takes when it is opened, so that a disk that fills up meanwhile costs the records that
    didn't fit and no others.
    """

    def __init__(self, storage: Storage, shard_bytes: int) -> None:
        self._storage, self._shard_bytes = storage, shard_bytes
        self._file: Any = None
        self._shards = 0

    def write(self, job: Job) -> list[Written]:
        done, room = [], _header_room(job)
        if self._file is not None and (job.name in self._records or self._header_room < room):
            done += self.flush(0)
        try:
            if self._file is None:
                self._open()
            self._append(job)
        except Exception as error:
            job.drop()
            done.append(_failed(job, error))
            return done + self.flush(0) if self._file is not None and self._file.closed else done
        self._records[job.name] = job
        self._header_room -= room
        if self._file.tell() - SHARD_HEADER_BYTES >= self._shard_bytes:
            done += self.flush(0)
        return done

    def _open(self) -> None:
        self._storage.make_folder(self._storage.run)
        descriptor, self._temporary = self._storage.create()
        file = os.fdopen(descriptor, "wb")
        try:
            file.write(bytes(SHARD_HEADER_BYTES))
            _sync(file)
        except OSError:
            with suppress(OSError):
                file.close()
            self._temporary.unlink()
            raise
        self._file = file
        self._records: dict[str, Job] = {}
        self._header_room = SHARD_HEADER_BYTES - len(json.dumps({"schema": SCHEMA})) - 256
        self._opened = time.monotonic()

    def _append(self, job: Job) -> None:
        start = self._file.tell()
        try:
            _write_all(self._file, job)
            self._file.flush()
        except OSError:
            self._cut(start)
            raise

    def _cut(self, length: int) -> None:
        """Takes a record that could not be written off the end."""
        with suppress(OSError):  # what the buffer still holds is what could not be written
            self._file.close()
        descriptor = os.open(self._temporary, os.O_WRONLY)
        os.ftruncate(descriptor, length)
        self._file = os.fdopen(descriptor, "wb")
        self._file.seek(length)

    def flush(self, age: float) -> list[Written]:
        if self._file is None or time.monotonic() - self._opened < age:
            return []
        records, file, self._file = self._records, self._file, None
        try:
            path = self._close(file, records) if records else None
        except Exception as error:
            return [_failed(job, error) for job in records.values()]
        finally:
            with suppress(OSError):
                file.close()
            with suppress(OSError):
                self._temporary.unlink()
        return [Written(j.info.request_id, str(path), name, None, j.stored_bytes) for name, j in records.items()]

    def _close(self, file: Any, records: dict[str, Job]) -> Path:
        tensors = [tensor for name, job in records.items() for tensor in job.tensors(f"{name}.")]
        infos = {name: job.info.to_metadata() for name, job in records.items()}
        metadata = {"schema": SCHEMA, "records": json.dumps(infos)}
        file.seek(0)
        file.write(safetensors_header(tensors, metadata, SHARD_HEADER_BYTES))
        _sync(file)
        self._shards += 1
        return self._storage.publish(self._temporary, f"{self._storage.run}/{self._shards:06d}{SHARD_SUFFIX}", True)


class Writers:
    """The threads, and what became of the records.

    Attributes:
        pending: records that were submitted and not reported yet.
    """

    def __init__(self, sinks: Sequence[Sink], max_age: float) -> None:
        self.pending = 0
        self._max_age = max_age
        self._jobs: queue.SimpleQueue[Job | float | None] = queue.SimpleQueue()
        self._results: list[Written] = []
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=self._run, args=(sink,), daemon=True) for sink in sinks]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Its parts may follow later."""
        with self._changed:
            self.pending += 1
        self._jobs.put(job)

    def flush(self) -> None:
        """Has open shards closed, however little is in them."""
        if self.pending:
            self._jobs.put(0.0)

    def take_results(self, timeout: float = 0.0) -> list[Written]:
        """What was reported since the last call. Where that is nothing, waits so long for a first report."""
        with self._changed:
            if timeout and self.pending:
                self._changed.wait_for(lambda: self._results, timeout)
            results, self._results = self._results, []
            self.pending -= len(results)
            return results

    def close(self) -> None:
        """Writes what was submitted in full, and ends the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, sink: Sink) -> None:
        job: Job | float | None = self._max_age
        while job is not None:
            if isinstance(job, Job):
                self._report(sink.write(job))
            self._report(sink.flush(job if isinstance(job, float) else self._max_age))
            try:
                job = self._jobs.get(timeout=self._max_age)
            except queue.Empty:
                job = self._max_age
        self._report(sink.flush(0))

    def _report(self, results: list[Written]) -> None:
        for result in results:
            if result.error:
                log_failure(result.request_id, result.error)
        if results:
            with self._changed:
                self._results += results
                self._changed.notify_all()


def log_failure(request_id: str, error: str) -> None:
    logger.error("The hidden states of request %s were not written: %s", request_id, error)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _failed(job: Job, error: Exception) -> Written:
    return Written(job.info.request_id, None, None, f"{type(error).__name__}: {error}", 0)


def _write_all(file: Any, job: Job) -> None:
    with closing(job.chunks()) as chunks:
        for chunk in chunks:
            file.write(chunk)


def _header_room(job: Job) -> int:
    """What a record adds to a shard's header at most."""
    metadata = {"records": json.dumps({job.name: job.info.to_metadata()})}
    return len(safetensors_header(job.tensors(f"{job.name}."), metadata)) + 64  # its offsets may have more digits


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
