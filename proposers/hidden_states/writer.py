"""From host memory to disk: what is to be written, files and shards of it, and the threads that write them.

They run in a process of their own (`writer_process.py`), which is why neither torch nor vLLM is imported here.
"""

import json
import math
import os
import queue
import threading
import time
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from proposers.hidden_states.layout import (
    DTYPES,
    SCALES,
    SCHEMA,
    SHARD_SUFFIX,
    RecordInfo,
    RowBytes,
    safetensors_header,
)
from proposers.hidden_states.storage import Storage

SHARD_HEADER_BYTES = 1 << 20


class Written(NamedTuple):
    """What became of a record: where it is, or why it isn't."""

    request_id: str
    path: str | None
    name: str | None
    error: str | None
    num_bytes: int


class Room(Protocol):
    """A region of the ring, which begins at its byte `start`, here or in the engine's process."""

    start: int

    def bytes_of(self, start: int, stop: int) -> memoryview: ...

    def release(self) -> None: ...


class Arrival(NamedTuple):
    """Of rows in a region: whether they have arrived, and what returns when they have."""

    query: Callable[[], bool]
    wait: Callable[[], Any]


HERE = Arrival(lambda: True, lambda: None)


class Part(NamedTuple):
    """Consecutive rows of one record in a region.

    Attributes:
        values, scales: where in the region, as they are stored; of rows in eight bits alone there are scales.
    """

    region: Room
    values: range
    scales: range
    arrival: Arrival = HERE


class Recipient(Protocol):
    """Takes a record's rows, in order, and None where no more will come."""

    @property
    def info(self) -> RecordInfo: ...

    def put(self, part: Part | None) -> None: ...


@dataclass(slots=True)
class Job:
    """One record to write.

    Attributes:
        name: path under the storage root without suffix, or the name within a shard.
        replace: the name is the connector's own, so nobody else has it.
        row_shape: `[L, H]`.
        extras: int32 tensors that come after the rows, name and shape of each.
        read_extras: gives their bytes by name, once the rows have arrived.
    """

    name: str
    replace: bool
    info: RecordInfo
    token_ids: Sequence[int]
    row_shape: tuple[int, int]
    extras: Sequence[tuple[str, Sequence[int]]] = ()
    read_extras: Callable[[], Mapping[str, bytes]] | None = None
    _parts: "queue.SimpleQueue[Part | None]" = field(init=False, repr=False, default_factory=queue.SimpleQueue)
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = self.info.rows * self._row.values

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process it goes without its rows, and without what gives the extras here."""
        return Job, (self.name, self.replace, self.info, self.token_ids, self.row_shape, self.extras)

    @property
    def _row(self) -> RowBytes:
        return RowBytes.of(self.info.encoding, *self.row_shape, self.info.dtype)

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
            of_rows.append((f"{prefix}{SCALES}", "F32", (rows, layers, 1), rows * self._row.scales))
        extras = [(f"{prefix}{name}", "I32", shape, 4 * math.prod(shape)) for name, shape in self.extras]
        return [token_ids, *of_rows, *extras]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all that is written but the token ids."""
        return sum(num_bytes for *_, num_bytes in self.tensors()[1:])

    def put(self, part: Part | None) -> None:
        """The next rows; None: no more will come."""
        self._parts.put(part)

    def chunks(self) -> Generator[bytes | memoryview, None, None]:
        """The tensors' bytes in that order. Rows are released when the next is asked for or the iterator closed."""
        yield memoryview(array("q", self.token_ids)).cast("B")
        scales = []
        with closing(self.take_parts()) as parts:
            for part in parts:
                # They come after all values, and the room is given back.
                scales.append(bytes(part.region.bytes_of(part.scales.start, part.scales.stop)))
                yield part.region.bytes_of(part.values.start, part.values.stop)
        yield from scales
        extras = {} if self.read_extras is None else self.read_extras()
        for name, _ in self.extras:
            yield extras[name]

    def take_parts(self) -> Generator[Part, None, None]:
        """The hidden states as they come, whole rows each. They are released when the next are asked for."""
        while self.missing:
            part = self._parts.get()
            if part is None:
                self.missing = 0
                raise RuntimeError("the engine failed before all rows were copied")
            self.missing -= len(part.values)
            try:
                part.arrival.wait()
                yield part
            finally:
                part.region.release()

    def drop(self) -> None:
        """Takes what is still to come and releases it."""
        for _ in self.take_parts():
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
    """The threads.

    Args:
        max_age: seconds after which a shard is closed.
        report: told by each thread what became of records.
    """

    def __init__(self, sinks: Sequence[Sink], max_age: float, report: Callable[[list[Written]], Any]) -> None:
        self._max_age, self._report = max_age, report
        self._jobs: queue.SimpleQueue[Job | float | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, args=(sink,), daemon=True) for sink in sinks]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Its parts may follow later."""
        self._jobs.put(job)

    def flush(self) -> None:
        """Has open shards closed, however little is in them."""
        self._jobs.put(0.0)

    def close(self) -> None:
        """Writes what was submitted in full, and ends the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, sink: Sink) -> None:
        job: Job | float | None = self._max_age
        while job is not None:
            results = sink.write(job) if isinstance(job, Job) else []
            results += sink.flush(job if isinstance(job, float) else self._max_age)
            if results:
                self._report(results)
            try:
                job = self._jobs.get(timeout=self._max_age)
            except queue.Empty:
                job = self._max_age
        if results := sink.flush(0):
            self._report(results)


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
