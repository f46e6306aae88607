"""Rows as data: what a host hands over of a step, and where the rows of a pass lie (`mtp/window.py` says how)."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class StepRows:
    """The target's rows of one step, as the host hands them over.

    Attributes:
        token_ids: `[num_tokens]` integer.
        positions: `[num_tokens]` int64 rotary positions, `[3, num_tokens]` under M-RoPE.
        hidden_states: `[num_tokens, hidden_size]`.
        num_rejected: `[num_reqs]` integer, how many of each request's last rows are not valid.
        query_start_loc: `[num_reqs + 1]` integer, where each request's rows begin, and their number.
        last_rows: `[num_reqs]` integer, each request's last valid row, of a host that has worked it out.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    hidden_states: torch.Tensor
    num_rejected: torch.Tensor
    query_start_loc: torch.Tensor
    last_rows: torch.Tensor | None = None


class Layers(NamedTuple):
    """What attention layers need for some rows, by layer name.

    Attributes:
        slot_mapping: views of the groups' buffers, or the host's.
    """

    attn_metadata: dict[str, object]
    slot_mapping: dict[str, torch.Tensor]


class PassInputs(NamedTuple):
    """What a pass reads of a step, beside its attention metadata.

    Attributes:
        next_token_ids: `[num_reqs]` integer, the token after each request's last valid row.
        history_slots: `[num_reqs]` int64; None for a single module, which has nothing to repair.
        prompt_token_ids: `[num_reqs, num_modules]` int32, contiguous, the tokens that follow a chunk which ends before
            its prompt does, and -1 for other requests; None where there is no such chunk.
        num_unread: `[num_reqs]` integer on the host, how many of each request's first rows no draft will depend on:
            the window begins after them. None: none of any request.
        layers: what the host has made of the step's rows for the draft's layers, as it would be made for a pass over
            them; None: it is to be made.
    """

    rows: StepRows
    next_token_ids: torch.Tensor
    history_slots: torch.Tensor | None
    prompt_token_ids: torch.Tensor | None = None
    num_unread: np.ndarray | None = None
    layers: Layers | None = None


@dataclass
class HistoryRows:
    """The rows that are kept between passes: entry j of slot s is the row at position `ends[s] - depth + j`.

    Attributes:
        depth: rows kept per request, modules - 1.
        token_ids: `[num_slots, depth]` int32.
        positions: rotary positions, `[num_slots, depth]` or `[3, num_slots, depth]` int64.
        hidden_states: `[num_slots, depth, hidden_size]` of the target.
        ends: `[num_slots]` int64, the position after the last row.
        valid: `[num_slots]` int64, how many of the last entries are there.
    """

    depth: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    hidden_states: torch.Tensor
    ends: torch.Tensor
    valid: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the rows of a pass lie, and what they hold.

    Attributes:
        req_indices: `[num_rows]` int64, each row's request. None, as `seq_positions`, where the rows are those of the
            step, whose slots the host has; so are `last_positions` where no slide goes by them.
        seq_positions: `[num_rows]` int64 sequence positions; -1 for rows that must not be written.
        token_ids: `[num_rows]` integer, each row's own token t_p.
        positions: rotary positions, `[num_rows]` or `[3, num_rows]` int64.
        hidden_states: `[num_rows, hidden_size]` of the target.
        last_rows: `[num_reqs]` integer, where in the window each last valid row is.
        last_positions: `[num_reqs]` int64, its sequence position L.
        seq_lens: `[num_reqs]` integer, up to the last row of the window.
    """

    req_indices: torch.Tensor | None
    seq_positions: torch.Tensor | None
    token_ids: torch.Tensor
    positions: torch.Tensor
    hidden_states: torch.Tensor
    last_rows: torch.Tensor
    last_positions: torch.Tensor | None
    seq_lens: torch.Tensor
