"""Checkpoints whose weights are e4m3 with a scale for each block, and a stand-in for the kernel of their products.

vLLM's CPU build has such a kernel where the processor has AMX tiles, which many have not. The stand-in makes of a
weight what it stands for; loading, and who takes which rows of it, is vLLM's own and this package's.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.checkpoints import Weights, copy_checkpoint
from tests.support.children import MIMO_V2

BLOCK = (128, 128)
HEADS = 8
"""KV heads of the copies in blocks: as many as give a rank of two whole blocks of 128 rows."""
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[rows, columns]` e4m3, and `[row blocks, column blocks]` float32 that its blocks are to be multiplied by."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
    for i, j in torch.cartesian_prod(*map(torch.arange, scale.shape)).tolist():
        scale[i, j] = _block(weight, i, j).abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (weight.float() / _spread(scale, weight)).to(torch.float8_e4m3fn), scale


def dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return weight.float() * _spread(scale, weight)


def _block(weight: torch.Tensor, i: int, j: int) -> torch.Tensor:
    (rows, columns) = BLOCK
    return weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].float()


def _spread(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    return scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]


def in_blocks(weights: Weights) -> Weights:
    """The projections of all layers quantised."""
    for name in [name for name, x in weights.items() if _is_projection(name) and x.element_size() > 1]:
        weights[name], weights[f"{name}_scale_inv"] = quantised(weights[name])
    return weights


def as_they_stand(weights: Weights) -> Weights:
    """The same weights as `in_blocks` makes, in float32 and not quantised."""
    return {name: dequantised(*quantised(x)) if _is_projection(name) else x.float() for name, x in weights.items()}


def _is_projection(name: str) -> bool:
    """MTP layers have an output projection of 16 bits in every checkpoint."""
    is_kept = ".mtp." in name and ".o_proj." in name
    return re.search(r"\.(self_attn|mlp)\.\w+_proj\.weight$", name) is not None and not is_kept


def fused_for_ranks(weights: Weights, ranks: int) -> Weights:
    """Projections of queries, keys and values as one, made for so many ranks: each has its queries, keys and values
    behind each other, in blocks of its own.
    """
    for prefix in {name.partition(".q_proj")[0] for name in weights if ".q_proj." in name}:
        parts = [weights.pop(f"{prefix}.{part}_proj.weight").chunk(ranks) for part in "qkv"]
        made = [quantised(torch.cat(of_rank)) for of_rank in zip(*parts, strict=True)]
        name = f"{prefix}.qkv_proj.weight"
        weights[name], weights[f"{name}_scale_inv"] = (torch.cat(x) for x in zip(*made, strict=True))
    return in_blocks(weights)


def with_more_kv_heads(weights: Weights, count: int, head_dim: int) -> Weights:
    """The same attention with so many KV heads: each is there several times, for fewer query heads each."""
    for name, weight in weights.items():
        if re.search(r"\.[kv]_proj\.weight$", name):
            heads = weight.unflatten(0, (-1, head_dim))
            weights[name] = heads.repeat_interleave(count // len(heads), 0).flatten(0, 1)
    return weights


def for_ranks(weights: Weights) -> Weights:
    return fused_for_ranks(weights, HEADS)


def checkpoint(layout: Callable[[Weights], Weights], folder: Path) -> str:
    """The trained MiMo-V2 with more KV heads, in 8 bits with block scales."""
    config: dict[str, Any] = {"num_key_value_heads": HEADS, "swa_num_key_value_heads": HEADS}
    if layout is not as_they_stand:
        config["quantization_config"] = CONFIG
    return copy_checkpoint(MIMO_V2, folder, lambda weights: layout(with_more_kv_heads(weights, HEADS, 32)), **config)


def register_kernel() -> None:
    """Has vLLM's CPU build compute with such weights whatever the processor."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.platforms import PlatformEnum

    class InPyTorch(CPUFp8BlockScaledMMKernel):
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            params = self._get_layer_params(layer)
            layer.stands_for = dequantised(params.weight.data, params.block_scale.data)

        def apply_weights(
            self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
        ) -> torch.Tensor:
            return F.linear(x, layer.stands_for.to(x.dtype), bias)

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, InPyTorch)
