"""CUDA graphs of whole decode passes.

A pass of several modules is some hundred small launches, which the host takes longer to issue than the device to run.
In a decode batch no request has more rows than a token and its drafts. Give each a window of that many, whatever its
step had, and the pass has the same shape in every step, in which nothing depends on a value that only the host knows:
it is recorded once per number of requests, on static inputs, and replayed. What is recorded is the eager pass itself,
so that the two can't differ.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from mtp.groups import DraftGroup
from mtp.window import PassInputs, StepRows


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
        self._run = run
        self._groups = list(groups)
        self._max_model_len = max_model_len
        self._padding_slot = padding_slot
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._sizes: list[int] = []
        self._pool: Any = None
        num_rows = max_num_reqs * query_len
        starts = torch.arange(0, num_rows + 1, query_len, dtype=torch.int32)
        self._query_start_loc_cpu, self._query_start_loc = starts, starts.to(device)  # of the windows
        self._seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._tables_stay = tables_stay
        self._tables = [
            group.table(max_num_reqs)
            if tables_stay
            else torch.zeros(max_num_reqs, group.table(1).shape[1], dtype=torch.int32, device=device)
            for group in groups
        ]
        self._rows = StepRows(
            token_ids=torch.zeros(num_rows, dtype=torch.int32, device=device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=device),
            hidden_states=torch.zeros(num_rows, hidden_size, dtype=dtype, device=device),
            last_rows=self._query_start_loc[1:] - 1,
            query_start_loc=self._query_start_loc.clone(),
        )
        self._next_token_ids = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._history_slots = torch.full((max_num_reqs,), padding_slot, dtype=torch.int64, device=device)

    def __contains__(self, num_reqs: int) -> bool:
        return num_reqs in self._graphs

    @torch.inference_mode()
    def capture(self, num_reqs: int) -> None:
        """Records the pass of `num_reqs` requests, all of them padding: nothing is written to the draft's cache."""
        self._pad(0, num_reqs, num_rows=0)
        self.run_static(num_reqs)  # kernels are compiled and workspaces allocated outside of the graph
        if self._pool is None:
            # Of their own, shared among themselves: what the host's graphs leave in theirs is read after a replay.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        stream.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            drafts = self.run_static(num_reqs)
        self._graphs[num_reqs] = graph, drafts
        self._sizes = sorted(self._graphs)

    def run_static(self, num_reqs: int) -> torch.Tensor:
        """The eager pass over the first `num_reqs` requests of the static inputs: what is recorded."""
        bound = [group.block_table for group in self._groups]
        for group, table in zip(self._groups, self._tables, strict=True):
            group.block_table = table[:num_reqs]
        drafts = self._run(*self._static(num_reqs))
        for group, bound_table in zip(self._groups, bound, strict=True):
            group.block_table = bound_table
        return drafts

    def size_for(self, cad: CommonAttentionMetadata) -> int | None:
        """The number of requests of the graph that can run this batch; None where there is none."""
        if cad.max_query_len > self.query_len:
            return None
        index = bisect_left(self._sizes, cad.num_reqs)
        return self._sizes[index] if index < len(self._sizes) else None

    def replay(self, size: int, inputs: PassInputs, cad: CommonAttentionMetadata) -> torch.Tensor:
        """Runs a batch.

        Args:
            size: of `size_for`.
            inputs, cad: as for an eager pass; no chunk may end before its prompt.

        Returns:
            `[num_reqs, num_drafts]` int64, memory of the caller's own.
        """
        num_reqs, num_rows = cad.num_reqs, cad.num_actual_tokens
        rows = inputs.rows
        self._rows.token_ids[:num_rows].copy_(rows.token_ids[:num_rows])
        self._rows.positions[:num_rows].copy_(rows.positions[:num_rows])
        self._rows.hidden_states[:num_rows].copy_(rows.hidden_states[:num_rows])
        self._rows.last_rows[:num_reqs].copy_(rows.last_rows)
        self._rows.query_start_loc[: num_reqs + 1].copy_(rows.query_start_loc)
        self._next_token_ids[:num_reqs].copy_(inputs.next_token_ids)
        if inputs.history_slots is not None:
            self._history_slots[:num_reqs].copy_(inputs.history_slots)
        self._seq_lens[:num_reqs].copy_(cad.seq_lens[:num_reqs])
        if size > num_reqs:
            self._pad(num_reqs, size, num_rows)
        if not self._tables_stay:
            for group, table in zip(self._groups, self._tables, strict=True):
                table[:num_reqs].copy_(group.table(num_reqs))
        graph, drafts = self._graphs[size]
        graph.replay()
        return drafts[:num_reqs].clone()

    def _pad(self, first: int, end: int, num_rows: int) -> None:
        """Makes requests `[first, end)` padding, after the `num_rows` rows of those before.

        Each is a sequence of no rows that ends so far before it begins that drafts past its end are padding too.
        """
        self._history_slots[first:end].fill_(self._padding_slot)
        self._seq_lens[first:end].zero_()
        self._rows.query_start_loc[first + 1 : end + 1].fill_(num_rows)
        self._rows.last_rows[first:end].fill_(num_rows - 1 - self.query_len)

    def _static(self, num_reqs: int) -> tuple[PassInputs, CommonAttentionMetadata]:
        """The first `num_reqs` requests of the static inputs, and metadata of sequences of any length."""
        num_rows = num_reqs * self.query_len
        rows = self._rows
        inputs = PassInputs(
            StepRows(
                rows.token_ids[:num_rows],
                rows.positions[:num_rows],
                rows.hidden_states[:num_rows],
                rows.last_rows[:num_reqs],
                rows.query_start_loc[: num_reqs + 1],
            ),
            self._next_token_ids[:num_reqs],
            self._history_slots[:num_reqs],
        )
        cad = CommonAttentionMetadata(
            query_start_loc=self._query_start_loc[: num_reqs + 1],
            query_start_loc_cpu=self._query_start_loc_cpu[: num_reqs + 1],
            seq_lens=self._seq_lens[:num_reqs],
            num_reqs=num_reqs,
            num_actual_tokens=num_rows,
            max_query_len=self.query_len,
            max_seq_len=self._max_model_len,
            block_table_tensor=self._tables[0][:num_reqs],
            slot_mapping=self._groups[0].slot_mapping[:num_rows],
            causal=True,
        )
        return inputs, cad
