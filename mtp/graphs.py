"""CUDA graphs of whole decode passes.

A pass of several modules is some hundred small launches, which the host takes longer to issue than the device to run.
In a decode batch no request has more rows than a token and its drafts. Give each a window of that many, whatever its
step had, and the pass has the same shape in every step, in which nothing depends on a value that only the host knows:
it is captured once per number of requests, on static inputs, and replayed. What is captured is the eager pass itself,
so that the two can't differ.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from mtp.groups import KVGroup
from mtp.kernels.static_inputs import StaticInputs
from mtp.rows import PassInputs, StepRows


class PassGraphs:
    """The graphs of one proposer and the inputs that they read.

    Args:
        run: the pass of a batch, from its inputs and metadata to `[num_reqs, num_drafts]` token ids.
        query_len: rows of each window, 1 + drafts.
        padding_slot: a slot of the history that belongs to no request.
        tables_stay: the groups' block tables are bound for good, hold every number of requests, and the host fills them
            in place: a captured pass reads them as they are. Else it has copies.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        run: Callable[[PassInputs, CommonAttentionMetadata], torch.Tensor],
        groups: Sequence[KVGroup],
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
        """Captures the pass of `num_reqs` requests, all of them padding: nothing is written to the draft's cache."""
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
        """The eager pass over the first `num_reqs` requests of the static inputs: what is captured."""
        with ExitStack() as borrowed:
            for group, table in zip(self._groups, self._tables, strict=True):
                borrowed.callback(setattr, group, "block_table", group.block_table)
                group.block_table = table[:num_reqs]
            return self._run(*self._first(num_reqs))

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
