"""Layers of a draft as one kernel each.

A draft is not compiled, but the host chooses a layer's implementation for a model that is: `GemmaRMSNorm` is a chain of
seven launches behind a dispatcher, a rotary embedding one of sixteen. A pass of three modules has more than twenty of
the former and three of the latter, so on small batches they are a good part of its time.
"""

import copy
import functools

import torch
import torch.nn.functional as F
import vllm.envs as envs
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.triton_utils import tl, triton

from mtp.kernels import has_kernels

# A head's norm is a warp's work, and there are thousands of heads in a batch; a row's takes several.
ELEMENTS_PER_WARP = 512
MAX_WARPS = 8


def fuse_layers(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Gives norms, rotary embeddings and activations of a model that is not compiled their kernels.

    Batch-invariant mode keeps what the host chose.
    """
    fuse_gemma_norms(model)
    use_kernels_of_the_host(model, vllm_config)


def use_kernels_of_the_host(model: nn.Module, vllm_config: VllmConfig) -> int:
    """Has rotary embeddings and activations run as the host's own kernels, as they would in an eager engine.

    Returns:
        how many there were.
    """
    if envs.VLLM_BATCH_INVARIANT:
        return 0
    found = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, RotaryEmbeddingBase | SiluAndMul)
    ]
    with set_current_vllm_config(vllm_config):
        for parent, name, layer in found:
            # The target has the same rotary embeddings, and is compiled with them: so of a copy, with the same tables.
            own = copy.copy(layer)
            own._enforce_enable = True
            own._forward_method = own.dispatch_forward(compile_native=False)
            setattr(parent, name, own)
    return len(found)


def fuse_gemma_norms(model: nn.Module) -> int:
    """Gives every `GemmaRMSNorm` of a model that is not compiled one kernel: ours on CUDA, else vLLM's or PyTorch's.

    Batch-invariant mode keeps the host's own.

    Returns:
        how many there were.
    """
    if envs.VLLM_BATCH_INVARIANT:
        return 0
    norms = [module for module in model.modules() if isinstance(module, GemmaRMSNorm)]
    for norm in norms:
        norm._forward_method = functools.partial(_forward, norm, norm._forward_method)
    return len(norms)


def _forward(norm: GemmaRMSNorm, unfused, x: torch.Tensor, residual: torch.Tensor | None = None):
    """`x * rsqrt(mean(x^2) + eps) * (1 + weight)` in float32, `x` `[..., size]`.

    The gain is added up anew each time: weights may be updated in place while serving.
    """
    if residual is not None:
        return unfused(x, residual)
    if has_kernels(x) and x.dim() in (2, 3) and x.stride(-1) == 1:
        return _in_one_launch(norm, x)
    gain = norm.weight.float() + 1.0
    if x.dtype == torch.float32 and x.device.type == "cpu":
        out = torch.empty(x.shape, dtype=x.dtype)
        torch.ops._C.rms_norm(out, x.contiguous(), gain, norm.variance_epsilon)
        return out
    return F.rms_norm(x.float(), (x.shape[-1],), gain, norm.variance_epsilon).to(x.dtype)


def _in_one_launch(norm: GemmaRMSNorm, x: torch.Tensor) -> torch.Tensor:
    """The norm of rows that need not lie side by side: queries and keys are views into a wider tensor."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = x.shape[1] if x.dim() == 3 else 1
    size = x.shape[-1]
    if x.numel():
        block = triton.next_power_of_2(size)
        head_stride = x.stride(1) if x.dim() == 3 else 0
        _gemma_rms_norm[x.shape[0], heads](
            x,
            norm.weight,
            out,
            x.stride(0),
            head_stride,
            size,
            norm.variance_epsilon,
            block,
            num_warps=min(max(block // ELEMENTS_PER_WARP, 1), MAX_WARPS),
        )
    return out


@triton.jit
def _gemma_rms_norm(x_ptr, weight_ptr, out_ptr, row_stride, head_stride, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + row * row_stride + head * head_stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / size + eps)
    out = out_ptr + (row * tl.num_programs(1) + head) * size + columns
    tl.store(out, (x * scale * (weight + 1.0)).to(out_ptr.dtype.element_ty), mask=inside)
