"""The rows of a drafting pass, and the history that repairs what rejections left behind.

Row p of a request sits at sequence position p and holds token t_p and the target's hidden state there. Module i
consumes t_{p+1+i} at row p, so the last M - 1 rows of one pass were computed from drafts: module i's row p is final
only once t_{p+1+i} is verified. If a drafts are then accepted, the first a of those rows were computed from the right
tokens and the last M - 1 - a are stale. A window that ends at the last valid row L and has M rows or more holds them
all, and the rows that rejections take away from a step are as many as it needs:

    positions   n-2  n-1 | n  n+1  n+2  n+3        n: first position that the target ran in this step
                history  | this step's rows         L: last valid row, here n+1 after two rejections
                [-------------L]                    the window: as many rows as the step ran, at least M

How many rows a request has is known to the host; where they lie, only to the device. A row that the history doesn't
have is padding: its slot is -1 and its outputs are unused. A request that is shorter than its window begins at position
0 and has the padding at its end, so no row precedes the sequence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from mtp.kernels import has_kernels
from mtp.kernels import window as window_kernels
from mtp.rows import RowLayout, StepRows


@dataclass(frozen=True, slots=True)
class Window(RowLayout):
    """The rows of one pass.

    Attributes:
        cad: attention metadata of the pass, less what differs between KV cache groups.
    """

    cad: CommonAttentionMetadata

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]


class History:
    """The last rows of every request, by absolute position.

    Entry j of slot s is the row at position `ends[s] - depth + j`, and the last `valid[s]` entries are there. A
    request that did not pass here before, or that goes on at another position than it stopped at, finds no row and
    has padding instead: nothing else has to be told of preemption, prefix hits or steps without a draft.

    Attributes:
        depth: rows kept per request, modules - 1.
        padding_slot: belongs to no request.
    """

    def __init__(
        self,
        depth: int,
        num_slots: int,
        hidden_size: int,
        dtype: torch.dtype,
        rope_dims: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.depth = depth
        self.padding_slot = num_slots
        self._free = list(range(num_slots))[::-1]
        num_slots += 1
        self.token_ids = torch.zeros(num_slots, depth, dtype=torch.int32, device=device)
        self.positions = torch.zeros(*rope_dims, num_slots, depth, dtype=torch.int64, device=device)
        self.hidden_states = torch.zeros(num_slots, depth, hidden_size, dtype=dtype, device=device)
        self.ends = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.valid = torch.zeros(num_slots, dtype=torch.int64, device=device)
        # The state, not the id, is the request: an id may come again. The order is that of last use.
        self._slots: dict[str, tuple[CachedRequestState, int]] = {}

    def assign(self, req_ids: Sequence[str], requests: dict[str, CachedRequestState]) -> list[int]:
        """The slots of a batch, host side; a new request gets an empty one, for which an idle one may lose its own."""
        fresh = []
        slots = []
        for req_id in req_ids:
            state = requests[req_id]
            known = self._slots.pop(req_id, None)
            if known is not None and known[0] is state:
                slot = known[1]
            else:
                slot = known[1] if known is not None else self._take(requests, req_ids)
                fresh.append(slot)
            self._slots[req_id] = (state, slot)
            slots.append(slot)
        if fresh:
            self.forget(fresh)
        return slots

    def forget(self, slots: Sequence[int]) -> None:
        """Empties these slots, which have changed hands."""
        # Not by assignment: on CUDA that copies its right side over, and waits for it behind all of the step.
        self.valid.index_fill_(0, async_tensor_h2d(np.array(slots), device=self.valid.device), 0)

    def _take(self, requests: dict[str, CachedRequestState], req_ids: Iterable[str]) -> int:
        if not self._free:
            gone = [req_id for req_id in self._slots if req_id not in requests]
            in_use = set(req_ids)
            gone = gone or [next(req_id for req_id in self._slots if req_id not in in_use)]
            self._free += [self._slots.pop(req_id)[1] for req_id in gone]
        return self._free.pop()

    def store(self, slots: torch.Tensor, window: Window) -> None:
        """Keeps the last rows up to each request's last valid one.

        Args:
            slots: `[num_reqs]` int64.
        """
        store = window_kernels.store_rows if _has_kernels(window.positions) else store_rows
        store(self, slots, window.cad.query_start_loc, window)


def store_rows(history: History, slots: torch.Tensor, query_start_loc: torch.Tensor, layout: RowLayout) -> None:
    """`History.store` in plain PyTorch."""
    steps_back = torch.arange(history.depth - 1, -1, -1, device=slots.device)
    rows = layout.last_rows[:, None] - steps_back
    inside = rows >= query_start_loc[:-1].long()[:, None]
    rows = rows.clamp(min=0)
    there = inside & (layout.seq_positions[rows] >= 0)
    history.token_ids[slots] = layout.token_ids[rows].to(history.token_ids.dtype)
    history.positions[..., slots, :] = layout.positions[..., rows]
    history.hidden_states[slots] = layout.hidden_states[rows]
    history.ends[slots] = layout.last_positions + 1
    # Rows count from the last one back, up to the first that is missing.
    history.valid[slots] = there.flip(1).long().cumprod(1).sum(1)


def chunk_ends(
    batch: InputBatch, num_sampled: np.ndarray, cad: CommonAttentionMetadata, count: int
) -> np.ndarray | None:
    """The `count` tokens that follow each chunk which ends before its prompt does.

    The prompt is followed by the output so far when a preempted request is computed again. The host is not
    asked for the token: it answers with the prompt's last one (vLLM's `prepare_next_token_ids_padded`).

    Args:
        num_sampled: `[num_reqs]`, tokens of this step that the batch counts in already.

    Returns:
        `[num_reqs, count]` int32 token ids, -1 where there is no such chunk; None when every prompt is complete.
    """
    upper = cad.seq_lens_cpu_upper_bound
    if upper is None:
        return None
    ends = upper[: cad.num_reqs].numpy()  # exact for requests that prefill
    totals = batch.num_tokens_no_spec[: cad.num_reqs] - num_sampled
    partial = (ends < totals).nonzero()[0]
    if len(partial) == 0:
        return None
    # The scheduler leaves as many tokens past a chunk as there are modules; the clamp keeps the look-up in bounds.
    columns = np.minimum(ends[partial, None] + np.arange(count), totals[partial, None] - 1)
    follow = np.full((cad.num_reqs, count), -1, dtype=np.int32)
    follow[partial] = batch.token_ids_cpu[partial[:, None], columns]
    return follow


def build_window(
    rows: StepRows, cad: CommonAttentionMetadata, history: History | None, slots: torch.Tensor | None
) -> Window:
    """Lays out the rows of a pass: the history's, where a request has any, and this step's.

    Nothing is synchronised: lengths of queries come from the host, positions stay on the device.

    Args:
        cad: of the target's step; its `seq_lens` count rejected rows in. Its query lengths say how many rows a window
            has at least, and may be more than the step's.
        history, slots: None for a single module, which has nothing to repair.
    """
    query_lens_cpu = cad.query_start_loc_cpu.diff()
    window_lens_cpu = query_lens_cpu if history is None else _window_lens(cad, query_lens_cpu, history.depth + 1)
    query_start_loc_cpu, query_start_loc = cad.query_start_loc_cpu, cad.query_start_loc
    if not torch.equal(window_lens_cpu, query_lens_cpu):
        query_start_loc_cpu = torch.zeros_like(cad.query_start_loc_cpu)
        torch.cumsum(window_lens_cpu, 0, out=query_start_loc_cpu[1:])
        query_start_loc = async_tensor_h2d(query_start_loc_cpu, device=cad.query_start_loc.device)
    num_rows, longest = int(query_start_loc_cpu[-1]), int(window_lens_cpu.max())
    if history is not None and slots is not None and _has_kernels(rows.positions):
        layout = window_kernels.lay_out_rows(rows, query_start_loc, cad.seq_lens, num_rows, longest, history, slots)
    else:
        layout = lay_out_rows(rows, query_start_loc, cad.seq_lens, num_rows, history, slots)
    upper = cad.seq_lens_cpu_upper_bound
    window_cad = for_other_rows(
        cad,
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens=layout.seq_lens,
        seq_lens_cpu_upper_bound=None if upper is None else torch.maximum(upper, window_lens_cpu),
        num_actual_tokens=num_rows,
        max_query_len=longest,
        max_seq_len=max(cad.max_seq_len, longest),
    )
    return Window(**{field.name: getattr(layout, field.name) for field in fields(layout)}, cad=window_cad)


def _has_kernels(positions: torch.Tensor) -> bool:
    """They know one rotary position per row."""
    return has_kernels(positions) and positions.dim() == 1


def lay_out_rows(
    rows: StepRows,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rows: int,
    history: History | None,
    slots: torch.Tensor | None,
) -> RowLayout:
    """The rows of a pass in plain PyTorch.

    Args:
        query_start_loc: `[num_reqs + 1]` integer, where each request's rows begin in the window.
        seq_lens: `[num_reqs]` integer, rejected rows of the step counted in.
    """
    device = query_start_loc.device
    step_bounds = rows.query_start_loc.long()
    window_bounds = step_bounds if query_start_loc is rows.query_start_loc else query_start_loc.long()
    step_starts, window_starts = step_bounds[:-1], window_bounds[:-1]
    window_lens = window_bounds.diff()
    first_positions = seq_lens.long() - step_bounds.diff()  # where the target's rows begin
    last_positions = seq_lens.long() - 1 - rows.num_rejected
    # Where the window begins. A single module has no stale rows, and keeps the step's.
    starts = first_positions if history is None else (last_positions - window_lens + 1).clamp(min=0)

    row_indices = torch.arange(num_rows, device=device)
    req_indices = torch.searchsorted(window_bounds[1:], row_indices, right=True)
    seq_positions = row_indices + (starts - window_starts)[req_indices]
    offsets = seq_positions - first_positions[req_indices]  # from the target's first row; negative in the history
    valid = seq_positions <= last_positions[req_indices]
    step_rows = (step_starts[req_indices] + offsets).clamp(0, rows.token_ids.shape[0] - 1)
    token_ids = rows.token_ids[step_rows]
    positions = rows.positions[..., step_rows]
    hidden_states = rows.hidden_states[step_rows]
    if history is not None:
        assert slots is not None
        row_slots = slots[req_indices]
        past = offsets < 0
        entries = seq_positions - history.ends[row_slots] + history.depth
        there = (entries < history.depth) & (entries >= history.depth - history.valid[row_slots])
        entries = entries.clamp(0, history.depth - 1)
        valid &= ~past | there
        token_ids = torch.where(past, history.token_ids[row_slots, entries].to(token_ids.dtype), token_ids)
        positions = torch.where(past, history.positions[..., row_slots, entries], positions)
        hidden_states = torch.where(past[:, None], history.hidden_states[row_slots, entries], hidden_states)
    return RowLayout(
        req_indices=req_indices,
        seq_positions=torch.where(valid, seq_positions, -1),
        token_ids=token_ids,
        positions=positions,
        hidden_states=hidden_states,
        # A request that is padding ends before it begins, and must not reach into the rows of the one before it.
        last_rows=torch.maximum(window_starts + last_positions - starts, window_starts),
        last_positions=last_positions,
        seq_lens=(starts + window_lens).to(seq_lens.dtype),
    )


def for_other_rows(cad: CommonAttentionMetadata, **changes: Any) -> CommonAttentionMetadata:
    """The metadata with these changes, and without what the host derived from its own rows."""
    return cad.replace(
        positions=None,
        logits_indices_padded=None,
        num_logits_indices=None,
        max_logits_per_req=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
        **changes,
    )


def _window_lens(cad: CommonAttentionMetadata, query_lens_cpu: torch.Tensor, at_least: int) -> torch.Tensor:
    """Rows of each request's window: as many as the step ran, and `at_least` where the sequence has them.

    The bound is exact where a request prefills, so a short prompt gets no padding; where it decodes it may be too
    high, and `build_window` puts the padding at the end.
    """
    upper = cad.seq_lens_cpu_upper_bound
    if upper is None:
        return query_lens_cpu.clamp(min=at_least)
    return torch.maximum(query_lens_cpu, upper[: len(query_lens_cpu)].clamp(max=at_least).to(query_lens_cpu.dtype))
