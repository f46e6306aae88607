"""What was drafted for a request, step by step, and how much of it was right."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

UNKNOWN_TOKEN = -1


class Step(NamedTuple):
    """A step that verified drafts of one request.

    Attributes:
        row: the sequence position that the drafts follow, of the token that the step before had sampled.
        drafted, accepted: how many.
        preemptions: how often the request had been preempted by then.
    """

    row: int
    drafted: int
    accepted: int
    preemptions: int


@dataclass
class StepLog:
    """In the scheduler: the steps of the requests that run."""

    _steps: dict[str, list[Step]] = field(default_factory=dict)

    def note(self, requests: Any, scheduler_output: Any, model_runner_output: Any) -> None:
        """Takes note of a step whose outputs the scheduler is about to take.

        Args:
            requests: the scheduler's, by id.
        """
        sampled = model_runner_output.sampled_token_ids
        for request_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            request = requests.get(request_id)
            if not drafts or request is None or request.is_finished() or request.num_stale_output_tokens > 0:
                continue
            tokens = sampled[model_runner_output.req_id_to_index[request_id]] if sampled else []
            if len(tokens):
                step = Step(request.num_tokens - 1, len(drafts), len(tokens) - 1, request.num_preemptions)
                self._steps.setdefault(request_id, []).append(step)

    def pop(self, request_id: str) -> list[Step]:
        """The steps of a request that ends."""
        return self._steps.pop(request_id, [])


def slots_of_steps(steps: Sequence[Step], block_ids: Sequence[int], block_size: int) -> np.ndarray:
    """The slots `[num_steps]` int64 of the rows that the drafts follow."""
    rows = np.array([step.row for step in steps], dtype=np.int64)
    slots: np.ndarray = np.asarray(block_ids, dtype=np.int64)[rows // block_size] * block_size + rows % block_size
    return slots


def drafts_of_steps(
    steps: Sequence[Step], found: torch.Tensor, token_ids: Sequence[int], first_position: int, preemptions: int
) -> dict[str, torch.Tensor]:
    """What a record says of its drafts.

    Args:
        found: `[num_steps, num_drafts]` int32, what lay in the store. After a preemption the rows before it were run
            again as part of a prompt, so there lies what was accepted in the end.
        token_ids: of the record's rows, from `first_position` on.
        preemptions: of the request in the end.
    """
    tokens = torch.full_like(found, UNKNOWN_TOKEN)
    for i, step in enumerate(steps):
        if step.preemptions == preemptions:
            tokens[i, : step.drafted] = found[i, : step.drafted]
        else:
            accepted = token_ids[step.row + 1 - first_position :][: step.accepted]
            tokens[i, : len(accepted)] = torch.tensor(accepted, dtype=torch.int32)
    return {
        "draft_rows": torch.tensor([step.row for step in steps], dtype=torch.int32),
        "draft_counts": torch.tensor([[s.drafted, s.accepted] for s in steps], dtype=torch.int32).reshape(-1, 2),
        "draft_tokens": tokens,
    }
