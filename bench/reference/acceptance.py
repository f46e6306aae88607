"""The acceptance that exact drafts would have reached on given token streams, by the dense float32 reference."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.reference import dense_model

if TYPE_CHECKING:
    from bench.reference.dense import DenseModel


def reference_acceptance(model: Path, streams: Sequence[tuple[list[int], list[int]]], k: int) -> dict[str, Any]:
    """Drafts for every stream as an engine with exact draft rows would, k tokens a pass.

    The reference says which drafts the modules make at a row whose tokens are known; the stream says which are right.

    Args:
        model: folder of a Step-3.5 checkpoint.
        streams: prompts and what the target, greedily, continued them with.

    Returns:
        `passes`, `accepted_per_position` and `acceptance_length`.
    """
    import torch

    torch.set_grad_enabled(False)
    dense = dense_model(model)
    counts = [_accepted_by_pass(dense, prompt, output, k) for prompt, output in streams]
    passes = sum(map(len, counts))
    accepted_per_position = [
        sum(accepted > position for stream in counts for accepted in stream) for position in range(k)
    ]
    return {
        "passes": passes,
        "accepted_per_position": accepted_per_position,
        "acceptance_length": 1 + sum(accepted_per_position) / passes if passes else 1.0,
    }


class ExactLengths:
    """The acceptance length of exact drafts, which modes that gave the same tokens have in common.

    Args:
        model, k: as for `reference_acceptance`.
    """

    def __init__(self, model: Path, k: int) -> None:
        self._model, self._k = model, k
        self._known: dict[str, float] = {}

    def of(self, what: str, streams: Sequence[tuple[list[int], list[int]]]) -> float:
        """Of these streams. Says on standard error of `what` it is computed, which may take long, where it is."""
        if (key := repr(streams)) not in self._known:
            print(f"{what}: computing what exact drafts would reach", file=sys.stderr, flush=True)
            self._known[key] = reference_acceptance(self._model, streams, self._k)["acceptance_length"]
        return self._known[key]


def _accepted_by_pass(dense: "DenseModel", prompt: list[int], output: list[int], k: int) -> list[int]:
    """How many drafts of each pass over a stream are right."""
    from bench.reference.dense import Reference

    tokens, reference = prompt + output, Reference(dense)
    for _ in range(k + 1):  # the last pass drafts past the stream
        reference.update(tokens, len(tokens) - 1)
        tokens = [*tokens, int(dense.logits(reference.target_hidden()[-1:]).argmax())]
    reference.update(tokens, len(tokens) - 1)
    # By module and row; later passes change nothing about rows whose tokens are known.
    greedy = [dense.module_logits(i, reference.module_hidden(i)).argmax(-1).tolist() for i in range(dense.num_modules)]

    def draft(index: int, last: int) -> int:
        """The draft of that index at row `last`, after drafts that were all right."""
        if index < dense.num_modules:
            return int(greedy[index][last])
        known = tokens[: last + 2 + index]
        reference.update(known, last)
        return int(reference.slide(last, known[last + 2 :]).argmax())

    counts = []
    last = len(prompt) - 1
    while last + 1 < len(prompt) + len(output) - 1:
        accepted = 0
        while accepted < k and draft(accepted, last) == tokens[last + 2 + accepted]:
            accepted += 1
        counts.append(accepted)
        last += accepted + 1
    return counts
