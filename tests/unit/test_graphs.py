"""What a captured pass leaves as it was. (Replays: `tests/gpu/test_graphs.py`, and by the oracle.)"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig

from mtp.graphs import PassGraphs, PassShape, uneven_shapes
from mtp.groups import KVGroup

CPU = torch.device("cpu")


def make_group(gid: int) -> KVGroup:
    table = torch.full((4, 3), gid, dtype=torch.int32)
    return KVGroup(gid, 16, torch.zeros(32, dtype=torch.int64), ("layer",), block_table=table)


def make_graphs(
    groups: list[KVGroup], run: Callable[..., torch.Tensor], max_model_len: int = 64, tables_stay: bool = False
) -> PassGraphs:
    return PassGraphs(
        VllmConfig(),
        run,
        groups,
        query_len=4,
        num_modules=3,
        history_depth=2,
        max_num_reqs=4,
        max_num_rows=32,
        max_model_len=max_model_len,
        padding_slot=4,
        hidden_size=8,
        dtype=torch.float32,
        device=CPU,
        tables_stay=tables_stay,
    )


def no_pass(inputs: Any, cad: Any, num_drafts: int | None) -> torch.Tensor:
    return torch.zeros(cad.num_reqs, 3)


def test_a_pass_reads_the_graphs_tables_and_the_hosts_are_put_back() -> None:
    groups = [make_group(1), make_group(2)]
    hosts = [group.block_table for group in groups]
    seen: list[Any] = []

    def run(inputs: Any, cad: Any, num_drafts: int | None) -> torch.Tensor:
        seen.extend(group.block_table for group in groups)
        return torch.zeros(2, 3)

    make_graphs(groups, run).run_static(PassShape(2, 8, even=True))
    assert [table.shape for table in seen] == [(2, 3), (2, 3)]
    assert all(table is not host for table, host in zip(seen, hosts, strict=True))
    assert all(group.block_table is host for group, host in zip(groups, hosts, strict=True))


def test_a_pass_that_fails_leaves_the_hosts_tables_too() -> None:
    groups = [make_group(1), make_group(2)]
    hosts = [group.block_table for group in groups]

    def run(inputs: Any, cad: Any, num_drafts: int | None) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        make_graphs(groups, run).run_static(PassShape(2, 8, even=True))
    assert all(group.block_table is host for group, host in zip(groups, hosts, strict=True))


def test_a_pass_reads_the_hosts_tables_in_place_where_they_stay_and_have_as_many_requests() -> None:
    group, seen = make_group(1), []

    def run(inputs: Any, cad: Any, num_drafts: int | None) -> torch.Tensor:
        seen.append(group.block_table)
        return torch.zeros(cad.num_reqs, 3)

    host = group.block_table
    graphs = make_graphs([group], run, tables_stay=True)
    for num_reqs in (4, 5):
        graphs.run_static(PassShape(num_reqs, 16, even=False))
    assert seen[0].data_ptr() == host.data_ptr()
    assert seen[1].data_ptr() != host.data_ptr()
    assert [len(table) for table in seen] == [4, 5]


SHAPES = (
    PassShape(2, 8, even=True),
    PassShape(4, 16, even=True),
    PassShape(3, 16, even=False),
    PassShape(5, 16, even=False),
    PassShape(5, 32, even=False),
)


def planned(
    query_lens: list[int],
    upper: list[int] | None = None,
    chunk_ends: bool = False,
    limit: int = 64,
    unread: list[int] | None = None,
) -> Any:
    graphs = make_graphs([make_group(1)], no_pass, limit)
    for shape in reversed(SHAPES):
        graphs.add(shape, None, torch.zeros(0))
    bounds = None if upper is None else np.array(upper)
    num_unread = None if unread is None else np.array(unread, dtype=np.int32)
    return graphs.plan(np.array(query_lens, dtype=np.int32), bounds, chunk_ends, num_unread=num_unread)


@pytest.mark.parametrize(
    ("query_lens", "upper", "chunk_ends", "shape"),
    [
        ([4], [100], False, SHAPES[0]),
        ([4, 1, 2], [100, 9, 9], False, SHAPES[1]),
        ([4, 1], [100, 9], True, SHAPES[2]),  # the end of a chunk is in no decode pass
        ([9, 4], [9, 50], False, SHAPES[2]),
        ([9, 4, 1], [9, 50, 50], False, SHAPES[2]),  # 16 rows with the history's: all of them, and all requests
        ([9, 4, 1], [9, 50, 1], False, SHAPES[3]),  # a sequence of one row has no history
        ([9, 7], [9, 50], False, SHAPES[4]),  # 16 rows, of which none is left for the third request
        ([9, 3, 4, 4], [9, 50, 50, 50], False, SHAPES[4]),
        ([9, 4, 4], None, False, SHAPES[4]),  # without bounds all may have a history
        ([30, 4], [30, 50], False, None),  # more rows than any has
    ],
)
def test_the_smallest_graph_that_has_room_runs_a_step(
    query_lens: list[int], upper: list[int] | None, chunk_ends: bool, shape: PassShape | None
) -> None:
    replay = planned(query_lens, upper, chunk_ends)
    assert (None if replay is None else replay.shape) == shape


@pytest.mark.parametrize(("num_reqs", "num_drafts", "made"), [(2, 0, 0), (2, 1, None), (4, 0, None), (2, 3, None)])
def test_a_graph_of_as_many_drafts_runs_a_step_that_wants_fewer_and_else_one_of_all(
    num_reqs: int, num_drafts: int, made: int | None
) -> None:
    graphs = make_graphs([make_group(1)], no_pass)
    for shape in (graphs.even(2, 0), graphs.even(2), graphs.even(4)):
        graphs.add(shape, None, torch.zeros(0))
    replay = graphs.plan(np.ones(num_reqs, dtype=np.int32), None, False, num_drafts)
    assert replay is not None
    assert replay.shape == graphs.even(num_reqs, made)


def test_rows_that_nobody_reads_take_no_room_in_a_graph_unless_the_step_itself_has_too_many() -> None:
    assert planned([26, 4], [26, 50], unread=[17, 0]).shape == SHAPES[2]
    assert planned([30, 4], [30, 50], unread=[21, 0]) is None
    assert planned([8, 4], [8, 50], True, unread=[8, 4]) is None  # nothing is to be run


def test_what_is_left_over_are_sequences_that_the_context_has_room_for() -> None:
    # Attention follows the block table of a window, and past a sequence's end there is none.
    assert planned([17], [17], limit=4).window_starts.tolist() == [0, 17, 20, 24, 28, 32]
    assert planned([17], [17], limit=7).window_starts.tolist() == [0, 17, 17, 18, 25, 32]
    assert planned([17], [17], limit=3) is None
    graphs = make_graphs([make_group(1)], no_pass, max_model_len=8)
    none = np.zeros(0, dtype=np.int32)
    assert graphs.window_starts_of(none, PassShape(5, 32, even=False)).tolist() == [0, 0, 8, 16, 24, 32]


def test_windows_are_laid_out_one_after_the_other_and_the_rest_is_the_last_request() -> None:
    replay = planned([9, 1, 1], [9, 50, 2])
    # The second has two rows of the history before its own, the third has one: there are no more.
    assert replay.window_starts.tolist() == [0, 9, 12, 14, 14, 16]
    full = make_graphs([make_group(1)], no_pass).window_starts_of(np.array([3, 2]), PassShape(2, 5, even=False))
    assert full.tolist() == [0, 3, 5]


def test_passes_of_a_prompt_are_captured_up_to_the_rows_asked_for() -> None:
    shapes = uneven_shapes(max_num_reqs=64, max_num_rows=2048, max_model_len=4096)
    sizes = sorted({shape.num_rows for shape in shapes})
    assert sizes[-1] == 2048
    assert all(later <= 1.5 * size for size, later in pairwise(sizes))
    assert {shape.num_reqs for shape in shapes} == {8, 32, 65}
    assert {shape.num_reqs for shape in shapes if shape.num_rows == 64} == {8, 32}  # no more requests than rows
    assert not any(shape.even for shape in shapes)
    assert uneven_shapes(64, 0, 4096) == []
    assert {shape.num_rows for shape in uneven_shapes(2, 100, 4096)} == {64, 96, 100}
    assert uneven_shapes(2, 100, 32) == [PassShape(3, 64, even=False), PassShape(3, 96, even=False)]
