"""The inputs of a captured pass, and how a batch is brought into them."""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import async_tensor_h2d

from mtp.kernels import has_kernels
from mtp.rows import PassInputs, StepRows

BLOCK_ROWS = 256


@dataclass(frozen=True, slots=True)
class StaticInputs:
    """Memory that a captured pass reads, for as many requests as there can be.

    Attributes:
        rows: of the step.
        next_token_ids, history_slots, prompt_token_ids: as of `PassInputs`.
        seq_lens: `[max_num_reqs]` int32.
        window_starts: `[max_num_reqs + 1]` int32, where each request's rows begin in the window.
        query_len: rows of each window of a decode pass, 1 + drafts.
        padding_slot: a slot of the history that belongs to no request.
    """

    rows: StepRows
    next_token_ids: torch.Tensor
    history_slots: torch.Tensor
    prompt_token_ids: torch.Tensor
    seq_lens: torch.Tensor
    window_starts: torch.Tensor
    query_len: int
    padding_slot: int

    @classmethod
    def make(
        cls,
        max_num_reqs: int,
        num_rows: int,
        query_len: int,
        num_modules: int,
        padding_slot: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "StaticInputs":
        """Memory for so many requests and rows.

        Args:
            num_modules: that a pass runs.
        """

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        rows = StepRows(
            token_ids=zeros(num_rows, dtype=torch.int32),
            positions=zeros(num_rows, dtype=torch.int64),
            hidden_states=zeros(num_rows, hidden_size, dtype=dtype),
            num_rejected=zeros(max_num_reqs, dtype=torch.int32),
            query_start_loc=zeros(max_num_reqs + 1, dtype=torch.int32),
        )
        next_token_ids = zeros(max_num_reqs, dtype=torch.int32)
        history_slots = torch.full((max_num_reqs,), padding_slot, dtype=torch.int64, device=device)
        prompt_token_ids = zeros(max_num_reqs, num_modules, dtype=torch.int32)
        seq_lens = zeros(max_num_reqs, dtype=torch.int32)
        window_starts = zeros(max_num_reqs + 1, dtype=torch.int32)
        return cls(
            rows, next_token_ids, history_slots, prompt_token_ids, seq_lens, window_starts, query_len, padding_slot
        )

    def fill(
        self,
        inputs: PassInputs,
        num_rows: int,
        seq_lens: torch.Tensor,
        size: int,
        window_starts: np.ndarray | None = None,
    ) -> None:
        """Takes over a batch, and pads it to `size` requests.

        Args:
            num_rows: of the step; there may be more in `inputs`.
            seq_lens: `[num_reqs]` int32, rejected rows of the step counted in.
            window_starts: `[size + 1]` int32, for a pass whose windows differ in their lengths; None: `window_starts`
                and `prompt_token_ids` stay as they are, and are not read.
        """
        self.rows.hidden_states[:num_rows].copy_(inputs.rows.hidden_states[:num_rows])
        if window_starts is not None:
            async_tensor_h2d(window_starts, out=self.window_starts[: size + 1])
        fill_static_inputs(self, inputs, num_rows, seq_lens, size, window_starts is not None)

    def pad(self, first: int, end: int, num_rows: int) -> None:
        """Makes requests `[first, end)` padding, after the `num_rows` rows of those before.

        Each is a sequence of no rows, of which more are rejected than drafts are made: those past its end are padding
        too.
        """
        self.history_slots[first:end].fill_(self.padding_slot)
        self.seq_lens[first:end].zero_()
        self.rows.query_start_loc[first + 1 : end + 1].fill_(num_rows)
        self.rows.num_rejected[first:end].fill_(self.query_len)


def fill_static_inputs(
    static: StaticInputs,
    inputs: PassInputs,
    num_rows: int,
    seq_lens: torch.Tensor,
    size: int,
    with_prompt: bool,
) -> None:
    """What the device has of `StaticInputs.fill`, but for hidden states: one launch for up to eight copies and five
    fills.

    Args:
        with_prompt: `prompt_token_ids` are written.
    """
    if not has_kernels(static.seq_lens):
        fill_static_inputs_by_ops(static, inputs, num_rows, seq_lens, size, with_prompt)
        return
    rows, prompt = inputs.rows, inputs.prompt_token_ids
    _fill[(triton.cdiv(max(num_rows, size), BLOCK_ROWS),)](
        rows.token_ids,
        rows.positions,
        rows.num_rejected,
        rows.query_start_loc,
        inputs.next_token_ids,
        static.history_slots if inputs.history_slots is None else inputs.history_slots,
        static.prompt_token_ids if prompt is None else prompt,
        seq_lens,
        static.rows.token_ids,
        static.rows.positions,
        static.rows.num_rejected,
        static.rows.query_start_loc,
        static.next_token_ids,
        static.history_slots,
        static.prompt_token_ids,
        static.seq_lens,
        seq_lens.shape[0],
        num_rows,
        size,
        static.query_len,
        static.padding_slot,
        static.prompt_token_ids.shape[1],
        with_prompt,
        prompt is not None,
        BLOCK_ROWS,
    )


def fill_static_inputs_by_ops(
    static: StaticInputs,
    inputs: PassInputs,
    num_rows: int,
    seq_lens: torch.Tensor,
    size: int,
    with_prompt: bool,
) -> None:
    num_reqs, rows = seq_lens.shape[0], inputs.rows
    static.rows.token_ids[:num_rows].copy_(rows.token_ids[:num_rows])
    static.rows.positions[:num_rows].copy_(rows.positions[:num_rows])
    static.rows.num_rejected[:num_reqs].copy_(rows.num_rejected)
    static.rows.query_start_loc[: num_reqs + 1].copy_(rows.query_start_loc)
    static.next_token_ids[:num_reqs].copy_(inputs.next_token_ids)
    if inputs.history_slots is not None:
        static.history_slots[:num_reqs].copy_(inputs.history_slots)
    static.seq_lens[:num_reqs].copy_(seq_lens)
    if with_prompt:
        static.prompt_token_ids[:size].fill_(-1)
        if inputs.prompt_token_ids is not None:
            static.prompt_token_ids[:num_reqs].copy_(inputs.prompt_token_ids)
    if size > num_reqs:
        static.pad(num_reqs, size, num_rows)


@triton.jit(do_not_specialize=["num_reqs", "num_rows", "size"])
def _fill(
    token_ids_ptr,
    positions_ptr,
    num_rejected_ptr,
    query_start_loc_ptr,
    next_token_ids_ptr,
    history_slots_ptr,
    prompt_token_ids_ptr,
    seq_lens_ptr,
    out_token_ids_ptr,
    out_positions_ptr,
    out_num_rejected_ptr,
    out_query_start_loc_ptr,
    out_next_token_ids_ptr,
    out_history_slots_ptr,
    out_prompt_token_ids_ptr,
    out_seq_lens_ptr,
    num_reqs,
    num_rows,
    size,
    QUERY_LEN: tl.constexpr,
    PADDING_SLOT: tl.constexpr,
    NUM_MODULES: tl.constexpr,
    WITH_PROMPT: tl.constexpr,
    HAS_PROMPT: tl.constexpr,
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
    if WITH_PROMPT:
        for module in tl.static_range(NUM_MODULES):
            token_ids = tl.full([BLOCK], -1, tl.int32)
            if HAS_PROMPT:
                token_ids = tl.load(prompt_token_ids_ptr + i * NUM_MODULES + module, mask=is_req, other=-1)
            tl.store(out_prompt_token_ids_ptr + i * NUM_MODULES + module, token_ids, mask=written)
