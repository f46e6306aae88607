"""Root mean square norms of a draft as one kernel each.

A draft is run eagerly, and there the host's `GemmaRMSNorm` is a chain of seven launches behind a dispatcher. A pass of
three modules has more than twenty of them, so on small batches they are a good part of its time.
"""

import functools

import torch
import torch.nn.functional as F
import vllm.envs as envs
from torch import nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm


def fuse_gemma_norms(model: nn.Module) -> int:
    """Gives every `GemmaRMSNorm` of a model that is run eagerly PyTorch's fused kernel.

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
    """`x * rsqrt(mean(x^2) + eps) * (1 + weight)` in float32, `x` `[..., size]`; the host's to the bit on the CPU.

    The gain is added up anew each time: weights may be updated in place while serving.
    """
    if residual is not None:
        return unfused(x, residual)
    gain = norm.weight.float() + 1.0
    return F.rms_norm(x.float(), (x.shape[-1],), gain, norm.variance_epsilon).to(x.dtype)
