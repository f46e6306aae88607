"""The process that writes records: what crosses to it, and what is left when one of the two is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from proposers.hidden_states import RecordDataset, RecordInfo, load
from proposers.hidden_states.request import Settings
from proposers.hidden_states.ring import Ring
from proposers.hidden_states.writer import HERE, Arrival, Job, Part
from proposers.hidden_states.writer_process import Outgoing, WriterProcess
from tests.support.children import child_environment
from tests.support.record_scenarios import files

SHAPE = (2, 16)
ROW_BYTES = 2 * 16 * 4
DRAFTS = {"draft_rows": (1,), "draft_counts": (1, 2), "draft_tokens": (1, 3)}


def job(name: str, rows: int = 20, with_drafts: bool = False) -> Job:
    info = RecordInfo((4, 0), 4, "float32", "some/model", rows, 0, rows, "stop", name)
    extras = tuple(DRAFTS.items()) if with_drafts else ()
    return Job(name, True, info, list(range(rows)), SHAPE, extras, read_drafts if with_drafts else None)


def read_drafts() -> dict[str, bytes]:
    return {name: torch.ones(shape, dtype=torch.int32).numpy().tobytes() for name, shape in DRAFTS.items()}


def put(ring: Ring, outgoing: Outgoing, rows: int, arrival: Arrival = HERE) -> torch.Tensor:
    """Rows `[rows, 2, 16]` of random values, which are on their way to the writers."""
    values = torch.randn(rows, *SHAPE)
    region = ring.take(rows * ROW_BYTES, users=1)
    region.memory.copy_(values.view(-1).view(torch.uint8))
    outgoing.put(Part(region, range(rows * ROW_BYTES), range(0), arrival))
    return values


@contextmanager
def writing(root: Path, rows: int = 100, sharded: bool = False) -> Iterator[tuple[WriterProcess, Ring]]:
    ring = Ring(rows * ROW_BYTES, pinned=False)
    settings = Settings(str(root), sharded=sharded, shard_seconds=60.0, writer_threads=2)
    process = WriterProcess(settings, ring)
    try:
        yield process, ring
    finally:
        process.close()


@pytest.mark.parametrize("sharded", [False, True], ids=["files", "shard"])
def test_what_is_put_in_the_ring_is_what_records_have(sharded: bool, tmp_path: Path) -> None:
    expected = {}
    with writing(tmp_path, rows=25, sharded=sharded) as (process, ring):
        for i in range(8):  # more than the ring holds: room is waited for
            outgoing = process.submit(job(f"r{i}", with_drafts=i % 2 == 0))
            expected[f"r{i}"] = torch.cat([put(ring, outgoing, 12), put(ring, outgoing, 8)])
        process.flush()
        results = []
        while process.pending:
            results += process.take_results(timeout=30)
        assert ring.used_bytes == 0
        maps = Path(f"/proc/{process._process.pid}/maps").read_text()
    assert "libtorch" not in maps  # it would take seconds to be there, and memory
    assert [result.error for result in results] == [None] * 8
    for result in results:
        record = load(result.path, result.name)
        assert torch.equal(record.hidden_states, expected[result.request_id])
        assert (record.drafts is not None) == (int(result.request_id[1:]) % 2 == 0)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".writing-run")] == []


def test_rows_are_written_once_they_have_arrived_and_in_their_order(tmp_path: Path) -> None:
    has_arrived = False
    with writing(tmp_path) as (process, ring):
        late, early = process.submit(job("late")), process.submit(job("early"))
        put(ring, late, 20, Arrival(lambda: has_arrived, lambda: None))
        put(ring, early, 20)
        assert process.take_results(timeout=0.2) == []
        has_arrived = True
        written = []
        while process.pending:
            written += process.take_results(timeout=30)
    assert {result.request_id for result in written} == {"late", "early"}


def test_a_shard_is_closed_with_the_rows_that_were_still_on_their_way(tmp_path: Path) -> None:
    has_arrived = False
    with writing(tmp_path, sharded=True) as (process, ring):
        put(ring, process.submit(job("late")), 20, Arrival(lambda: has_arrived, lambda: None))
        process.flush()
        assert process.take_results(timeout=0.1) == []
        has_arrived = True
        (written,) = process.take_results(timeout=30)
        assert written.error is None
        assert process.pending == 0


def test_a_root_that_cannot_be_used_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="Name a folder that this process may write to"), writing(tmp_path / "file"):
        pass


def test_a_writer_that_is_killed_fails_what_it_had_and_the_next_record_has_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with writing(tmp_path) as (process, ring):
        half, waiting = process.submit(job("half")), process.submit(job("waiting"))
        put(ring, half, 7)
        process._process.send_signal(signal.SIGKILL)
        process._process.wait()
        results = []
        while process.pending:
            results += process.take_results(timeout=30)
        assert {result.request_id for result in results} == {"half", "waiting"}
        assert all("ended: signal 9" in str(result.error) for result in results)
        put(ring, half, 13)  # what was on its way when it was killed
        waiting.put(None)
        process.advance()
        assert ring.used_bytes == 0
        put(ring, process.submit(job("next")), 20)
    (written,) = process.take_results()
    assert written.error is None
    assert [record.info.request_id for record in RecordDataset(tmp_path)] == ["next"]
    assert "The hidden states of request half were not written" in caplog.text


def test_where_no_other_can_be_started_records_fail_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with writing(root) as (process, ring):
        process._process.send_signal(signal.SIGKILL)
        process._process.wait()
        process.advance()
        for path in root.rglob("*"):
            if path.is_file():
                path.unlink()
        for folder in root.iterdir():
            folder.rmdir()
        root.rmdir()
        root.write_text("in the way")
        put(ring, process.submit(job("lost")), 20)
        (result,) = process.take_results()
    assert "can't be used" in str(result.error)
    assert ring.used_bytes == 0


ENGINE_THAT_IS_KILLED = """
import sys
from proposers.hidden_states.layout import RecordInfo
from proposers.hidden_states.request import Settings
from proposers.hidden_states.ring import Ring
from proposers.hidden_states.writer import Job, Part
from proposers.hidden_states.writer_process import WriterProcess

ring = Ring(1 << 20, pinned=False)
process = WriterProcess(Settings(sys.argv[1]), ring)
for name, rows in (("whole", 20), ("half", 10)):
    info = RecordInfo((4, 0), 4, "float32", "some/model", 20, 0, 20, "stop", name)
    outgoing = process.submit(Job(name, True, info, list(range(20)), (2, 16)))
    outgoing.put(Part(ring.take(rows * 128, users=1), range(rows * 128), range(0)))
process.advance()
print(process._process.pid, flush=True)
sys.stdin.read()
"""


def test_when_the_engine_is_killed_what_it_had_handed_over_is_written_and_the_writers_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENGINE_THAT_IS_KILLED, str(tmp_path)]
    environment = child_environment()
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as engine:
        assert engine.stdout is not None
        writers = int(engine.stdout.readline())
        engine.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{writers}").exists() and time.monotonic() < deadline:
        if "State:\tZ" in Path(f"/proc/{writers}/status").read_text():
            break  # nobody here waits for other processes' children
        time.sleep(0.01)
    assert files(tmp_path) == ["whole.safetensors"]
