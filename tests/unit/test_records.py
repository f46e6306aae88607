"""Records without an engine: the format, names, the storage root, the ring and the writers."""

import dataclasses
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mtp.groups import KVGroup
from mtp.store import RowStore
from proposers.hidden_states import Record, RecordDataset, RecordInfo, fp8, load
from proposers.hidden_states.layout import ENCODING
from proposers.hidden_states.request import RecordRequest, Settings, checked_name, generated_name
from proposers.hidden_states.ring import Ring
from proposers.hidden_states.storage import Storage
from proposers.hidden_states.transfer import RowTransfer
from proposers.hidden_states.writer import SHARD_HEADER_BYTES, FileSink, Job, ShardSink, Writers, Written
from tests.support.children import child_environment
from tests.support.record_scenarios import files, no_file_longer_than

HIDDEN, LAYERS = 16, (4, 0)
ROW_BYTES = len(LAYERS) * HIDDEN * 4


def info(rows: int, dtype: str = "float32", first: int = 0, request_id: str = "r") -> RecordInfo:
    return RecordInfo(LAYERS, 4, dtype, "some/model", rows, first, 5, "stop", request_id)


def store(num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> RowStore:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_blocks, block_size, len(LAYERS), HIDDEN, generator=generator).to(dtype)
    return RowStore(rows, KVGroup(0, block_size, torch.empty(0, dtype=torch.int64)), LAYERS)


def job(name: str, rows: int, dtype: str = "float32", first: int = 0, replace: bool = True) -> Job:
    return Job(name, replace, info(rows, dtype, first, name), list(range(rows)), (len(LAYERS), HIDDEN))


def filled(source: RowStore, *jobs: Job) -> None:
    """Hands all rows of the jobs on, from the store's first blocks."""
    needed = sum(j.row_bytes for j in jobs)
    transfer = RowTransfer(source, Ring(4 * needed, pinned=False), encoding=jobs[0].info.encoding)
    transfer.submit([(j, range(len(source.rows)), 0) for j in jobs])


def written(sink: Any, *jobs: Job) -> list[Written]:
    return [result for j in jobs for result in sink.write(j)] + sink.flush(0)


# The format.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sharded", [False, True], ids=["file", "shard"])
def test_a_record_comes_back_with_every_bit_and_all_that_it_says(dtype: str, sharded: bool, tmp_path: Path) -> None:
    source = store(3, 8, getattr(torch, dtype))
    storage = Storage(tmp_path)
    done = job("a/b", 21, dtype)
    filled(source, done)
    (result,) = written(ShardSink(storage, 1 << 30) if sharded else FileSink(storage), done)
    assert result.error is None
    record = load(result.path, result.name)
    assert record.info == info(21, dtype, request_id="a/b")
    assert record.hidden_states.dtype is getattr(torch, dtype)
    assert torch.equal(record.hidden_states, source.rows.flatten(0, 1)[:21])
    assert torch.equal(record.token_ids, torch.arange(21))
    # Anyone else's reader of safetensors reads it too.
    tensors = load_file(result.path)
    assert len(tensors) == 2
    assert all(torch.equal(tensor, part) for tensor, part in zip(sorted_by_rank(tensors), record[:2], strict=True))


def sorted_by_rank(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return sorted(tensors.values(), key=lambda tensor: -tensor.dim())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharded", [False, True], ids=["file", "shard"])
def test_a_record_in_eight_bits_says_so_and_comes_back_in_the_models_dtype(
    dtype: str, sharded: bool, tmp_path: Path
) -> None:
    source, storage = store(3, 8, getattr(torch, dtype)), Storage(tmp_path)
    source.rows[:, :, 1] *= 1e4  # layers differ by orders of magnitude
    source.rows[0, 0] = 0
    jobs = [job(f"r{i}", 21, dtype) for i in range(2)]
    jobs = [dataclasses.replace(j, info=dataclasses.replace(j.info, encoding="fp8_e4m3")) for j in jobs]
    filled(source, *jobs)
    results = written(ShardSink(storage, 1 << 30) if sharded else FileSink(storage), *jobs)
    stored = 21 * len(LAYERS) * (HIDDEN + 4)
    for result in results:
        record = load(result.path, result.name)
        exact = source.rows.flatten(0, 1)[:21].float()
        assert record.info.encoding == "fp8_e4m3"
        assert record.hidden_states.dtype is getattr(torch, dtype)
        # Three bits after the first: half of the last one is a sixteenth. Far below a row's largest, steps are even.
        tolerance = (exact.abs() / 16).maximum(exact.abs().amax(-1, keepdim=True) / 448 / 512)
        assert ((record.hidden_states.float() - exact).abs() <= tolerance * 1.1).all()
        assert torch.equal(record.token_ids, torch.arange(21))
        assert stored <= result.num_bytes < stored + (0 if sharded else 2000) + sharded


def test_rows_in_eight_bits_take_the_ring_as_little_as_the_disk() -> None:
    source, record = store(3, 8, torch.bfloat16), job("r", 21, "bfloat16")
    record = dataclasses.replace(record, info=dataclasses.replace(record.info, encoding=ENCODING))
    ring = Ring(1 << 20, pinned=False)
    RowTransfer(source, ring, encoding=ENCODING).submit([(record, range(3), 0)])
    assert ring.peak_bytes == record.row_bytes == 21 * len(LAYERS) * (HIDDEN + 4)


def test_rows_are_made_smaller_some_at_a_time_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = store(3, 8, torch.bfloat16).rows.flatten(0, 1)
    whole = fp8.quantize(rows)
    monkeypatch.setattr(fp8, "EXACT_BYTES", 5 * ROW_BYTES)
    for found, wanted in zip(fp8.quantize(rows), whole, strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_a_dataset_has_the_records_of_files_and_shards_and_nothing_unfinished(tmp_path: Path) -> None:
    source, storage = store(4, 8), Storage(tmp_path)
    jobs = [job(f"{place}/{i}", 5 + i) for place in ("z", "a", "shard") for i in range(3)]
    filled(source, *jobs)
    written(FileSink(storage), *jobs[:6])
    written(ShardSink(storage, 1 << 30), *jobs[6:])
    descriptor, unfinished = storage.create()
    os.close(descriptor)
    unfinished.rename(unfinished.with_suffix(".safetensors"))
    dataset = RecordDataset(tmp_path)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, shuffle=True)
    assert len(dataset) == 9
    assert sorted(record.info.request_id for record in loader) == sorted(j.name for j in jobs)
    assert all(isinstance(dataset[i], Record) and len(dataset[i].token_ids) == dataset[i].info.rows for i in range(9))


def test_a_dataset_counts_as_its_sender_did(tmp_path: Path) -> None:
    """By path, 10 comes before 2."""
    storage, source = Storage(tmp_path), store(2, 8)
    jobs = [job(f"set/hs_{i}", 3) for i in range(12)]
    filled(source, *jobs)
    written(FileSink(storage), *jobs[1::2])
    written(ShardSink(storage, 1), *jobs[::2])
    dataset = RecordDataset(tmp_path)
    assert dataset.names == [j.name for j in jobs]
    assert [record.info.request_id for record in dataset] == dataset.names


def test_what_is_no_record_is_told_apart(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"hidden_states": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="The schema is None"):
        load(tmp_path / "other.safetensors")
    storage, source = Storage(tmp_path), store(2, 8)
    single, sharded = job("single", 3), job("one", 3)
    filled(source, single, sharded)
    (single_at,) = written(FileSink(storage), single)
    (shard_at,) = written(ShardSink(storage, 1), sharded)
    with pytest.raises(ValueError, match="holds 1 records and none called None"):
        load(shard_at.path)
    with pytest.raises(ValueError, match="is one record and no shard"):
        load(single_at.path, "one")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        RecordDataset(tmp_path / "nothing")


# What may be asked.


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "storage_root=None: name the folder"),
        ({"storage_root": ""}, "storage_root='': name the folder"),
        ({"storage_root": "x", "storage_roof": "y"}, "has storage_roof; there are storage_root, layer_ids"),
        ({"storage_root": "x", "sharded": 1}, "sharded=1, which is no bool"),
        ({"storage_root": "x", "ring_bytes": True}, "ring_bytes=True, which is no int"),
        ({"storage_root": "x", "dtype": "fp4"}, "dtype='fp4'; there are model, fp8"),
        ({"storage_root": "x", "writer_threads": 0}, "writer_threads=0: it has to be above 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.of(extra)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ("yes", "kv_transfer_params is 'yes' and should be an object"),
        ({"extract": "no"}, "extract='no', which is neither true nor false"),
        ({"paths": "x"}, "has paths; there are extract, include_output_tokens, window, name"),
        ({"window": [3]}, r"window is \[3\], and should be two positions"),
        ({"window": [True, 4]}, "should be two positions"),
        ({"window": [5, 5]}, r"window=\[5, 5\] is no range"),
        ({"window": [-1, 5]}, r"window=\[-1, 5\] is no range"),
    ],
)
def test_requests_that_mean_nothing_are_refused(params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RecordRequest.of(params, False)


@pytest.mark.parametrize(
    ("include_output_tokens", "window", "rows"),
    [
        (False, None, (0, 10)),
        (True, None, (0, 14)),
        (False, [2, 6], (2, 6)),
        (False, [8, 12], (8, 10)),
        (True, [8, 12], (8, 12)),
        (True, [13, 99], (13, 14)),
    ],
)
def test_rows_of_ten_prompt_and_five_output_tokens(
    include_output_tokens: bool, window: Any, rows: tuple[int, int]
) -> None:
    params = {"include_output_tokens": include_output_tokens, "window": window}
    assert RecordRequest.of(params, not include_output_tokens).rows(10, 15) == rows


BAD_NAMES = ["", "/x", "..", "a/../b", "a//b", "a/", ".hidden", "a/.b", "a\0b", "a\nb", "x" * 201, "a/" * 600 + "a", 3]


@pytest.mark.parametrize("name", [*BAD_NAMES, "a.shard.safetensors"], ids=lambda name: repr(name)[:20])
def test_names_that_lead_elsewhere_or_are_no_file_names_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="name"):
        checked_name(name)


@given(st.lists(st.text(), min_size=1, max_size=20))
def test_whatever_a_request_is_called_its_name_is_safe_and_its_own(request_ids: list[str]) -> None:
    names = [generated_name("run", number, request_id) for number, request_id in enumerate(request_ids)]
    assert len(set(names)) == len(names)
    assert [checked_name(name) for name in names] == names


def test_no_folder_gets_more_than_a_thousand_records() -> None:
    folders = [generated_name("run", number, "r").rsplit("/", 1)[0] for number in range(3500)]
    assert max(folders.count(folder) for folder in set(folders)) == 1000


# The storage root.


def test_a_link_on_the_way_is_not_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    storage, record = Storage(root), job("link/x", 3)
    (root / "link").symlink_to(outside)
    filled(store(1, 8), record)
    (result,) = written(FileSink(storage), record)
    assert "symbolic link" in result.error
    assert result.path is None
    assert files(outside) == []
    assert files(root) == []


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_name_that_is_taken_keeps_what_it_has(
    hard_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hard_links:

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    one, two = Storage(tmp_path), Storage(tmp_path)
    first, second = job("same", 3, replace=False), job("same", 5, replace=False)
    filled(store(1, 8), first, second)
    results = written(FileSink(one), first) + written(FileSink(two), second)
    assert [result.error is None for result in results] == [True, False]
    assert "the name is taken, give another: 'same.safetensors'" in results[1].error
    assert load(tmp_path / "same.safetensors").info.rows == 3
    assert files(tmp_path) == ["same.safetensors"]


def test_a_root_that_cannot_be_used_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="Name a folder that this process may write to"):
            Storage(root)


WRITE_AND_HANG = """
import sys, time
from proposers.hidden_states import RecordInfo, writer
from proposers.hidden_states.ring import Ring
from proposers.hidden_states.storage import Storage

def hang(file):
    file.flush()
    print("writing", flush=True)
    time.sleep(600)

writer._sync = hang
info = RecordInfo((0,), 1, "float32", "some/model", 20, 0, 20, "stop", "killed")
record = writer.Job("killed", True, info, list(range(20)), (1, 64))
region = Ring(record.row_bytes, pinned=False).take(record.row_bytes, users=1)
record.put(writer.Part(region, range(record.row_bytes), range(0)))
writer.FileSink(Storage(sys.argv[1])).write(record)
"""


def test_a_process_that_is_killed_while_writing_leaves_no_record_and_who_comes_next_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITE_AND_HANG, str(tmp_path)]
    with subprocess.Popen(command, env=child_environment(), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        (unfinished,) = files(tmp_path)
        # Another engine starts while the first still writes: nothing of it is touched.
        other = Storage(tmp_path)
        assert files(tmp_path) == [unfinished]
        child.send_signal(signal.SIGKILL)
    assert (tmp_path / unfinished).stat().st_size > 20 * 64 * 4
    assert len(RecordDataset(tmp_path)) == 0
    third = Storage(tmp_path)
    assert files(tmp_path) == []
    for storage in (other, third):
        storage.close()
    assert [path.name for path in tmp_path.iterdir()] == [".writing.lock"]


# Disk errors in a shard.


def test_a_record_that_does_not_fit_is_cut_off_its_shard_and_the_others_stay(tmp_path: Path) -> None:
    source, sink = store(40, 8), ShardSink(Storage(tmp_path), 1 << 30)
    jobs = [job("one", 20), job("too long", 300), job("two", 10)]
    filled(source, *jobs)
    with no_file_longer_than((1 << 20) + 100 * HIDDEN * 2 * 4):
        results = written(sink, *jobs)
    failed = [result for result in results if result.error]
    assert [result.request_id for result in failed] == ["too long"]
    good = [result for result in results if not result.error]
    assert [(result.name, load(result.path, result.name).info.rows) for result in good] == [("one", 20), ("two", 10)]
    rows = load(good[1].path, "two").hidden_states
    assert torch.equal(rows, source.rows.flatten(0, 1)[:10])
    assert len(files(tmp_path)) == 1


def test_a_shard_has_the_room_of_its_header_from_the_start(tmp_path: Path) -> None:
    """A hole is filled when the shard is closed, and on a disk that is full by then all its records would be lost."""
    storage, source, one = Storage(tmp_path), store(2, 8), job("one", 3)
    sink = ShardSink(storage, 1 << 30)
    filled(source, one)
    sink.write(one)
    (unfinished,) = storage._folder.glob("*.tmp")
    assert unfinished.stat().st_blocks * 512 >= SHARD_HEADER_BYTES
    assert (tmp_path / storage.run).is_dir()


def test_a_shard_that_cannot_be_closed_fails_all_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, sink = store(4, 8), ShardSink(Storage(tmp_path), 1 << 30)
    jobs = [job("one", 20), job("two", 10), job("three", 10)]
    filled(source, *jobs)
    with monkeypatch.context() as patched:

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr(os, "fsync", full)
        results = written(sink, *jobs[:2])
    assert [result.request_id for result in results] == ["one", "two"]
    assert all("No space left on device" in result.error and result.path is None for result in results)
    assert files(tmp_path) == []
    (last,) = written(sink, jobs[2])
    assert load(last.path, "three").info.rows == 10


def test_a_shard_is_closed_before_its_header_has_no_room(tmp_path: Path) -> None:
    sink = ShardSink(Storage(tmp_path), 1 << 30)
    source = store(1, 1)
    jobs = [job(f"{'long/' * 190}{i}", 1) for i in range(400)]
    filled(source, *jobs)
    results = written(sink, *jobs)
    assert [result.error for result in results] == [None] * 400
    assert len(files(tmp_path)) > 1
    assert len(RecordDataset(tmp_path)) == 400


# Host memory.


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60), st.randoms(use_true_random=False))
def test_regions_of_the_ring_never_overlap_and_never_exceed_it(wanted: list[tuple[int, bool]], random: Any) -> None:
    ring, held = Ring(100, pinned=False), []
    for num_bytes, release in wanted:
        while ring._room(num_bytes) is None or (release and held):
            held.pop(random.randrange(len(held))).release()
            release = False
        region = ring.take(num_bytes, users=1)
        assert all(region.stop <= other.start or other.stop <= region.start for other in held)
        assert 0 <= region.start < region.stop <= 100
        held.append(region)
    while held:
        held.pop().release()
    assert ring.take(100, users=1).start == 0


def test_the_engine_waits_for_room_until_a_writer_gives_some_back() -> None:
    ring = Ring(100, pinned=False)
    first = ring.take(60, users=2)
    taken: queue.Queue[Any] = queue.Queue()
    thread = threading.Thread(target=lambda: taken.put(ring.take(60, users=1)))
    thread.start()
    first.release()
    assert ring._room(60) is None  # one of two users still reads
    assert taken.empty()
    first.release()
    assert taken.get(timeout=30).start == 0
    thread.join()
    assert ring.peak_bytes == 60
    with pytest.raises(ValueError, match="101 bytes were asked of a ring of 100"):
        ring.take(101, users=1)


@pytest.mark.parametrize("ring_rows", [2, 3, 7, 1000])
@pytest.mark.parametrize("sink", [FileSink, lambda storage: ShardSink(storage, 4000)], ids=["files", "shards"])
def test_rows_of_any_blocks_arrive_through_a_ring_of_any_size(
    ring_rows: int, sink: Callable[[Storage], Any], tmp_path: Path
) -> None:
    source = store(30, 4, torch.bfloat16)
    row_bytes = len(LAYERS) * HIDDEN * 2
    ring = Ring(ring_rows * row_bytes, pinned=False)
    transfer, storage = RowTransfer(source, ring), Storage(tmp_path)
    results: list[Written] = []
    writers = Writers([sink(storage)], 60, results.extend)
    blocks = torch.randperm(30, generator=torch.Generator().manual_seed(1)).tolist()
    batch, expected = [], {}
    for i, (first, rows) in enumerate([(0, 1), (3, 9), (0, 16), (5, 2), (1, 11)]):
        mine = blocks[5 * i : 5 * i + 5]
        batch.append((job(str(i), rows, "bfloat16", first), mine, len(mine)))
        expected[str(i)] = source.rows[mine].flatten(0, 1)[first : first + rows]
    for j, *_ in batch:
        writers.submit(j)
    were_read = transfer.submit(batch)
    transfer.finish()
    assert all(was_read() for was_read in were_read)
    writers.close()
    assert [result.error for result in results] == [None] * 5
    for result in results:
        assert torch.equal(load(result.path, result.name).hidden_states, expected[result.request_id])
    assert ring.peak_bytes <= ring_rows * row_bytes
    # One gather for the whole batch, where the ring has room.
    assert transfer.gathers == -(-39 // min(39, ring_rows // 2))


def test_rows_wait_in_the_store_while_the_ring_is_full_and_come_in_their_order() -> None:
    source, records = store(30, 4), [job(str(i), 4) for i in range(3)]
    transfer = RowTransfer(source, Ring(6 * ROW_BYTES, pinned=False))  # pieces of three rows
    were_read = transfer.submit([(record, [i], 1) for i, record in enumerate(records)])

    def take(record: Job) -> int:
        """What a writer does: the next rows, whose room it gives back."""
        with closing(record.take_parts()) as parts:
            part = next(parts)
        transfer.advance()
        return len(part.values) // ROW_BYTES

    def is_done() -> list[bool]:
        return [was_read() for was_read in were_read]

    first, second, third = records
    assert (is_done(), transfer.waiting) == ([True, False, False], True)
    assert take(first) == 3
    assert is_done() == [True, True, False]
    assert take(first) == 1  # shares its room with rows of the second
    assert is_done() == [True, True, False]
    assert take(second) == 2
    assert (is_done(), transfer.waiting) == ([True, True, True], False)
    assert [take(record) for record in (second, third, third)] == [2, 1, 3]


def test_the_engine_waits_once_much_of_the_cache_is_kept_for_rows() -> None:
    source, records = store(32, 4), [job(str(i), 4) for i in range(3)]
    ring = Ring(8 * ROW_BYTES, pinned=False)
    transfer = RowTransfer(source, ring)
    filling = ring.take(8 * ROW_BYTES, users=1)
    transfer.submit([(records[0], [0], 4), (records[1], [1], 4)])  # a quarter of the blocks, and none is copied
    assert transfer.waiting
    done = threading.Event()
    thread = threading.Thread(target=lambda: (transfer.submit([(records[2], [2], 1)]), done.set()), daemon=True)
    thread.start()
    assert not done.wait(0.2)
    filling.release()
    assert done.wait(30)
    thread.join()
    assert not records[0]._parts.empty()


def test_when_a_copy_fails_no_writer_waits_for_what_was_to_come(tmp_path: Path) -> None:
    source, records = store(30, 4), [job(str(i), 4) for i in range(3)]
    ring = Ring(8 * ROW_BYTES, pinned=False)
    results: list[Written] = []
    transfer, writers = RowTransfer(source, ring), Writers([FileSink(Storage(tmp_path))], 60, results.extend)
    filling = ring.take(8 * ROW_BYTES, users=1)
    transfer.submit([(record, [i], 1) for i, record in enumerate(records[:2])])
    transfer._rows = transfer._rows[:0]
    for record in records[:2]:
        writers.submit(record)
    filling.release()
    with pytest.raises(RuntimeError, match="index_select"):
        transfer.advance()
    assert not transfer.waiting
    writers.close()
    assert ["the engine failed" in result.error for result in results] == [True, True]


def test_a_ring_that_cannot_hold_two_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="ring_bytes=200 and the hidden states of one token take 128"):
        RowTransfer(store(1, 1), Ring(200, pinned=False))


def test_when_the_engine_fails_in_the_middle_of_a_copy_the_writers_do_not_wait_for_it(tmp_path: Path) -> None:
    results: list[Written] = []
    writers, record = Writers([FileSink(Storage(tmp_path))], 60, results.extend), job("half", 20)
    writers.submit(record)
    record.put(None)
    writers.close()
    (result,) = results
    assert "the engine failed" in result.error
    assert files(tmp_path) == []


def test_writers_that_find_their_folder_gone_make_it_again_together(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "root")
    for _ in range(20):
        shutil.rmtree(tmp_path / "root")
        with ThreadPoolExecutor(4) as pool:
            made = list(pool.map(lambda _: storage.create(), range(8)))
        for descriptor, path in made:
            assert path.exists()
            os.close(descriptor)
    storage.close()


def test_a_storage_whose_root_can_not_be_made_again_closes_no_file_but_its_own(tmp_path: Path) -> None:
    (tmp_path / "mounted").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "mounted")
    storage = Storage(tmp_path / "root")
    shutil.rmtree(tmp_path / "mounted")
    with pytest.raises(OSError, match="root"):
        storage.create()
    reader, writer = os.pipe()
    with pytest.raises(OSError, match="root"):
        storage.create()
    storage.close()
    os.write(writer, b"there")
    assert os.read(reader, 5) == b"there"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("name", ["a.shard", "a.shard.safetensors"])
def test_a_record_can_not_have_the_name_of_a_shard(name: str) -> None:
    with pytest.raises(ValueError, match="marks files of many records"):
        checked_name(name)


def test_what_an_engine_removes_meanwhile_is_not_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".writing-run-1").mkdir()
    scandir = os.scandir

    def scandir_of_what_stays(path: Any = ".") -> Any:
        if ".writing" in str(path):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scandir_of_what_stays)
    assert len(RecordDataset(tmp_path)) == 0
