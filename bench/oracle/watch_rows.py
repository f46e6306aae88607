"""Watches the hidden-state extractor of a running engine.

After every forward of the target that attends to anything: the slots of its rows, by this package and by the host, are
the same in the anchor's group, and a reader finds each row where a request's block ids say that it is. (What the rows
are is for other tests to say: `tests/extraction` holds them against transformers and dense models.)
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.oracle.report import Report
from bench.oracle.slots import count_wrong_slots, rows_in_forward


@dataclass
class RowsWatcher:
    """Follows the extractor of one engine, in place of a drafter's `Watcher`.

    Attributes:
        diverging, partings, followed: as of `Watcher`; nothing is done with them here.
    """

    runner: Any
    report: Report
    diverging: set[str] = field(default_factory=set)
    partings: dict[str, str] = field(default_factory=dict)
    followed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # After the extractor's own hook, which was registered before it.
        self.runner.get_model().register_forward_hook(self._check_forward)

    def start_schedule(self) -> None:
        self.report.start_schedule()
        self.diverging.clear()
        self.partings.clear()

    def _check_forward(self, model: Any, args: Any, output: Any) -> None:
        extractor = self.runner.hidden_states_extractor
        (anchor,) = extractor.bound_groups.all
        rows = rows_in_forward(anchor.layer_names[0])
        if rows is None:
            return
        first_positions, query_lens = rows
        self.report.passes += 1
        self.report.note_slots(*count_wrong_slots([anchor], first_positions, query_lens, self.runner.max_model_len))
        self._check_rows(extractor, anchor, first_positions.tolist(), query_lens.tolist())

    def _check_rows(self, extractor: Any, anchor: Any, first_positions: list[int], query_lens: list[int]) -> None:
        from mtp.slots import slots_of

        store = extractor.store
        kept: Tensor = store.rows.flatten(0, 1)
        start = 0
        for request, (first, count) in enumerate(zip(first_positions, query_lens, strict=True)):
            # The table's entries are block ids where both count blocks alike, which they do on every backend of a CPU.
            blocks = anchor.table(len(query_lens))[request].tolist()
            slots = torch.from_numpy(slots_of(blocks, first, count, anchor.block_size)).to(kept.device)
            wrong = (kept[slots] != extractor.rows[start : start + count]).flatten(1).any(1)
            self.report.rows_checked += count
            if found := int(wrong.sum()):
                self.report.note_wrong_rows(0, found)
                self.report.note_mismatch(
                    f"{found} of the rows [{first}, {first + count}) of request {request} of a forward are not where "
                    f"its blocks in KV cache group {anchor.kv_cache_group_id} say that they are."
                )
            start += count
