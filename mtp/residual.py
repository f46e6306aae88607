"""The residual stream of a decoder model, captured where it enters its layers.

vLLM's own way to it is the EAGLE3 interface, which many models lack (Step-3.5 among them), and whose ids and order
differ between those that have it. Here the layers themselves are hooked, in one way for all models. The hooks are there
before the first forward, so `torch.compile` traces them as part of the graph, and what they write to is one buffer that
stays where it is, as CUDA graphs want it.

Ids: i is the stream as it enters layer i, 0 the embeddings' output, N the stream after the last layer, before the
final norm.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def capture_residual_stream(
    model: nn.Module, layer_ids: Sequence[int], num_layers: int, buffer: torch.Tensor
) -> None:
    """Has every forward of the model write its residual stream to the buffer.

    Args:
        layer_ids: each of `0..num_layers`; id k of the sequence goes to column k.
        num_layers: decoder layers of the model, N.
        buffer: `[max_num_tokens, len(layer_ids), hidden_size]`; the first `num_tokens` rows are written.

    Raises:
        ValueError: the model's layers aren't found, or don't take the stream in a way that is known.
    """
    layers = decoder_layers(model, num_layers)
    for column, layer_id in enumerate(layer_ids):
        at_entry = layer_id < num_layers
        layer = layers[layer_id if at_entry else -1]
        # Attributes of the layer, not of a closure: the compiled graph reads its inputs by their place in the model.
        layer.residual_buffer = buffer
        if at_entry:
            layer.residual_entry = (column, *_stream_arguments(layer))
            layer.register_forward_pre_hook(_keep_entry, with_kwargs=True)
        else:
            layer.residual_exit = column
            layer.register_forward_hook(_keep_exit)


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder layers: the first list of that many modules in the language model.

    Raises:
        ValueError: there is none.
    """
    language_model = model.get_language_model() if hasattr(model, "get_language_model") else model
    lists = {name: m for name, m in language_model.named_modules() if isinstance(m, nn.ModuleList)}
    for layers in lists.values():
        if len(layers) == num_layers:
            return layers
    found = ", ".join(f"{name} of {len(layers)}" for name, layers in lists.items()) or "none"
    raise ValueError(
        f"{type(model).__name__} has {num_layers} decoder layers by its config, and no list of that many modules "
        f"(module lists: {found}), so its hidden states can't be extracted. Please report the architecture."
    )


def _stream_arguments(layer: nn.Module) -> tuple[int, int | None]:
    """Where among the arguments of the layer's forward its stream is: the hidden states, and the residual if any."""
    names = list(inspect.signature(layer.forward).parameters)
    if "hidden_states" not in names:
        raise ValueError(
            f"The decoder layers {type(layer).__name__} take {names} and no hidden_states, so it is not known where "
            "their residual stream is, and hidden states can't be extracted. Please report the architecture."
        )
    return names.index("hidden_states"), names.index("residual") if "residual" in names else None


def _keep_entry(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    column, hidden_at, residual_at = layer.residual_entry
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[hidden_at]
    residual = None
    if residual_at is not None:
        residual = kwargs["residual"] if "residual" in kwargs else args[residual_at]
    _keep(layer.residual_buffer, column, hidden, residual)


def _keep_exit(layer: Any, args: tuple[Any, ...], output: Any) -> None:
    hidden, residual = output if isinstance(output, tuple) else (output, None)
    _keep(layer.residual_buffer, layer.residual_exit, hidden, residual)


def _keep(buffer: torch.Tensor, column: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    """Layers that add their input themselves hand on the stream; the others leave the addition to the next norm."""
    stream = hidden if residual is None else hidden + residual
    stream = stream.flatten(0, -2)
    buffer[: stream.shape[0], column].copy_(stream)
