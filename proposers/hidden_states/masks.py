"""Loss masks of records, from a file: which tokens a trainer learns from.

A line per record, as JSON: `{"name": ..., "loss_mask": [0, 1, ...]}`, from the first token of the sequence on. In place
of its name a record can be called by its `request_id`. The collector writes such a file beside its records.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from proposers.hidden_states.record import Record

FILE = "masks.jsonl"


class Masks:
    """Masks by the names, or request ids, of records."""

    def __init__(self, masks: Mapping[str, Sequence[int]]) -> None:
        self._masks = masks

    @classmethod
    def read(cls, path: str | Path) -> "Masks":
        """Raises `ValueError` for a file that holds something else."""
        masks: dict[str, bytes] = {}
        with open(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    name, mask = _parse(line, f"{path}, line {number},")
                    masks[name] = mask
        return cls(masks)

    def of(self, name: str, record: Record) -> torch.Tensor | None:
        """`[T]` int64, of the record's rows; None where there is no mask of it.

        Raises:
            ValueError: the mask ends before the record does.
        """
        info = record.info
        mask = self._masks.get(name) or self._masks.get(info.request_id)
        if mask is None:
            return None
        stop = info.first_position + info.rows
        if len(mask) < stop:
            raise ValueError(f"The loss mask of {name} has {len(mask)} tokens, and its record ends at {stop}.")
        return torch.tensor(list(mask[info.first_position : stop]))


def _parse(line: str, where: str) -> tuple[str, bytes]:
    remedy = 'Write {"name": ..., "loss_mask": [0, 1, ...]}.'
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}. {remedy}") from error
    name = entry.get("name", entry.get("request_id")) if isinstance(entry, dict) else None
    mask = entry.get("loss_mask") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not isinstance(mask, list) or any(bit not in (0, 1) for bit in mask):
        raise ValueError(f"{where} has no name, or no loss_mask of zeros and ones. {remedy}")
    return name, bytes(mask)
