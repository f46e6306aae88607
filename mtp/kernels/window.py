"""The rows of a drafting pass: laid out, kept and shifted. `mtp/window.py` has the reasons.

Each function has its PyTorch version below it by the name of `..._by_ops`: the reference, and what runs under M-RoPE,
since the kernels know one rotary position per row. Some have a version in NumPy, too, by the name of `..._on_host`, for
a CPU: a batch has few rows, and small operations take torch longer.

In a kernel one program works on the rows of one request, so offsets into the window need no search. A row's source is a
number: its row in the step, or, below zero, `-1 - index` of its entry in the flattened history.
"""

import numpy as np
import torch
from vllm.triton_utils import tl, triton

from mtp.kernels import has_kernels
from mtp.rows import HistoryRows, RowLayout, StepRows

MAX_BLOCK_ROWS = 256
BLOCK_COLUMNS = 1024


def lay_out_rows(
    rows: StepRows,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rows: int,
    longest: int,
    history: HistoryRows | None,
    slots: torch.Tensor | None,
) -> RowLayout:
    """The rows of a pass, from those of the step and those of the history.

    Args:
        query_start_loc: `[num_reqs + 1]` integer, where each request's rows begin in the window.
        seq_lens: `[num_reqs]` integer, rejected rows of the step counted in.
        num_rows, longest: of all windows together, and of the longest.
        history, slots: None for a single module, which has nothing to repair; else `slots` is `[num_reqs]` int64.
    """
    if history is not None and slots is not None and is_on_host(rows.positions):
        return lay_out_rows_on_host(rows, query_start_loc, seq_lens, num_rows, history, slots)
    if not _has_kernels(rows.positions):
        return lay_out_rows_by_ops(rows, query_start_loc, seq_lens, num_rows, history, slots)
    num_reqs, device = query_start_loc.shape[0] - 1, query_start_loc.device
    kept = (None,) * 4 if history is None else (history.token_ids, history.positions, history.ends, history.valid)

    def rows_of(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, dtype=dtype, device=device)

    layout = RowLayout(
        req_indices=rows_of(torch.int64),
        seq_positions=rows_of(torch.int64),
        token_ids=rows_of(rows.token_ids.dtype),
        positions=rows_of(torch.int64),
        hidden_states=torch.empty(num_rows, rows.hidden_states.shape[1], dtype=rows.hidden_states.dtype, device=device),
        last_rows=torch.empty(num_reqs, dtype=torch.int64, device=device),
        last_positions=torch.empty(num_reqs, dtype=torch.int64, device=device),
        seq_lens=torch.empty(num_reqs, dtype=seq_lens.dtype, device=device),
    )
    sources = rows_of(torch.int64)
    block = min(triton.next_power_of_2(longest), MAX_BLOCK_ROWS)
    _lay_out_rows[num_reqs, triton.cdiv(longest, block)](
        rows.query_start_loc,
        query_start_loc,
        seq_lens,
        rows.num_rejected,
        rows.token_ids,
        rows.positions,
        slots,
        *kept,
        layout.req_indices,
        layout.seq_positions,
        layout.token_ids,
        layout.positions,
        sources,
        layout.last_rows,
        layout.last_positions,
        layout.seq_lens,
        0 if history is None else history.depth,
        block,
    )
    hidden_size = rows.hidden_states.shape[1]
    _gather_rows[num_rows, triton.cdiv(hidden_size, BLOCK_COLUMNS)](
        sources,
        rows.hidden_states,
        rows.hidden_states.stride(0),
        rows.hidden_states if history is None else history.hidden_states,
        layout.hidden_states,
        hidden_size,
        BLOCK_COLUMNS,
    )
    return layout


def lay_out_rows_by_ops(
    rows: StepRows,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rows: int,
    history: HistoryRows | None,
    slots: torch.Tensor | None,
) -> RowLayout:
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


def lay_out_rows_on_host(
    rows: StepRows,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rows: int,
    history: HistoryRows,
    slots: torch.Tensor,
) -> RowLayout:
    step_bounds, bounds = rows.query_start_loc.numpy(), query_start_loc.numpy()
    num_reqs, lens, lens_with_rejected = len(slots), np.diff(bounds), seq_lens.numpy().astype(np.int64)
    first_positions = lens_with_rejected - np.diff(step_bounds)
    last_positions = lens_with_rejected - 1 - rows.num_rejected.numpy()
    starts = np.maximum(last_positions - lens + 1, 0)

    req_indices = np.repeat(np.arange(num_reqs), lens)
    seq_positions = np.arange(num_rows) + (starts - bounds[:-1])[req_indices]
    offsets = seq_positions - first_positions[req_indices]
    last_row = rows.token_ids.shape[0] - 1
    step_rows = torch.from_numpy(np.minimum(np.maximum(offsets + step_bounds[req_indices], 0), last_row))
    token_ids, positions = rows.token_ids[step_rows], rows.positions[step_rows]
    hidden_states = rows.hidden_states[step_rows]
    unwritten = seq_positions > last_positions[req_indices]
    past = (offsets < 0).nonzero()[0]
    if len(past):
        row_slots, depth = slots.numpy()[req_indices[past]], history.depth
        entries = seq_positions[past] - history.ends.numpy()[row_slots] + depth
        unwritten[past] |= (entries >= depth) | (entries < depth - history.valid.numpy()[row_slots])
        entries = np.minimum(np.maximum(entries, 0), depth - 1)
        token_ids.numpy()[past] = history.token_ids.numpy()[row_slots, entries]
        positions.numpy()[past] = history.positions.numpy()[row_slots, entries]
        source = torch.from_numpy(row_slots * depth + entries)
        hidden_states[torch.from_numpy(past)] = history.hidden_states.flatten(0, 1)[source]
    seq_positions[unwritten] = -1
    last_rows = np.maximum(bounds[:-1] + last_positions - starts, bounds[:-1])
    return RowLayout(
        req_indices=torch.from_numpy(req_indices),
        seq_positions=torch.from_numpy(seq_positions),
        token_ids=token_ids,
        positions=positions,
        hidden_states=hidden_states,
        last_rows=torch.from_numpy(last_rows),
        last_positions=torch.from_numpy(last_positions),
        seq_lens=torch.from_numpy(starts + lens).to(seq_lens.dtype),
    )


def is_on_host(positions: torch.Tensor) -> bool:
    """Whether rows are laid out in NumPy. That knows one rotary position per row, as the kernels do."""
    return positions.device.type == "cpu" and positions.dim() == 1 and not has_kernels(positions)


def _has_kernels(positions: torch.Tensor) -> bool:
    """They know one rotary position per row."""
    return has_kernels(positions) and positions.dim() == 1


@triton.jit
def _lay_out_rows(
    step_start_loc_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_rejected_ptr,
    step_token_ids_ptr,
    step_positions_ptr,
    slots_ptr,
    history_token_ids_ptr,
    history_positions_ptr,
    ends_ptr,
    valid_ptr,
    req_indices_ptr,
    seq_positions_ptr,
    token_ids_ptr,
    positions_ptr,
    sources_ptr,
    last_rows_ptr,
    last_positions_ptr,
    window_seq_lens_ptr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    step_start = tl.load(step_start_loc_ptr + req).to(tl.int64)
    step_end = tl.load(step_start_loc_ptr + req + 1).to(tl.int64)
    window_start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    length = tl.load(query_start_loc_ptr + req + 1).to(tl.int64) - window_start
    seq_len = tl.load(seq_lens_ptr + req).to(tl.int64)
    first = seq_len - (step_end - step_start)
    last = seq_len - 1 - tl.load(num_rejected_ptr + req).to(tl.int64)
    start = first  # a single module has no stale rows, and keeps the step's
    if DEPTH > 0:
        start = tl.maximum(last - length + 1, 0)

    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < length
    seq_positions = start + rows
    offsets = seq_positions - first
    ran = inside & (offsets >= 0) & (offsets < step_end - step_start)
    step_rows = step_start + offsets
    token_ids = tl.load(step_token_ids_ptr + step_rows, mask=ran, other=0)
    positions = tl.load(step_positions_ptr + step_rows, mask=ran, other=0)
    sources = tl.where(ran, step_rows, 0)
    written = (seq_positions <= last) & ran
    if DEPTH > 0:
        slot = tl.load(slots_ptr + req)
        entries = seq_positions - tl.load(ends_ptr + slot) + DEPTH
        there = (entries < DEPTH) & (entries >= DEPTH - tl.load(valid_ptr + slot))
        kept = inside & (offsets < 0) & there
        indices = slot * DEPTH + entries
        token_ids = tl.where(kept, tl.load(history_token_ids_ptr + indices, mask=kept, other=0), token_ids)
        positions = tl.where(kept, tl.load(history_positions_ptr + indices, mask=kept, other=0), positions)
        sources = tl.where(kept, -1 - indices, sources)
        written = (seq_positions <= last) & (ran | kept)

    out = window_start + rows
    tl.store(req_indices_ptr + out, tl.zeros([BLOCK], tl.int64) + req, mask=inside)
    tl.store(seq_positions_ptr + out, tl.where(written, seq_positions, -1), mask=inside)
    tl.store(token_ids_ptr + out, token_ids, mask=inside)
    tl.store(positions_ptr + out, positions, mask=inside)
    tl.store(sources_ptr + out, sources, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(last_rows_ptr + req, tl.maximum(window_start + last - start, window_start))
        tl.store(last_positions_ptr + req, last)
        tl.store(window_seq_lens_ptr + req, start + length)


@triton.jit
def _gather_rows(sources_ptr, step_ptr, step_stride, history_ptr, out_ptr, size: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    source = tl.load(sources_ptr + row)
    if source < 0:
        hidden = tl.load(history_ptr + (-1 - source) * size + columns, mask=inside, other=0)
    else:
        hidden = tl.load(step_ptr + source * step_stride + columns, mask=inside, other=0)
    tl.store(out_ptr + row * size + columns, hidden, mask=inside)


def store_rows(history: HistoryRows, slots: torch.Tensor, query_start_loc: torch.Tensor, layout: RowLayout) -> None:
    """Keeps in the history the last rows up to each request's last valid one.

    Args:
        slots: `[num_reqs]` int64, of the history.
        query_start_loc: `[num_reqs + 1]` integer, where each request's rows begin in the window.
    """
    if is_on_host(layout.positions):
        store_rows_on_host(history, slots, query_start_loc, layout)
        return
    if not _has_kernels(layout.positions):
        store_rows_by_ops(history, slots, query_start_loc, layout)
        return
    hidden_size = layout.hidden_states.shape[1]
    _store_rows[slots.shape[0], triton.cdiv(hidden_size, BLOCK_COLUMNS)](
        slots,
        query_start_loc,
        layout.seq_positions,
        layout.token_ids,
        layout.positions,
        layout.hidden_states,
        layout.last_rows,
        layout.last_positions,
        history.token_ids,
        history.positions,
        history.hidden_states,
        history.ends,
        history.valid,
        hidden_size,
        history.depth,
        BLOCK_COLUMNS,
    )


def store_rows_by_ops(
    history: HistoryRows, slots: torch.Tensor, query_start_loc: torch.Tensor, layout: RowLayout
) -> None:
    steps_back = torch.arange(history.depth - 1, -1, -1, device=slots.device)
    assert layout.seq_positions is not None
    rows = layout.last_rows[:, None] - steps_back
    inside = rows >= query_start_loc[:-1].long()[:, None]
    rows = rows.clamp(min=0)
    there = inside & (layout.seq_positions[rows] >= 0)
    history.token_ids[slots] = layout.token_ids[rows].to(history.token_ids.dtype)
    history.positions[..., slots, :] = layout.positions[..., rows]
    history.hidden_states[slots] = layout.hidden_states[rows]
    assert layout.last_positions is not None
    history.ends[slots] = layout.last_positions + 1
    # Rows count from the last one back, up to the first that is missing.
    history.valid[slots] = there.flip(1).long().cumprod(1).sum(1)


def store_rows_on_host(
    history: HistoryRows, slots: torch.Tensor, query_start_loc: torch.Tensor, layout: RowLayout
) -> None:
    assert layout.seq_positions is not None
    assert layout.last_positions is not None
    rows = layout.last_rows.numpy()[:, None] - np.arange(history.depth - 1, -1, -1)
    there = rows >= query_start_loc.numpy()[:-1, None]
    rows, at = np.maximum(rows, 0), slots.numpy()
    there &= layout.seq_positions.numpy()[rows] >= 0
    history.token_ids.numpy()[at] = layout.token_ids.numpy()[rows]
    history.positions.numpy()[at] = layout.positions.numpy()[rows]
    history.hidden_states[slots] = layout.hidden_states[torch.from_numpy(rows)]
    history.ends.numpy()[at] = layout.last_positions.numpy() + 1
    history.valid.numpy()[at] = there[:, ::-1].cumprod(axis=1).sum(axis=1)


@triton.jit
def _store_rows(
    slots_ptr,
    query_start_loc_ptr,
    seq_positions_ptr,
    token_ids_ptr,
    positions_ptr,
    hidden_ptr,
    last_rows_ptr,
    last_positions_ptr,
    history_token_ids_ptr,
    history_positions_ptr,
    history_hidden_ptr,
    ends_ptr,
    valid_ptr,
    size: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    req = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    slot = tl.load(slots_ptr + req)
    window_start = tl.load(query_start_loc_ptr + req).to(tl.int64)
    last_row = tl.load(last_rows_ptr + req)
    unbroken = (last_row >= window_start).to(tl.int64)
    count = unbroken * 0
    for back in tl.static_range(DEPTH):
        row = last_row - back
        seq_position = tl.load(seq_positions_ptr + tl.maximum(row, window_start))
        unbroken = unbroken * (row >= window_start).to(tl.int64) * (seq_position >= 0).to(tl.int64)
        count += unbroken
        index = slot * DEPTH + DEPTH - 1 - back
        if row >= window_start:
            hidden = tl.load(hidden_ptr + row * size + columns, mask=inside, other=0)
            tl.store(history_hidden_ptr + index * size + columns, hidden, mask=inside)
            if tl.program_id(1) == 0:
                tl.store(history_token_ids_ptr + index, tl.load(token_ids_ptr + row))
                tl.store(history_positions_ptr + index, tl.load(positions_ptr + row))
    if tl.program_id(1) == 0:
        tl.store(ends_ptr + slot, tl.load(last_positions_ptr + req) + 1)
        tl.store(valid_ptr + slot, count)


def shift_rows(
    token_ids: torch.Tensor, req_indices: torch.Tensor | None, last_rows: torch.Tensor, follows: torch.Tensor
) -> torch.Tensor:
    """Every row's next token, and after each request's last valid row the token that follows it.

    Args:
        token_ids, req_indices: `[num_rows]` integer. The kernel wants to know whose a row is, the operators don't.
        last_rows: `[num_reqs]` int64.
        follows: `[num_reqs]` integer.
    """
    if req_indices is None or not has_kernels(token_ids):
        shift = shift_rows_on_host if token_ids.device.type == "cpu" else shift_rows_by_ops
        return shift(token_ids, last_rows, follows)
    shifted = torch.empty_like(token_ids)
    num_rows = token_ids.shape[0]
    _shift_rows[(triton.cdiv(num_rows, MAX_BLOCK_ROWS),)](
        token_ids, req_indices, last_rows, follows, shifted, num_rows, MAX_BLOCK_ROWS
    )
    return shifted


def shift_rows_by_ops(token_ids: torch.Tensor, last_rows: torch.Tensor, follows: torch.Tensor) -> torch.Tensor:
    shifted = token_ids.roll(-1)
    shifted[last_rows] = follows.to(shifted.dtype)
    return shifted


def shift_rows_on_host(token_ids: torch.Tensor, last_rows: torch.Tensor, follows: torch.Tensor) -> torch.Tensor:
    given = token_ids.numpy()
    shifted = given.copy()  # the last of all rows may be a rejected one, which takes any token
    shifted[:-1] = given[1:]
    shifted[last_rows.numpy()] = follows.numpy()
    return torch.from_numpy(shifted)


@triton.jit(do_not_specialize=["num_rows"])
def _shift_rows(token_ids_ptr, req_indices_ptr, last_rows_ptr, follows_ptr, out_ptr, num_rows, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    reqs = tl.load(req_indices_ptr + rows, mask=inside, other=0)
    is_last = inside & (tl.load(last_rows_ptr + reqs, mask=inside, other=-1) == rows)
    following = tl.load(token_ids_ptr + rows + 1, mask=rows + 1 < num_rows, other=0)
    follows = tl.load(follows_ptr + reqs, mask=is_last, other=0)
    tl.store(out_ptr + rows, tl.where(is_last, follows.to(following.dtype), following), mask=inside)


def read_following(
    last_sampled: torch.Tensor, next_prefill: torch.Tensor, num_sampled: torch.Tensor, rows: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens after the rows of a step, of a host that keeps them by the request's row.

    Args:
        last_sampled: `[max_num_reqs]` int64.
        next_prefill: `[count or more, max_num_reqs]` int32, the prompt's tokens after this step's.
        num_sampled: `[num_reqs]` integer; none is sampled where a chunk ends before its prompt.
        rows: `[num_reqs]` int64, of the requests.

    Returns:
        `next_token_ids` and `prompt_token_ids` of `PassInputs`.
    """
    if not has_kernels(rows):
        return read_following_by_ops(last_sampled, next_prefill, num_sampled, rows, count)
    num_reqs = rows.shape[0]
    next_token_ids = torch.empty_like(rows)
    prompt_token_ids = torch.empty(num_reqs, count, dtype=torch.int32, device=rows.device)
    _read_following[(triton.cdiv(num_reqs, MAX_BLOCK_ROWS),)](
        last_sampled,
        next_prefill,
        num_sampled,
        rows,
        next_token_ids,
        prompt_token_ids,
        num_reqs,
        next_prefill.stride(0),
        count,
        MAX_BLOCK_ROWS,
    )
    return next_token_ids, prompt_token_ids


def read_following_by_ops(
    last_sampled: torch.Tensor, next_prefill: torch.Tensor, num_sampled: torch.Tensor, rows: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    follow = next_prefill[:count, rows].T
    prompt_token_ids = torch.where((num_sampled == 0)[:, None], follow, -1)
    return last_sampled.index_select(0, rows), prompt_token_ids.contiguous()


@triton.jit(do_not_specialize=["num_reqs", "stride"])
def _read_following(
    last_sampled_ptr,
    next_prefill_ptr,
    num_sampled_ptr,
    rows_ptr,
    next_token_ids_ptr,
    prompt_token_ids_ptr,
    num_reqs,
    stride,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    reqs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = reqs < num_reqs
    rows = tl.load(rows_ptr + reqs, mask=inside, other=0)
    tl.store(next_token_ids_ptr + reqs, tl.load(last_sampled_ptr + rows, mask=inside, other=0), mask=inside)
    in_prompt = inside & (tl.load(num_sampled_ptr + reqs, mask=inside, other=1) == 0)
    for i in tl.static_range(COUNT):
        token_ids = tl.load(next_prefill_ptr + i * stride + rows, mask=in_prompt, other=-1)
        tl.store(prompt_token_ids_ptr + reqs * COUNT + i, token_ids, mask=inside)
