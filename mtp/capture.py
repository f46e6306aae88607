"""The residual stream of a decoder model, captured where it enters its layers.

vLLM's own way to it is the EAGLE3 interface, which many models lack (Step-3.5 among them). Here the layers themselves
are hooked, in one way for all models. The hooks are there before the first forward, so `torch.compile` traces them as
part of the graph, and what they write to is one buffer that stays where it is, as CUDA graphs want it.

Ids: i is the stream as it enters layer i, 0 the embeddings' output, N the stream after the last layer, before the
final norm.

Most models hand two tensors from layer to layer, hidden states and a residual, and leave their addition to the next
norm; the stream is their sum. A few hand on a residual that nobody adds (Cohere's). What the final norm makes of the
two decides.
"""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from vllm.utils.torch_utils import direct_register_custom_op


def capture_residual_stream(
    model: nn.Module,
    layer_ids: Sequence[int],
    num_layers: int,
    buffer: torch.Tensor,
    hidden_size: int | None = None,
    first: int = 0,
) -> None:
    """Has every forward of the model write its residual stream to the buffer, or a slice of it.

    Args:
        layer_ids: each of `0..num_layers`; id k of the sequence goes to column k.
        num_layers: decoder layers of the model, N.
        buffer: `[max_num_tokens, len(layer_ids), width]`; the first `num_tokens` rows are written.
        hidden_size: of the stream; None: the buffer's width.
        first: the buffer has elements `[first, first + width)` of the stream.

    Raises:
        ValueError: the model's layers aren't found, or don't take the stream in a way that is known.
    """
    parent, layers = _decoder_layers(model, num_layers)
    hidden_size = buffer.shape[2] if hidden_size is None else hidden_size
    adds = residual_is_added(parent, buffer.new_empty(hidden_size))
    for column, layer_id in enumerate(layer_ids):
        layer: Any = layers[min(layer_id, num_layers - 1)]
        # Attributes of the layer, not of a closure: the compiled graph reads its inputs by their place in the model.
        layer.residual_buffer, layer.residual_size, layer.residual_first = buffer, hidden_size, first
        layer.residual_arguments = _stream_arguments(layer, adds)
        if layer_id < num_layers:
            layer.residual_entry = column
            layer.register_forward_pre_hook(_keep_entry, with_kwargs=True)
        else:
            layer.residual_exit = column
            layer.register_forward_hook(_keep_exit)


def _decoder_layers(model: nn.Module, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """The first list of that many modules in the language model, after the module that it belongs to."""
    language_model = cast(Any, model).get_language_model() if hasattr(model, "get_language_model") else model
    found = []
    for name, module in language_model.named_modules():
        for child_name, child in module.named_children():
            if isinstance(child, nn.ModuleList):
                if len(child) == num_layers:
                    return module, child
                found.append(f"{name}.{child_name} of {len(child)}".lstrip("."))
    raise ValueError(
        f"{type(model).__name__} has {num_layers} decoder layers by its config, and no list of that many modules "
        f"(its lists: {', '.join(found) or 'none'}), so its hidden states can't be extracted. Please report the "
        "architecture."
    )


@torch.inference_mode()
def residual_is_added(parent: nn.Module, like: torch.Tensor) -> bool:
    """Whether the model's final norm adds the residual to the hidden states.

    Args:
        parent: the module that has the decoder layers and the norm after them.
        like: `[..., hidden_size]`, for its size, dtype and device.

    Raises:
        ValueError: it does something else.
    """
    norms = [child for name, child in parent.named_children() if "norm" in name or name == "ln_f"]
    if not norms:
        return True
    norm, generator = norms[-1], torch.Generator().manual_seed(0)
    hidden, residual = torch.randn(2, 4, like.shape[-1], generator=generator).to(like)

    def outcome(*tensors: torch.Tensor) -> torch.Tensor:
        output = norm(*(tensor.clone() for tensor in tensors))  # some work in place
        normed: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return normed.float()

    try:
        both = outcome(hidden, residual)
    except TypeError:
        return True  # it takes one tensor, and the model adds before it
    for adds, alone in ((True, hidden + residual), (False, hidden)):
        # Of the same inputs, so they differ by rounding; of others they differ by as much as they measure.
        if (outcome(alone) - both).abs().max() <= 0.05 * both.abs().max():
            return adds
    raise ValueError(
        f"The final norm {type(norm).__name__} of {type(parent).__name__} neither adds the residual to the hidden "
        "states nor leaves it, so it is not known what the residual stream is, and hidden states can't be extracted. "
        "Please report the architecture."
    )


def _stream_arguments(layer: nn.Module, adds: bool) -> tuple[int, int | None]:
    """Where among the arguments of the layer's forward its stream is: the hidden states, and a residual to add."""
    names = list(inspect.signature(layer.forward).parameters)
    if "hidden_states" not in names:
        raise ValueError(
            f"The decoder layers {type(layer).__name__} take {names} and no hidden_states, so it is not known where "
            "their residual stream is, and hidden states can't be extracted. Please report the architecture."
        )
    return names.index("hidden_states"), names.index("residual") if adds and "residual" in names else None


# The hooks. They run under Dynamo too, so they are plain functions of the layer.


def _keep_entry(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden_at, residual_at = layer.residual_arguments
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[hidden_at]
    residual = None
    if residual_at is not None:
        residual = args[residual_at] if len(args) > residual_at else kwargs.get("residual")
    _keep(layer, layer.residual_entry, hidden, residual)


def _keep_exit(layer: Any, args: tuple[Any, ...], output: Any) -> None:
    # Whatever else a layer returns, only what the next one would take is the stream.
    _, residual_at = layer.residual_arguments
    hidden, residual = output, None
    if isinstance(output, tuple):
        hidden, residual = output[0], output[1] if residual_at is not None else None
    _keep(layer, layer.residual_exit, hidden, residual)


def _keep(layer: Any, column: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
    if hidden.dim() == 3 and hidden.shape[0] == 1:  # the layers of transformers have a batch dimension
        hidden = hidden[0]
    if hidden.dim() != 2 or hidden.shape[1] != layer.residual_size:
        raise ValueError(
            f"The stream in {type(layer).__name__} has the shape {list(hidden.shape)} and not [num_tokens, "
            f"{layer.residual_size}], so hidden states can't be extracted. Please report the architecture."
        )
    torch.ops.vllm.keep_residual_stream(layer.residual_buffer, column, layer.residual_first, hidden, residual)


def _keep_residual_stream(
    buffer: torch.Tensor, column: int, first: int, hidden: torch.Tensor, residual: torch.Tensor | None
) -> None:
    rows = buffer[: hidden.shape[0], column]
    kept = slice(first, first + buffer.shape[2])
    if residual is None:
        rows.copy_(hidden[:, kept])
    else:
        torch.add(hidden[:, kept], residual[:, kept], out=rows)


# An operator of its own: Inductor turns the same lines in a graph into a copy of the whole buffer, there and back.
direct_register_custom_op("keep_residual_stream", _keep_residual_stream, mutates_args=["buffer"])
