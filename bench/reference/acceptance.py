"""The acceptance that exact drafts would have reached on given token streams, by the dense float32 reference."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


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

    from bench.reference.dense import DenseModel, Reference

    torch.set_grad_enabled(False)
    dense = DenseModel(model)
    passes, accepted_per_position = 0, [0] * k
    for prompt, output in streams:
        tokens, reference = prompt + output, Reference(dense)
        for _ in range(k + 1):  # the last pass drafts past the stream
            reference.update(tokens, len(tokens) - 1)
            tokens = [*tokens, int(dense.logits(reference.target_hidden()[-1:]).argmax())]
        reference.update(tokens, len(tokens) - 1)
        greedy = [
            dense.module_logits(i, reference.module_hidden(i)).argmax(-1).tolist() for i in range(dense.num_modules)
        ]
        last = len(prompt) - 1
        while last + 1 < len(prompt) + len(output) - 1:
            accepted = 0
            while accepted < k:
                if accepted < dense.num_modules:
                    draft = greedy[accepted][last]
                else:
                    known = tokens[: last + 2 + accepted]
                    reference.update(known, last)
                    draft = int(reference.slide(last, known[last + 2 :]).argmax())
                if draft != tokens[last + 2 + accepted]:
                    break
                accepted_per_position[accepted] += 1
                accepted += 1
            passes += 1
            last += accepted + 1
    return {
        "passes": passes,
        "accepted_per_position": accepted_per_position,
        "acceptance_length": 1 + sum(accepted_per_position) / passes if passes else 1.0,
    }
