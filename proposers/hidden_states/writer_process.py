"""The process that writes records, and how the engine's talks to it.

A writer asks for Python's lock after every system call, thirty times for a file, and each time the engine's thread has
to let go of it and wait for its return: a few ms for a record. So writers have a process, with the ring as memory that
both have and a socket between them. What crosses it is small: what is to be written and where in the ring its rows are,
and back what became of records and which rows have been written. Only the engine's thread has an end of it, and sends
what a step has for the writers at once (`advance`); nothing in this process waits for the disk but for room
(`Ring.take`) and in the end (`close`).
"""

import logging
import mmap
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from proposers.hidden_states.layout import RecordInfo
from proposers.hidden_states.request import Settings
from proposers.hidden_states.storage import Storage
from proposers.hidden_states.writer import FileSink, Job, Part, Room, ShardSink, Sink, Writers, Written

if TYPE_CHECKING:
    from proposers.hidden_states.ring import Ring

logger = logging.getLogger("vllm.proposers.hidden_states")

# While rows are on their way from the device, how often somebody who waits looks whether they are there.
ARRIVAL_POLL_S = 1e-3
# Somebody who waits for room looks this often, whatever comes.
ROOM_POLL_S = 0.1


# Messages, several of which are sent as a list. To the writers:


class Begin(NamedTuple):
    """A record; its rows follow."""

    number: int
    job: Job


class Rows(NamedTuple):
    """The next rows of a record.

    Attributes:
        start: of their region in the ring; `values` and `scales` count from there.
        is_last: there are no more.
        extras: with the last rows, the bytes of what follows them.
    """

    number: int
    part: int
    start: int
    values: range
    scales: range
    is_last: bool
    extras: Mapping[str, bytes]


class Stop(NamedTuple):
    """No more rows of a record will come."""

    number: int


class Flush(NamedTuple):
    """Open shards are to be closed."""


class Close(NamedTuple):
    """What has come is to be written, and the process to end."""


# From the writers:


class Ready(NamedTuple):
    """The storage root can be used, and names of this run begin like that; or it can't, and why."""

    run: str
    error: str | None = None


class Released(NamedTuple):
    """Rows were written, and their room is free."""

    part: int


# The engine's side.


def _send(connection: Connection, messages: Sequence[Any]) -> None:
    """`Connection.send` would make a pickler for each, with reducers for what never crosses here."""
    connection.send_bytes(pickle.dumps(messages, pickle.HIGHEST_PROTOCOL))


@dataclass(eq=False)
class Outgoing:
    """A record that was submitted: where its rows are put.

    Attributes:
        has_begun: the writers were told of it, which they are with its first rows.
    """

    process: "WriterProcess"
    number: int
    job: Job
    has_begun: bool = False

    @property
    def info(self) -> RecordInfo:
        return self.job.info

    def put(self, part: Part | None) -> None:
        self.process.put(self, part)


class WriterProcess:
    """The writers, as the engine's thread has them. One that was killed is replaced, and what it had is failed.

    Attributes:
        run: how names of this run begin.

    Raises:
        ValueError: at construction, the storage root can't be used.
    """

    def __init__(self, settings: Settings, ring: "Ring") -> None:
        self._settings, self._ring = settings, ring
        ring.await_release = self._await_release
        self._numbers = 0
        self._open: dict[str, Outgoing] = {}  # by request id, until it is known what became of it
        self._outbox: deque[tuple[Outgoing, Part | None]] = deque()
        self._closes_shards = False
        self._sent: dict[int, Room] = {}  # rows that are being written, by number
        self._results: list[Written] = []
        self._connection: Connection | None = None
        self._start()

    def _start(self) -> None:
        connection, theirs = Pipe()
        descriptors = theirs.fileno(), self._ring.descriptor
        # Not as a module by `-m`, which would be another one than that by which messages are known; and from where this
        # one was found, since the engine's search path may be another than that of a new process.
        code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); from {__name__} import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, descriptors), str(self._ring.num_bytes)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the engine, which ends this one when it has given it all
        )
        theirs.close()
        try:
            connection.send(self._settings)
            (ready,) = connection.recv()
        except (EOFError, ConnectionError):
            ready = Ready("", f"The process that writes records ended at its start: {self._how_it_ended()}.")
        if ready.error is not None:
            connection.close()
            self._process.wait()
            raise ValueError(ready.error)
        self._connection, self.run = connection, ready.run
        # Asked in every step, so it is made once; `Connection.poll` makes one each time.
        self._incoming = select.poll()
        self._incoming.register(connection, select.POLLIN)

    @property
    def pending(self) -> int:
        """Records that were submitted and not reported yet."""
        return len(self._open)

    def submit(self, job: Job) -> Outgoing:
        """Its rows may follow later, put into what is returned."""
        self._numbers += 1
        outgoing = Outgoing(self, self._numbers, job)
        self._open[job.info.request_id] = outgoing
        if self._connection is None:
            try:
                self._start()
            except ValueError as error:
                self._report(Written(job.info.request_id, None, None, str(error), 0))
        return outgoing

    def put(self, outgoing: Outgoing, part: Part | None) -> None:
        """Has `advance` send rows on once they have arrived, after all that were put before."""
        self._outbox.append((outgoing, part))

    def advance(self) -> None:
        """Sends on what has arrived, and takes note of what was written."""
        messages: list[Any] = []
        while self._outbox and self._has_arrived():
            messages += self._messages_of(*self._outbox.popleft())
        if self._closes_shards and not self._outbox:
            self._closes_shards = False
            messages.append(Flush())
        self._send_all(messages)
        while self._poll(0):
            self._receive()

    def _has_arrived(self) -> bool:
        _, part = self._outbox[0]
        return part is None or part.arrival.query()

    def _messages_of(self, outgoing: Outgoing, part: Part | None) -> list[Any]:
        if self._open.get(outgoing.info.request_id) is not outgoing:  # it was failed with the process that had it
            if part is not None:
                part.region.release()
            return []
        job = outgoing.job
        begin = [] if outgoing.has_begun else [Begin(outgoing.number, job)]
        outgoing.has_begun = True
        if part is None:
            return [*begin, Stop(outgoing.number)]
        job.missing -= len(part.values)
        extras = {} if job.missing or job.read_extras is None else job.read_extras()
        self._numbers += 1
        self._sent[self._numbers] = part.region
        place = part.region.start, part.values, part.scales
        return [*begin, Rows(outgoing.number, self._numbers, *place, not job.missing, extras)]

    def _send_all(self, messages: Sequence[Any]) -> None:
        if not messages or self._connection is None:
            return
        try:
            _send(self._connection, messages)
        except ConnectionError:
            self._lose()

    def _poll(self, timeout: float) -> bool:
        return self._connection is not None and bool(self._incoming.poll(1e3 * timeout))

    def _receive(self) -> None:
        assert self._connection is not None
        try:
            messages = self._connection.recv()
        except (EOFError, ConnectionError):
            self._lose()
            return
        for message in messages:
            if isinstance(message, Released):
                self._sent.pop(message.part).release()
            else:
                self._report(message)

    def _report(self, written: Written) -> None:
        del self._open[written.request_id]
        if written.error:
            log_failure(written.request_id, written.error)
        self._results.append(written)

    def _lose(self) -> None:
        """Fails what the process had; the next record has another."""
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        error = f"the process that wrote records ended: {self._how_it_ended()}; the next record has another one"
        for request_id in list(self._open):
            self._report(Written(request_id, None, None, error, 0))
        while self._sent:
            self._sent.popitem()[1].release()

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    def take_results(self, timeout: float = 0.0) -> list[Written]:
        """What was reported since the last call. Where that is nothing, waits so long for a first report."""
        deadline = time.monotonic() + timeout
        self.advance()
        while not self._results and self._open and (left := deadline - time.monotonic()) > 0:
            self._wait(left)
        results, self._results = self._results, []
        return results

    def _wait(self, timeout: float) -> None:
        """For a message, or for rows to arrive."""
        if not self._outbox:
            self._poll(timeout)
        elif not self._has_arrived():
            self._poll(min(timeout, ARRIVAL_POLL_S))
        self.advance()

    def _await_release(self) -> None:
        self._wait(ROOM_POLL_S)

    def flush(self) -> None:
        """Has open shards closed, however little is in them, once all that was put before has been sent."""
        self._closes_shards = bool(self._open)

    def close(self) -> None:
        """Has all written that was put, and ends the process."""
        while self._outbox:
            _, part = self._outbox[0]
            if part is not None:
                part.arrival.wait()
            self.advance()
        self._send_all([Close()])
        while self._connection is not None:  # until it hangs up
            self._receive()


def log_failure(request_id: str, error: str) -> None:
    logger.error("The hidden states of request %s were not written: %s", request_id, error)


# The writers' side.


class _Region:
    """Rows in the ring, as the writers have them."""

    def __init__(self, memory: memoryview, start: int, release: Callable[[], None]) -> None:
        self._memory, self.start, self._release = memory, start, release

    def bytes_of(self, start: int, stop: int) -> memoryview:
        return self._memory[self.start + start : self.start + stop]

    def release(self) -> None:
        self._release()


class _Served:
    """The engine's end of the socket, as the writers have it; several of them send."""

    def __init__(self, connection: Connection, memory: memoryview) -> None:
        self._connection, self._memory = connection, memory
        self._sending = threading.Lock()
        self._jobs: dict[int, Job] = {}  # whose rows are still to come

    def send(self, messages: Sequence[Any]) -> None:
        # An engine that was killed asks no more; what it has handed over is written all the same.
        with self._sending, suppress(ConnectionError):
            _send(self._connection, messages)

    def run(self, writers: Writers) -> None:
        """Hands on what comes, until the engine has no more or is no more."""
        for message in self._messages():
            self._take(message, writers)
        for job in self._jobs.values():
            job.put(None)

    def _messages(self) -> Iterator[Any]:
        with suppress(EOFError, ConnectionError):
            while True:
                for message in self._connection.recv():
                    if isinstance(message, Close):
                        return
                    yield message

    def _take(self, message: Any, writers: Writers) -> None:
        if isinstance(message, Begin):
            self._jobs[message.number] = message.job
            writers.submit(message.job)
        elif isinstance(message, Rows):
            self._take_rows(message)
        elif isinstance(message, Stop):
            if stopped := self._jobs.pop(message.number, None):
                stopped.put(None)
        elif isinstance(message, Flush):
            writers.flush()

    def _take_rows(self, rows: Rows) -> None:
        job = self._jobs.pop(rows.number) if rows.is_last else self._jobs[rows.number]
        job.read_extras = lambda: rows.extras
        region = _Region(self._memory, rows.start, lambda: self.send([Released(rows.part)]))
        job.put(Part(region, rows.values, rows.scales))


def _make_sinks(settings: Settings, storage: Storage) -> list[Sink]:
    if settings.sharded:  # one thread: more would each have a shard of their own
        return [ShardSink(storage, settings.shard_bytes)]
    return [FileSink(storage, settings.lock_files) for _ in range(settings.writer_threads)]


def main() -> None:
    """With the arguments SOCKET RING NUM_BYTES, the first two as descriptors."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)  # the engine's end is this one's: the socket says when that is
    socket, ring, num_bytes = map(int, sys.argv[1:])
    connection = Connection(socket)
    settings = connection.recv()
    served = _Served(connection, memoryview(mmap.mmap(ring, num_bytes)))
    try:
        storage = Storage(settings.storage_root)
    except ValueError as error:
        served.send([Ready("", str(error))])
        return
    writers = Writers(_make_sinks(settings, storage), settings.shard_seconds, served.send)
    served.send([Ready(storage.run)])
    served.run(writers)
    writers.close()
    storage.close()
