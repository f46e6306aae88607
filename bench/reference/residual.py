"""The residual stream of a model, computed without an engine: what extracted hidden states are compared with."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.reference.dense import DenseModel, Reference

ResidualStream = Callable[[list[int]], Tensor]
"""From token ids to `[num_tokens, num_layers + 1, hidden_size]` in float32: what enters each layer, and leaves the
last, before the final norm."""


def residual_stream_of(model: str) -> ResidualStream:
    """The residual stream of the checkpoint in a folder.

    It is this project's own reference that computes it for Step-3.5, which transformers doesn't have, and transformers
    for other models.
    """
    config = json.loads(Path(model, "config.json").read_text())
    return _by_reference(model) if config["model_type"].startswith("step3p5") else _by_transformers(model)


def _by_reference(model: str) -> ResidualStream:
    weights = DenseModel(Path(model))

    def run(token_ids: list[int]) -> Tensor:
        reference = Reference(weights)
        reference.update(token_ids, len(token_ids) - 1)
        return reference.residual_stream()

    return run


def _by_transformers(model: str) -> ResidualStream:
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    reference = load(model, dtype=torch.float32, attn_implementation="eager")
    # The last of its hidden states has been through the final norm.
    last: list[Tensor] = []
    reference.model.layers[-1].register_forward_hook(
        lambda layer, args, output: last.append(output[0] if isinstance(output, tuple) else output)
    )

    @torch.no_grad()
    def run(token_ids: list[int]) -> Tensor:
        last.clear()
        states = reference(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        return torch.cat([*states[:-1], last[0]]).transpose(0, 1)

    return run
