"""vLLM's own layers without an engine around them."""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import default_unquantized_gemm


def bare(kind: type[nn.Module], **children: nn.Module) -> nn.Module:
    """A module of vLLM's that holds what it is given and nothing else."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for name, child in children.items():
        setattr(module, name, child)
    return module


def plain_linear(kind: type[LinearBase], rows: int, columns: int) -> Any:
    """A layer as on a GPU: there `F.linear` multiplies with its weight."""
    linear: Any = bare(kind)
    linear.quant_method = UnquantizedLinearMethod()
    linear.quant_method._gemm_impl = default_unquantized_gemm
    linear.bias, linear.skip_bias_add, linear.return_bias = None, False, True
    linear.tp_size, linear.tp_rank, linear.reduce_results = 1, 0, True
    linear.gather_output, linear.input_is_parallel = False, True
    linear.weight = nn.Parameter(torch.randn(rows, columns), requires_grad=False)
    return linear
