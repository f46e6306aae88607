"""Weights of a draft's linear layers in 8 bits, made when the host has loaded a layer, and again when it reloads it.

What such a weight stands for is kept in 16 bits beside it: a decode pass of few requests reads the one, and a pass of
many rows, where arithmetic takes the time, computes with the other by a library's GEMM. Both give the same weights.

The host asks a layer's `quant_method` to process its weights: after a load, and after each update while serving, of
which it copies the result to where the first one lies. So captured passes read new weights, and nothing of ours has to
know of an update.
"""

import functools
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod

from mtp.kernels.fp8_weights import dequantise, fp8_linear, quantise

LEFT_ALONE = ("gate", "router", "shared_expert_gate")
"""Layers that choose among experts: small, and read by other kernels than a GEMM's."""


class Fp8Weights(LinearMethodBase):
    """A layer's product with its weight in 8 bits, and activations as they are (`mtp/kernels/fp8_weights.py`).

    Afterwards the layer has `weight`, e4m3, `weight_scale`, float32, and `wide_weight` of the dtype that it had.
    """

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the weights of a draft are created by the method that this one takes the place of")

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.data
        quantised, scale = quantise(weight)
        layer.weight = nn.Parameter(quantised, requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)
        layer.wide_weight = nn.Parameter(dequantise(quantised, scale, weight.dtype), requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = product(layer, x)
        return out if bias is None else out + bias


def product(layer: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Of rows `[..., columns]` with such a layer's weight, and the residual added."""
    return fp8_linear(x, layer.weight, layer.weight_scale, residual, layer.wide_weight)


def quantise_when_loaded(model: nn.Module) -> list[str]:
    """Has the linear layers of a model that is about to be loaded quantised once they are.

    Returns:
        the names of those that are not: a checkpoint's quantised ones, of which each has a method of its own.
    """
    others = []
    layer: Any
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in LEFT_ALONE:
            continue
        if type(layer) is nn.Linear:
            _give_method(layer)
        elif isinstance(layer, LinearBase):
            if type(layer.quant_method) is UnquantizedLinearMethod:
                layer.quant_method = Fp8Weights()
            else:
                others.append(name)
    return others


def _give_method(layer: Any) -> None:
    """For a layer of PyTorch's, whose forward knows no method."""
    layer.quant_method = Fp8Weights()
    layer.forward = functools.partial(_forward, layer)


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = layer.quant_method.apply(layer, x, layer.bias)
    return out


def is_quantised(layer: Any) -> bool:
    """Whether a layer does nothing but `fp8_linear`, and on several ranks what follows from that."""
    method = getattr(layer, "quant_method", None)
    return type(method) is Fp8Weights and layer.bias is None and not getattr(layer, "gather_output", False)
