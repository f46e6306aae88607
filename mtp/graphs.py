"""CUDA graphs of whole decode passes.

A pass of several modules is some hundred small launches, which the host takes longer to issue than the device to run.
In a decode batch no request has more rows than a token and its drafts. Give each a window of that many, whatever its
step had, and the pass has the same shape in every step, in which nothing depends on a value that only the host knows:
it is recorded once per number of requests, on static inputs, and replayed. What is recorded is the eager pass itself,
so that the two can't differ.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config import VllmConfig
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backend import CommonAttentionMetadata

from mtp.groups import DraftGroup
from mtp.kernels import has_kernels
from mtp.rows import PassInputs, StepRows

BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Memory that a recorded pass reads, for as many requests as there can be.

    Attributes:
        rows: of windows of `query_len` rows each.
        next_token_ids, history_slots: as of `PassInputs`.
        seq_lens: `[max_num_reqs]` int32.
        query_len: rows of each window, 1 + drafts.
        padding_slot: a slot of the history that belongs to no request.
    """

    rows: StepRows
    next_token_ids: torch.Tensor
    history_slots: torch.Tensor
    seq_lens: torch.Tensor
    query_len: int
    padding_slot: int

    @classmethod
    def make(
        cls,
        max_num_reqs: int,
        query_len: int,
        padding_slot: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "StaticInputs":
        num_rows = max_num_reqs * query_len
        zeros = lambda *shape, dtype: torch.zeros(*shape, dtype=dtype, device=device)  # noqa: E731
        rows = StepRows(
            token_ids=zeros(num_rows, dtype=torch.int32),
            positions=zeros(num_rows, dtype=torch.int64),
            hidden_states=zeros(num_rows, hidden_size, dtype=dtype),
            num_rejected=zeros(max_num_reqs, dtype=torch.int32),
            query_start_loc=zeros(max_num_reqs + 1, dtype=torch.int32),
        )
        next_token_ids = zeros(max_num_reqs, dtype=torch.int32)
        history_slots = torch.full((max_num_reqs,), padding_slot, dtype=torch.int64, device=device)
        seq_lens = zeros(max_num_reqs, dtype=torch.int32)
        return cls(rows, next_token_ids, history_slots, seq_lens, query_len, padding_slot)

    def fill(self, inputs: PassInputs, num_rows: int, seq_lens: torch.Tensor, size: int) -> None:
        """Takes over a batch, and pads it to `size` requests.

        Args:
            num_rows: of the step; there may be more in `inputs`.
            seq_lens: `[num_reqs]` int32, rejected rows of the step counted in.
        """
        self.rows.hidden_states[:num_rows].copy_(inputs.rows.hidden_states[:num_rows])
        fill = _fill_in_one_launch if has_kernels(self.seq_lens) else fill_one_by_one
        fill(self, inputs, num_rows, seq_lens, size)

    def pad(self, first: int, end: int, num_rows: int) -> None:
        """Makes requests `[first, end)` padding, after the `num_rows` rows of those before.

        Each is a sequence of no rows, of which more are rejected than drafts are made: those past its end are padding
        too.
        """
        self.history_slots[first:end].fill_(self.padding_slot)
        self.seq_lens[first:end].zero_()
        self.rows.query_start_loc[first + 1 : end + 1].fill_(num_rows)
        self.rows.num_rejected[first:end].fill_(self.query_len)


def fill_one_by_one(static: StaticInputs, inputs: PassInputs, num_rows: int, seq_lens: torch.Tensor, size: int) -> None:
    """`StaticInputs.fill` of all but the hidden states, in plain PyTorch."""
    num_reqs, rows = seq_lens.shape[0], inputs.rows
    static.rows.token_ids[:num_rows].copy_(rows.token_ids[:num_rows])
    static.rows.positions[:num_rows].copy_(rows.positions[:num_rows])
    static.rows.num_rejected[:num_reqs].copy_(rows.num_rejected)
    static.rows.query_start_loc[: num_reqs + 1].copy_(rows.query_start_loc)
    static.next_token_ids[:num_reqs].copy_(inputs.next_token_ids)
    if inputs.history_slots is not None:
        static.history_slots[:num_reqs].copy_(inputs.history_slots)
    static.seq_lens[:num_reqs].copy_(seq_lens)
    if size > num_reqs:
        static.pad(num_reqs, size, num_rows)


def _fill_in_one_launch(
    static: StaticInputs, inputs: PassInputs, num_rows: int, seq_lens: torch.Tensor, size: int
) -> None:
    # In place of eight copies and, for a padded batch, four fills.
    rows = inputs.rows
    _fill[(triton.cdiv(max(num_rows, size), BLOCK_ROWS),)](
        rows.token_ids,
        rows.positions,
        rows.num_rejected,
        rows.query_start_loc,
        inputs.next_token_ids,
        static.history_slots if inputs.history_slots is None else inputs.history_slots,
        seq_lens,
        static.rows.token_ids,
        static.rows.positions,
        static.rows.num_rejected,
        static.rows.query_start_loc,
        static.next_token_ids,
        static.history_slots,
        static.seq_lens,
        seq_lens.shape[0],
        num_rows,
        size,
        static.query_len,
        static.padding_slot,
        BLOCK_ROWS,
    )


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "size"])
def _fill(
    token_ids_ptr,
    positions_ptr,
    num_rejected_ptr,
    query_start_loc_ptr,
    next_token_ids_ptr,
    history_slots_ptr,
    seq_lens_ptr,
    out_token_ids_ptr,
    out_positions_ptr,
    out_num_rejected_ptr,
    out_query_start_loc_ptr,
    out_next_token_ids_ptr,
    out_history_slots_ptr,
    out_seq_lens_ptr,
    num_reqs,
    num_rows,
    size,
    QUERY_LEN: tl.constexpr,
    PADDING_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Element i of a program is row i, request i, and the end of request i's rows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = i < num_rows
    tl.store(out_token_ids_ptr + i, tl.load(token_ids_ptr + i, mask=is_row), mask=is_row)
    tl.store(out_positions_ptr + i, tl.load(positions_ptr + i, mask=is_row), mask=is_row)
    is_req = i < num_reqs
    written = i < size
    num_rejected = tl.load(num_rejected_ptr + i, mask=is_req, other=QUERY_LEN)
    tl.store(out_num_rejected_ptr + i, num_rejected, mask=written)
    ends = tl.load(query_start_loc_ptr + 1 + i, mask=is_req, other=num_rows)
    tl.store(out_query_start_loc_ptr + 1 + i, ends, mask=written)
    tl.store(out_next_token_ids_ptr + i, tl.load(next_token_ids_ptr + i, mask=is_req), mask=is_req)
    slots = tl.load(history_slots_ptr + i, mask=is_req, other=PADDING_SLOT)
    tl.store(out_history_slots_ptr + i, slots, mask=written)
    tl.store(out_seq_lens_ptr + i, tl.load(seq_lens_ptr + i, mask=is_req, other=0), mask=written)


class PassGraphs:
    """The graphs of one proposer and the inputs that they read.

    Args:
        run: the pass of a batch, from its inputs and metadata to `[num_reqs, num_drafts]` token ids.
        query_len: rows of each window, 1 + drafts.
        padding_slot: a slot of the history that belongs to no request.
        tables_stay: the groups' block tables are bound for good, hold every number of requests, and the host fills them
            in place: a recorded pass reads them as they are. Else it has copies.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        run: Callable[[PassInputs, CommonAttentionMetadata], torch.Tensor],
        groups: Sequence[DraftGroup],
        query_len: int,
        max_num_reqs: int,
        max_model_len: int,
        padding_slot: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tables_stay: bool = False,
    ) -> None:
        self.query_len = query_len
        self._vllm_config = vllm_config
        self._run = run
        self._groups = list(groups)
        self._max_model_len = max_model_len
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._sizes: list[int] = []
        self._pool: Any = None
        starts = torch.arange(0, max_num_reqs * query_len + 1, query_len, dtype=torch.int32)
        self._query_start_loc_cpu, self._query_start_loc = starts, starts.to(device)  # of the windows
        self._static = StaticInputs.make(max_num_reqs, query_len, padding_slot, hidden_size, dtype, device)
        self._tables_stay = tables_stay
        self._tables = [
            group.table(max_num_reqs)
            if tables_stay
            else torch.zeros(max_num_reqs, group.table(1).shape[1], dtype=torch.int32, device=device)
            for group in groups
        ]

    def __contains__(self, num_reqs: int) -> bool:
        return num_reqs in self._graphs

    @torch.inference_mode()
    def capture(self, num_reqs: int) -> None:
        """Records the pass of `num_reqs` requests, all of them padding: nothing is written to the draft's cache."""
        self._static.pad(0, num_reqs, num_rows=0)
        self.run_static(num_reqs)  # kernels are compiled and workspaces allocated outside of the graph
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
            drafts = self.run_static(num_reqs)
        self._graphs[num_reqs] = graph, drafts
        self._sizes = sorted(self._graphs)

    def run_static(self, num_reqs: int) -> torch.Tensor:
        """The eager pass over the first `num_reqs` requests of the static inputs: what is recorded."""
        bound = [group.block_table for group in self._groups]
        for group, table in zip(self._groups, self._tables, strict=True):
            group.block_table = table[:num_reqs]
        drafts = self._run(*self._first(num_reqs))
        for group, bound_table in zip(self._groups, bound, strict=True):
            group.block_table = bound_table
        return drafts

    def size_for(self, num_reqs: int, max_query_len: int) -> int | None:
        """The number of requests of the graph that can run this batch; None where there is none."""
        if max_query_len > self.query_len:
            return None
        index = bisect_left(self._sizes, num_reqs)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int, inputs: PassInputs, num_rows: int, seq_lens: torch.Tensor) -> torch.Tensor:
        """Runs a batch.

        Args:
            size: of `size_for`.
            inputs: as for an eager pass; no chunk may end before its prompt.
            num_rows, seq_lens: as for `StaticInputs.fill`.

        Returns:
            `[num_reqs, num_drafts]` int64, memory of the caller's own.
        """
        num_reqs = seq_lens.shape[0]
        self._static.fill(inputs, num_rows, seq_lens, size)
        if not self._tables_stay:
            for group, table in zip(self._groups, self._tables, strict=True):
                table[:num_reqs].copy_(group.table(num_reqs))
        graph, drafts = self._graphs[size]
        graph.replay()
        return drafts[:num_reqs].clone()

    def _first(self, num_reqs: int) -> tuple[PassInputs, CommonAttentionMetadata]:
        """The first `num_reqs` requests of the static inputs, and metadata of sequences of any length."""
        num_rows = num_reqs * self.query_len
        static, rows = self._static, self._static.rows
        inputs = PassInputs(
            StepRows(
                rows.token_ids[:num_rows],
                rows.positions[:num_rows],
                rows.hidden_states[:num_rows],
                rows.num_rejected[:num_reqs],
                rows.query_start_loc[: num_reqs + 1],
            ),
            static.next_token_ids[:num_reqs],
            static.history_slots[:num_reqs],
        )
        cad = CommonAttentionMetadata(
            query_start_loc=self._query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=self._query_start_loc_cpu[: num_reqs + 1],
            seq_lens=static.seq_lens[:num_reqs],
            num_reqs=num_reqs,
            num_actual_tokens=num_rows,
            max_query_len=self.query_len,
            max_seq_len=self._max_model_len,
            block_table_tensor=self._tables[0][:num_reqs],
            slot_mapping=self._groups[0].slot_mapping[:num_rows],
            causal=True,
        )
        return inputs, cad
