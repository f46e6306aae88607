"""The reference of a draft with weights of 8 bits and heads of a part of the vocabulary."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.reference.dense import DenseModel

LARGEST = 448.0  # of e4m3


def make_cheap(model: DenseModel, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> DenseModel:
    """Has the modules, and the heads that they draft by, compute with rounded weights, and score these tokens only.

    The target, and the modules' norms, experts and what chooses these stay as they are.

    Args:
        dtype: of the engine. What it rounds to 8 bits are weights that it has in 16 already, and a few in a hundred
            lie near the middle between two values of e4m3, so that they go to the other one.
    """
    for weights in (*(module.weights for module in model.modules), model.mtp):
        for name, weight in weights.items():
            if weight.dim() == 2 and name != "moe.gate.weight":
                weights[name] = rounded(weight.to(dtype).float())
    rounded_head, others = rounded(model.head.to(dtype).float()), torch.ones(len(model.head), dtype=torch.bool)
    others[torch.tensor(token_ids)] = False
    original = model.module_logits

    def module_logits(module: int, hidden: Tensor) -> Tensor:
        head, model.head = model.head, rounded_head
        try:
            return original(module, hidden).masked_fill(others, -math.inf)
        finally:
            model.head = head

    model.module_logits = module_logits  # type: ignore[method-assign]
    return model


def rounded(weight: Tensor) -> Tensor:
    """To e4m3, in units of the smallest power of two by which the largest of a row fits."""
    largest = weight.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    unit = torch.exp2((largest / LARGEST).log2().ceil())
    return (weight / unit).to(torch.float8_e4m3fn).float() * unit
