"""GEMMs of a draft's layers: which are plain ones, and two of them as one.

In a pass of few rows a GEMM takes as long as reading its weight takes, but for a small one its launch.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.utils import default_unquantized_gemm, dispatch_cpu_unquantized_gemm

from mtp.fp8 import is_quantised
from mtp.kernels import has_kernels
from mtp.kernels.fp8_weights import fp8_linear

# Bytes: kernels read rows of values in pieces of so many.
ROW_ALIGNMENT = 16


def is_plain(linear: Any) -> bool:
    """Whether a layer does nothing but `F.linear` with its weight, and on several ranks what follows from that.

    One with a bias, a quantised weight, an adapter or another kernel does more. So does every layer on a CPU: there
    vLLM packs the weights.
    """
    if type(linear) not in (QKVParallelLinear, ColumnParallelLinear, RowParallelLinear) or linear.bias is not None:
        return False
    method = linear.quant_method
    if type(method) is not UnquantizedLinearMethod or method._gemm_impl is not default_unquantized_gemm:
        return False
    return has_kernels(linear.weight) and not getattr(linear, "gather_output", False)


def pack_on_cpu(model: nn.Module) -> None:
    """Has PyTorch's own linear layers of a model run as the host's do on a CPU, with a packed copy of their weights.

    To be called again whenever these may have changed. (Of 64 rows such a product takes half as long as PyTorch's.)
    """
    layers: list[Any] = [layer for layer in model.modules() if type(layer) is nn.Linear]
    for layer in layers:
        if not hasattr(layer, "quant_method"):  # one of 8 bits has
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
            layer.forward = functools.partial(_product_of_packed, layer)


def _product_of_packed(layer: Any, x: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = layer.cpu_linear(x, layer.weight, layer.bias)
    return product


def store_side_by_side(first: Any, second: Any) -> bool:
    """Moves the weight of one layer right behind that of another with the same input, for `product_of_both`.

    Returns:
        whether it lies there now: not if one is not plain, or if rows of the output would not be aligned.
    """
    if is_quantised(first) and is_quantised(second):
        for name in ("weight", "weight_scale", "wide_weight"):
            _join(first, second, name)
        return True
    if not (is_plain(first) and is_plain(second)) or first.weight.dtype != second.weight.dtype:
        return False
    if (len(first.weight) + len(second.weight)) * first.weight.element_size() % ROW_ALIGNMENT:
        return False
    _join(first, second, "weight")
    return True


def _join(first: Any, second: Any, name: str) -> None:
    tensors = getattr(first, name), getattr(second, name)
    joined = torch.cat([tensor.data.view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)
    tensors[0].data, tensors[1].data = torch.split(joined, [len(tensor) for tensor in tensors])


def product_of_both(first: Any, second: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Of rows `[num_rows, input_size]`, what the first layer makes beside what the second does; None where their
    weights don't lie side by side, or where there is more to a layer than its weight.
    """
    if is_quantised(first) and is_quantised(second):
        weight = _side_by_side(first.weight, second.weight)
        scale = _side_by_side(first.weight_scale, second.weight_scale)
        wide = _side_by_side(first.wide_weight, second.wide_weight)
        return None if weight is None or scale is None or wide is None else fp8_linear(x, weight, scale, wide=wide)
    weight = weight_of_both(first, second)
    return None if weight is None else F.linear(x, weight)


def weight_of_both(first: Any, second: Any) -> torch.Tensor | None:
    """The weights of two layers as one, `[rows of the first + rows of the second, input_size]`.

    To be asked each time: weights are updated in place while serving, but nothing keeps anyone from replacing one.

    Returns:
        None where they don't lie side by side, or where there is more to a layer than its weight.
    """
    if not (is_plain(first) and is_plain(second)):
        return None
    return _side_by_side(first.weight, second.weight)


def _side_by_side(weight: torch.Tensor, behind: torch.Tensor) -> torch.Tensor | None:
    if weight.untyped_storage().data_ptr() != behind.untyped_storage().data_ptr():
        return None
    if behind.data_ptr() != weight.data_ptr() + weight.nbytes or not weight.is_contiguous():
        return None
    return weight.as_strided((len(weight) + len(behind), *weight.shape[1:]), weight.stride())
