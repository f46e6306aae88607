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
0 and has the padding at its end, so no row precedes the sequence. On a CPU nothing has to be left unread for the
device's sake: there a window is of max(M, valid rows), and no row comes after L.

Where every module slides and nobody else reads the cache, drafts depend on the last rows of a prompt alone
(`prompt_reach`). The window of a chunk then begins where they do, and of a chunk before them it is the M rows that the
history is made of.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata

from mtp.kernels.window import is_on_host, lay_out_rows, store_rows
from mtp.rows import HistoryRows, RowLayout, StepRows


@dataclass(frozen=True, slots=True)
class Window(RowLayout):
    """The rows of one pass.

    Attributes:
        cad: attention metadata of the pass, less what differs between KV cache groups.
        slot_mapping: `[num_rows]` int64, the host's slots of the step's rows, where these are the window; None: slots
            are to be made of the rows' positions.
    """

    cad: CommonAttentionMetadata
    slot_mapping: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]


class History(HistoryRows):
    """The last rows of every request, by absolute position, and which slot is whose.

    A request that did not pass here before, or that goes on at another position than it stopped at, finds no row and
    has padding instead: nothing else has to be told of preemption, prefix hits or steps without a draft.

    Attributes:
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
        """Room for `num_slots` requests of `depth` rows each; `rope_dims` is `(3,)` under M-RoPE, else empty."""
        self.padding_slot = num_slots
        rows = (num_slots + 1, depth)
        super().__init__(
            depth=depth,
            token_ids=torch.zeros(rows, dtype=torch.int32, device=device),
            positions=torch.zeros(*rope_dims, *rows, dtype=torch.int64, device=device),
            hidden_states=torch.zeros(*rows, hidden_size, dtype=dtype, device=device),
            ends=torch.zeros(rows[0], dtype=torch.int64, device=device),
            valid=torch.zeros(rows[0], dtype=torch.int64, device=device),
        )
        self._valid_of = self.valid.unbind()
        self._free = list(range(num_slots))[::-1]
        # The host's state of a request, not the id, is the request, since an id may come again. In order of last use.
        self._slots: dict[str, tuple[object, int]] = {}

    def assign(self, req_ids: Sequence[str], requests: Mapping[str, object]) -> list[int]:
        """The slots of a batch, host side; a new request gets an empty one, for which an idle one may lose its own.

        Args:
            requests: by id, the host's state of each request that it knows, running or waiting.
        """
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
        # By one launch and without a copy to the device, which an index would be.
        torch._foreach_zero_([self._valid_of[slot] for slot in slots])

    def _take(self, requests: Mapping[str, object], req_ids: Iterable[str]) -> int:
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
        store_rows(self, slots, window.cad.query_start_loc, window)


def build_window(
    rows: StepRows,
    cad: CommonAttentionMetadata,
    history: History | None,
    slots: torch.Tensor | None,
    laid_out: bool = False,
    num_unread: np.ndarray | None = None,
) -> Window:
    """Lays out the rows of a pass: the history's, where a request has any, and this step's.

    Nothing is synchronised: lengths of queries come from the host, positions stay on the device.

    Args:
        cad: of the target's step; its `seq_lens` count rejected rows in. Its query lengths say how many rows a window
            has at least, and may be more than the step's.
        history, slots: None for a single module, which has nothing to repair.
        laid_out: the query lengths are those of the windows, as in a captured pass, and known to the device alone.
        num_unread: as of `PassInputs`, which only windows with a history leave out.
    """
    if history is not None and not laid_out and is_on_host(rows.positions):
        cad = _with_exact_lens(cad, rows.num_rejected, history.depth, num_unread)
    elif not laid_out:
        cad = _with_window_lens(cad, 0 if history is None else history.depth, num_unread)
    num_rows, longest = cad.num_actual_tokens, cad.max_query_len
    query_start_loc = cad.query_start_loc
    layout = lay_out_rows(rows, query_start_loc, cad.seq_lens, num_rows, longest, history, slots)
    window_cad = for_other_rows(cad, seq_lens=layout.seq_lens, max_seq_len=max(cad.max_seq_len, longest))
    return Window(**{field.name: getattr(layout, field.name) for field in fields(layout)}, cad=window_cad)


def step_as_window(
    rows: StepRows, cad: CommonAttentionMetadata, slot_mapping: torch.Tensor, slides: bool = True
) -> Window:
    """The window of a draft of one module: the step itself, since there is nothing to repair.

    Rejected rows are written, too, and are written again when their positions are run again: nobody attends to them
    before that.

    Args:
        slot_mapping: `[num_tokens]` int64 or more, the host's slots of the step's rows.
        slides: there are drafts after the chain's.
    """
    last_rows = rows.last_rows
    if last_rows is None:
        last_rows = cad.query_start_loc[1:] - 1 - rows.num_rejected
    return Window(
        req_indices=None,
        seq_positions=None,
        token_ids=rows.token_ids,
        positions=rows.positions,
        hidden_states=rows.hidden_states,
        last_rows=last_rows,
        last_positions=cad.seq_lens.long() - 1 - rows.num_rejected if slides else None,
        seq_lens=cad.seq_lens,
        cad=cad,
        slot_mapping=slot_mapping[: rows.token_ids.shape[0]],
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


def _with_exact_lens(
    cad: CommonAttentionMetadata, num_rejected: torch.Tensor, depth: int, num_unread: np.ndarray | None
) -> CommonAttentionMetadata:
    """The metadata with the fewest rows that a window can have: the valid ones, and at least `depth + 1`."""
    num_reqs = cad.num_reqs
    num_rejected_np, query_lens = num_rejected.numpy(), np.diff(cad.query_start_loc_cpu[: num_reqs + 1].numpy())
    ends = cad.seq_lens[:num_reqs].numpy() - num_rejected_np
    lens = window_lens(query_lens - num_rejected_np, ends, depth, num_unread)
    bounds = np.zeros(num_reqs + 1, dtype=np.int32)
    np.cumsum(lens, out=bounds[1:])
    query_start_loc = torch.from_numpy(bounds)
    return cad.replace(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens_cpu_upper_bound=torch.from_numpy(ends),
        num_actual_tokens=int(bounds[-1]),
        max_query_len=int(lens.max()),
        max_seq_len=int(ends.max()),
    )


def _with_window_lens(
    cad: CommonAttentionMetadata, depth: int, num_unread: np.ndarray | None
) -> CommonAttentionMetadata:
    """The metadata with as many query rows as each window has."""
    starts, upper = cad.query_start_loc_cpu.numpy(), cad.seq_lens_cpu_upper_bound
    query_lens = np.diff(starts)
    lens = window_lens(query_lens, None if upper is None else upper.numpy(), depth, num_unread)
    query_start_loc_cpu, query_start_loc = cad.query_start_loc_cpu, cad.query_start_loc
    if not np.array_equal(lens, query_lens):
        query_start_loc_cpu = torch.from_numpy(np.cumsum([0, *lens], dtype=starts.dtype))
        query_start_loc = async_tensor_h2d(query_start_loc_cpu, device=cad.query_start_loc.device)
    return cad.replace(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens_cpu_upper_bound=None if upper is None else torch.maximum(upper, torch.from_numpy(lens)),
        num_actual_tokens=int(query_start_loc_cpu[-1]),
        max_query_len=int(lens.max()),
    )


def window_lens(
    query_lens: np.ndarray, upper: np.ndarray | None, depth: int, num_unread: np.ndarray | None = None
) -> np.ndarray:
    """Rows of each request's window: as many as the step ran, and `depth + 1` where the sequence has them.

    The bound is exact where a request prefills, so a short prompt gets no padding; where it decodes it may be too
    high, and `build_window` puts the padding at the end.

    Args:
        query_lens: `[num_reqs]` integer.
        upper: `[num_reqs]` integer or more, bounds of the sequence lengths.
        depth: of the history; 0: windows are as long as the queries.
        num_unread: `[num_reqs]` integer, rows at the beginning of each query that are left out.
    """
    if depth == 0:
        return query_lens
    wanted = query_lens if num_unread is None else query_lens - num_unread
    least = depth + 1 if upper is None else np.minimum(upper[: len(query_lens)], depth + 1)
    lens: np.ndarray = np.maximum(wanted, least, dtype=query_lens.dtype)
    return lens


def prompt_reach(windows: Sequence[Sequence[int | None]], hidden_states_flow: bool, depth: int) -> int | None:
    """How many of a prompt's last rows drafts depend on, now or later; None: on all of them.

    A module drafts from the prompt's last row on, which attends to the window before it. A key depends on the hidden
    state that its module was given at its row; where that is the module's before it, so is what it attended to. And
    the last `depth` rows are run again by later passes.

    Args:
        windows: of the attention layers of each module, in the order of the chain; None: not a sliding one.
        hidden_states_flow: as of `DraftDescriptor`.
        depth: of the history.
    """
    reach = outputs = 1  # rows of a module whose output is read
    for of_module in reversed(windows):
        if not of_module or None in of_module:
            return None
        keys = outputs + sum(window - 1 for window in of_module if window is not None)
        reach = max(reach, keys)
        outputs = max(keys, depth) if hidden_states_flow else 1
    return reach
