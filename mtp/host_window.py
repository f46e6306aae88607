"""The window of a pass where the host has all of it: on a CPU nothing has to be left unread for the device's sake.

So a window ends with the last valid row, has no rejected row after it, and no more rows before it than the stale ones:
`build_window` can't know how many were rejected. In NumPy, since a batch has few rows, and small operations take torch
longer.
"""

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from mtp.rows import HistoryRows, StepRows
from mtp.window import Window, for_other_rows


def build_window_on_host(
    rows: StepRows, cad: CommonAttentionMetadata, history: HistoryRows, slots: torch.Tensor
) -> Window:
    """What `build_window` lays out, in as few rows as there can be.

    Args:
        rows, cad: of the target's step, on the CPU, with one rotary position for each row.
        slots: `[num_reqs]` int64, of the history.
    """
    num_reqs, depth = cad.num_reqs, history.depth
    step_bounds = cad.query_start_loc_cpu[: num_reqs + 1].numpy()
    num_rejected, seq_lens = rows.num_rejected.numpy(), cad.seq_lens[:num_reqs].numpy()
    query_lens = np.diff(step_bounds)
    ends = seq_lens - num_rejected
    lens = np.maximum(query_lens - num_rejected, np.minimum(ends, depth + 1))
    bounds = np.zeros(num_reqs + 1, dtype=step_bounds.dtype)
    np.cumsum(lens, out=bounds[1:])

    req_indices = np.repeat(np.arange(num_reqs), lens)
    seq_positions = np.arange(bounds[-1], dtype=np.int64) + (ends - bounds[1:])[req_indices]
    offsets = seq_positions - (seq_lens - query_lens)[req_indices]  # from the target's first row
    past = (offsets < 0).nonzero()[0]
    step_rows = torch.from_numpy(np.maximum(offsets + step_bounds[req_indices], 0))
    token_ids, positions, hidden_states = (x[step_rows] for x in (rows.token_ids, rows.positions, rows.hidden_states))
    if len(past):
        row_slots = slots.numpy()[req_indices[past]]
        entries = seq_positions[past] - history.ends.numpy()[row_slots] + depth
        there = (entries < depth) & (entries >= depth - history.valid.numpy()[row_slots])
        seq_positions[past[~there]] = -1
        entries = np.clip(entries, 0, depth - 1)
        token_ids.numpy()[past] = history.token_ids.numpy()[row_slots, entries]
        positions.numpy()[past] = history.positions.numpy()[row_slots, entries]
        source = torch.from_numpy(row_slots * depth + entries)
        hidden_states[torch.from_numpy(past)] = history.hidden_states.flatten(0, 1)[source]
    query_start_loc, exact = torch.from_numpy(bounds), torch.from_numpy(ends)
    return Window(
        req_indices=torch.from_numpy(req_indices),
        seq_positions=torch.from_numpy(seq_positions),
        token_ids=token_ids,
        positions=positions,
        hidden_states=hidden_states,
        last_rows=torch.from_numpy(bounds[1:].astype(np.int64) - 1),
        last_positions=torch.from_numpy(ends.astype(np.int64) - 1),
        seq_lens=exact,
        cad=for_other_rows(
            cad,
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=exact,
            seq_lens_cpu_upper_bound=exact,
            num_actual_tokens=int(bounds[-1]),
            max_query_len=int(lens.max()),
            max_seq_len=int(ends.max()),
        ),
    )


def store_on_host(history: HistoryRows, slots: torch.Tensor, window: Window) -> None:
    """Keeps in the history the last rows of every window.

    Args:
        slots: `[num_reqs]` int64, of the history.
    """
    bounds, seq_positions, at = window.cad.query_start_loc_cpu.numpy(), window.seq_positions.numpy(), slots.numpy()
    rows = bounds[1:, None] - np.arange(history.depth, 0, -1)
    there = rows >= bounds[:-1, None]
    rows = np.maximum(rows, 0)
    there &= seq_positions[rows] >= 0
    history.token_ids.numpy()[at] = window.token_ids.numpy()[rows]
    history.positions.numpy()[at] = window.positions.numpy()[rows]
    history.hidden_states[slots] = window.hidden_states[torch.from_numpy(rows)]
    history.ends.numpy()[at] = window.last_positions.numpy() + 1
    # Rows count from the last one back, up to the first that is missing.
    history.valid.numpy()[at] = there[:, ::-1].cumprod(axis=1).sum(axis=1)
