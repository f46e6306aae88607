"""What a drafter handed to its model in one pass, and where its keys and values should have gone.

The judgement knows no proposer: which rows a pass must write follows from the step's rows and from how many forwards
run over all of them. vLLM's own proposer runs its first module over them and then one row per request and forward;
ours runs every module over them, then one row per request for every turn of the modules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID


@dataclass
class Forward:
    """One call of the draft model.

    Attributes:
        starts: of each request's rows, and their number at the end.
        positions: `[num_rows]` rotary positions, `[3, num_rows]` under M-RoPE.
        slots: of the module that ran.
    """

    module: int
    input_ids: list[int]
    positions: torch.Tensor
    starts: list[int]
    slots: list[int]
    metadata: Any
    output: torch.Tensor | None = None

    def rows_of(self, request: int) -> range:
        return range(self.starts[request], self.starts[request + 1])


@dataclass
class ObservedPass:
    """One call of `propose`.

    Attributes:
        firsts, lasts: sequence positions of each request's first row and of its last valid one.
        chain_length: how many forwards run over all rows.
        tables, block_sizes: of each module's group.
    """

    req_ids: list[str]
    firsts: list[int]
    lasts: list[int]
    chunk_ends: list[bool]
    chain_length: int
    tables: Sequence[torch.Tensor]
    block_sizes: Sequence[int]
    max_model_len: int
    forwards: list[Forward] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)

    def slot(self, module: int, request: int, position: int) -> int:
        """Where the module's keys and values of that position belong."""
        if not 0 <= position < self.max_model_len:
            return PADDING_SLOT_ID
        size = self.block_sizes[module]
        return int(self.tables[module][request, position // size]) * size + position % size

    def ahead(self, step: int) -> int:
        """How far behind the last valid row the rows of this forward are; 0: it runs over all rows."""
        past = step - self.chain_length
        return 0 if past < 0 else past // self.chain_length + 1

    def last_row(self, step: int, request: int) -> int:
        """The row of this forward from which a draft is made."""
        rows, forward = self.forwards[step].rows_of(request), self.forwards[step]
        if self.ahead(step):
            return rows[0]
        return next(row for row in rows if int(forward.positions[row]) == self.lasts[request])

    def wrong_slots(self) -> list[str]:
        """Rows whose keys and values would land elsewhere than in their request's blocks, or nowhere."""
        return [
            f"forward {step}, request {request}, {message}"
            for step in range(len(self.forwards))
            for request in range(len(self.req_ids))
            for message in self._wrong_slots_of(step, request)
        ]

    def _wrong_slots_of(self, step: int, request: int) -> list[str]:
        forward, ahead, last = self.forwards[step], self.ahead(step), self.lasts[request]
        rows = forward.rows_of(request)
        if ahead:
            wanted = [last + ahead]
            positions: Mapping[int, int] = {rows[0]: last + ahead}
        else:
            wanted = list(range(self.firsts[request], last + 1))
            positions = {row: int(forward.positions[row]) for row in rows}
        written = {positions[row]: forward.slots[row] for row in rows if forward.slots[row] != PADDING_SLOT_ID}
        expected = {position: self.slot(forward.module, request, position) for position in {*written, *wanted}}
        return [
            f"position {position}: {written.get(position, PADDING_SLOT_ID)} is not {slot}"
            for position, slot in sorted(expected.items())
            if written.get(position, PADDING_SLOT_ID) != slot
        ]


def chain_length(drafter: Any) -> int:
    """How many forwards of a drafter run over all rows of a step; vLLM's own has one."""
    plan = getattr(drafter, "plan", None)
    return 1 if plan is None else plan.chain_length


def selected_module(kwargs: Mapping[str, Any], num_modules: int) -> int:
    return kwargs.get("spec_step_idx", 0) % num_modules
