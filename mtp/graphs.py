"""CUDA graphs of whole passes.

A pass of several modules is some hundred small launches, which the host takes longer to issue than the device to run.
Captured on static inputs, in which nothing depends on a value that only the host knows, it is one. What is captured is
the eager pass itself, so that the two can't differ.

In a decode step no request has more rows than a token and its drafts. Give each a window of that many, whatever its
step had, and the pass has the same shape in every step: an *even* one, captured per number of requests. In a step that
carries a prompt windows are as long as they are. Where each begins is a tensor, too, so one graph runs any such step of
no more requests and rows than it was captured for; what is left over goes to the last requests, which are padding.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from mtp.groups import KVGroup
from mtp.kernels.static_inputs import StaticInputs
from mtp.rows import PassInputs, StepRows
from mtp.window import window_lens


class PassShape(NamedTuple):
    """What a pass is captured for.

    Attributes:
        num_reqs, num_rows: of the windows, padding included.
        even: all windows have the same length.
        num_drafts: that are made; None: as many as are configured.
    """

    num_reqs: int
    num_rows: int
    even: bool
    num_drafts: int | None = None


class Replay(NamedTuple):
    """The graph that runs a step.

    Attributes:
        window_starts: `[shape.num_reqs + 1]` int32 on the host, where each request's rows begin in the window; None
            where all windows have the same length.
    """

    shape: PassShape
    window_starts: np.ndarray | None = None


class PassGraphs:
    """The graphs of one proposer and the inputs that they read.

    Args:
        run: the pass of a batch, from its inputs, its metadata and `PassShape.num_drafts` to token ids `[num_reqs,
            number that is configured]`.
        query_len: rows of each window of a decode pass, 1 + drafts.
        num_modules: that a pass runs.
        history_depth: rows that a window may have before those of its step.
        max_num_rows: of a pass with a prompt; 0: none is captured.
        padding_slot: a slot of the history that belongs to no request.
        tables_stay: the groups' block tables are bound for good and the host fills them in place: a captured pass of no
            more requests than they hold reads them as they are. Else it has copies.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        run: Callable[[PassInputs, CommonAttentionMetadata, int | None], torch.Tensor],
        groups: Sequence[KVGroup],
        query_len: int,
        num_modules: int,
        history_depth: int,
        max_num_reqs: int,
        max_num_rows: int,
        max_model_len: int,
        padding_slot: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tables_stay: bool = False,
    ) -> None:
        self.query_len = query_len
        self._history_depth = history_depth
        self._vllm_config = vllm_config
        self._run = run
        self._groups = list(groups)
        self._max_model_len = max_model_len
        self._device = device
        self._graphs: dict[PassShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._even: dict[int | None, list[PassShape]] = {}  # by the drafts that are made
        self._uneven: list[PassShape] = []
        self._pool: Any = None
        even_starts = torch.arange(0, max_num_reqs * query_len + 1, query_len, dtype=torch.int32)
        self._even_starts_cpu, self._even_starts = even_starts, even_starts.to(device)
        max_num_reqs += 1  # one more has what is left over of a shape
        self._window_starts_cpu = torch.zeros(max_num_reqs + 1, dtype=torch.int32)
        num_rows = max(max_num_reqs * query_len, max_num_rows)
        self._static = StaticInputs.make(
            max_num_reqs, num_rows, query_len, num_modules, padding_slot, hidden_size, dtype, device
        )
        self._tables = [
            torch.zeros(max_num_reqs, group.table(1).shape[1], dtype=torch.int32, device=device) for group in groups
        ]
        self._num_in_place = max_num_reqs - 1 if tables_stay else 0
        self._host_tables = [group.table(self._num_in_place) for group in groups if tables_stay]

    def __contains__(self, shape: PassShape) -> bool:
        return shape in self._graphs

    def even(self, num_reqs: int, num_drafts: int | None = None) -> PassShape:
        """The shape of a decode pass."""
        return PassShape(num_reqs, num_reqs * self.query_len, even=True, num_drafts=num_drafts)

    @torch.inference_mode()
    def capture(self, shape: PassShape) -> None:
        """Captures a pass whose requests are all padding: nothing is written to the draft's cache."""
        self.pad_all(shape)
        self.run_static(shape)  # kernels are compiled and workspaces allocated outside of the graph
        if self._pool is None:
            # Of their own, shared among themselves: what the host's graphs leave in theirs is read after a replay.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        stream.synchronize()
        # NCCL's allocator is told of the pool, and sleep mode may have one that it can offload.
        with (
            capture_pool(self._pool, self._vllm_config) as pool,
            torch.cuda.graph(graph, pool=pool, stream=stream),
        ):
            drafts = self.run_static(shape)
        self.add(shape, graph, drafts)

    def add(self, shape: PassShape, graph: Any, drafts: torch.Tensor) -> None:
        """Takes a graph that runs `run_static(shape)` into `drafts`. The smallest that fits a step runs it."""
        self._graphs[shape] = graph, drafts
        fitting = self._even.setdefault(shape.num_drafts, []) if shape.even else self._uneven
        fitting.append(shape)
        fitting.sort(key=lambda shape: (shape.num_rows, shape.num_reqs))

    def run_static(self, shape: PassShape) -> torch.Tensor:
        """The eager pass over the static inputs: what is captured."""
        tables = self._host_tables if self._in_place(shape) else self._tables
        with ExitStack() as borrowed:
            for group, table in zip(self._groups, tables, strict=True):
                borrowed.callback(setattr, group, "block_table", group.block_table)
                group.block_table = table[: shape.num_reqs]
            return self._run(*self._first(shape), shape.num_drafts)

    def _in_place(self, shape: PassShape) -> bool:
        """It reads the host's block tables."""
        return shape.num_reqs <= self._num_in_place

    def plan(
        self,
        query_lens: np.ndarray,
        upper: np.ndarray | None,
        has_chunk_ends: bool,
        num_drafts: int | None = None,
        num_unread: np.ndarray | None = None,
    ) -> Replay | None:
        """The graph that can run a step; None where there is none.

        Args:
            query_lens: `[num_reqs]` integer.
            upper: `[num_reqs]` integer or more, bounds of the sequence lengths, exact where requests prefill.
            has_chunk_ends: a chunk ends before its prompt.
            num_drafts: that are wanted; a graph may make more. None: all.
            num_unread: as of `PassInputs`.
        """
        num_reqs = len(query_lens)
        if num_unread is not None and np.array_equal(num_unread, query_lens):
            return None  # nothing has to be run
        if not has_chunk_ends and query_lens.max() <= self.query_len:
            shapes = (shape for made in (num_drafts, None) for shape in self._even.get(made, ()))
            shape = next((shape for shape in shapes if shape.num_reqs >= num_reqs), None)
            return None if shape is None else Replay(shape)
        if int(query_lens.sum()) > len(self._static.rows.token_ids):
            return None  # the window's rows might fit, but all of the step's are copied
        lens = window_lens(query_lens, upper, self._history_depth, num_unread)
        num_rows = int(lens.sum())
        for shape in self._uneven[bisect_left(self._uneven, num_rows, key=lambda shape: shape.num_rows) :]:
            rest, padding = shape.num_rows - num_rows, shape.num_reqs - num_reqs
            # The rest are sequences of their own, and a request that is padding begins at a row of it.
            if rest == padding == 0 or 0 < rest <= padding * self._max_model_len:
                return Replay(shape, self.window_starts_of(lens, shape))
        return None

    def window_starts_of(self, lens: np.ndarray, shape: PassShape) -> np.ndarray:
        """Windows of these lengths, and after them those of padding, the last of which have what is left over.

        None is longer than a sequence can be: attention reads the block table of as many rows as a window has.

        Returns:
            `[shape.num_reqs + 1]` int32.
        """
        starts = shape.num_rows - np.arange(shape.num_reqs, -1, -1, dtype=np.int32) * self._max_model_len
        np.maximum(starts, int(lens.sum()), out=starts)
        starts[0] = 0
        np.cumsum(lens, out=starts[1 : len(lens) + 1])
        return starts

    def replay(self, replay: Replay, inputs: PassInputs, num_rows: int, seq_lens: torch.Tensor) -> torch.Tensor:
        """Runs a batch.

        Args:
            replay: of `plan`.
            inputs: as for an eager pass.
            num_rows, seq_lens: as for `StaticInputs.fill`.

        Returns:
            `[num_reqs, num_drafts]` int64, memory of the caller's own.
        """
        shape, num_reqs = replay.shape, seq_lens.shape[0]
        if replay.window_starts is not None:
            self._window_starts_cpu.numpy()[: shape.num_reqs + 1] = replay.window_starts
        self._static.fill(inputs, num_rows, seq_lens, shape.num_reqs, replay.window_starts)
        if not self._in_place(shape):
            tables = [table[:num_reqs] for table in self._tables]
            torch._foreach_copy_(tables, [group.table(num_reqs) for group in self._groups])
        graph, drafts = self._graphs[shape]
        graph.replay()
        return drafts[:num_reqs].clone()

    def pad_all(self, shape: PassShape) -> None:
        """Makes all requests of the static inputs padding."""
        self._static.pad(0, shape.num_reqs, num_rows=0)
        self._static.prompt_token_ids.fill_(-1)
        starts = torch.from_numpy(self.window_starts_of(np.zeros(0, dtype=np.int32), shape))
        for window_starts in (self._static.window_starts, self._window_starts_cpu):
            window_starts[: len(starts)] = starts

    def _first(self, shape: PassShape) -> tuple[PassInputs, CommonAttentionMetadata]:
        """The first requests and rows of the static inputs, and metadata of sequences of any length."""
        num_reqs, num_rows, even, _ = shape
        static, rows = self._static, self._static.rows
        starts, starts_cpu = (
            (self._even_starts, self._even_starts_cpu) if even else (static.window_starts, self._window_starts_cpu)
        )
        inputs = PassInputs(
            StepRows(
                rows.token_ids,  # of a step that may have more rows than the window
                rows.positions,
                rows.hidden_states,
                rows.num_rejected[:num_reqs],
                rows.query_start_loc[: num_reqs + 1],
            ),
            static.next_token_ids[:num_reqs],
            static.history_slots[:num_reqs],
            None if even else static.prompt_token_ids[:num_reqs],
        )
        cad = CommonAttentionMetadata(
            query_start_loc=starts[: num_reqs + 1],
            query_start_loc_cpu=starts_cpu[: num_reqs + 1],
            seq_lens=static.seq_lens[:num_reqs],
            num_reqs=num_reqs,
            num_actual_tokens=num_rows,
            max_query_len=self.query_len if even else num_rows,
            max_seq_len=self._max_model_len,
            block_table_tensor=self._tables[0][:num_reqs],
            slot_mapping=self._groups[0].slot_mapping[:num_rows],
            causal=True,
        )
        return inputs, cad


def uneven_shapes(max_num_reqs: int, max_num_rows: int, max_model_len: int) -> list[PassShape]:
    """What passes with a prompt are captured for: so that padding rows are an eighth to a quarter of the rows at most,
    since each goes through every module, and requests a quarter at least, since each goes through every head.

    Args:
        max_num_reqs: of a step. One more has what is left over.
        max_num_rows: the largest pass to capture; 0: none.
        max_model_len: no window is longer.
    """
    rows = [64, 96, *range(128, 512, 64), *range(512, 1024, 128)]
    doubled = 1024
    while doubled < max_num_rows:
        rows += range(doubled, 2 * doubled, doubled // 4)
        doubled *= 2
    rows = [size for size in rows if size < max_num_rows]
    reqs, count = [], 8
    while count <= max_num_reqs:
        reqs.append(count)
        count *= 4
    sizes = [*rows, max_num_rows] if max_num_rows > 0 else []
    return [
        PassShape(num_reqs, num_rows, even=False)
        for num_rows in sizes
        for num_reqs in (*reqs, max_num_reqs + 1)
        if num_reqs <= num_rows <= num_reqs * max_model_len
    ]
