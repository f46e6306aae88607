"""Layers of a draft as one kernel each, wherever they stand in the model.

A draft is not compiled, but the host chooses a layer's implementation for a model that is: `GemmaRMSNorm` is a chain of
seven launches behind a dispatcher, a rotary embedding one of sixteen. What a model can have beyond that, with kernels
across layers, is its own matter (`mtp/kernels/decoder.py`, `proposers/models/step3p5.py`).
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import vllm.envs as envs
from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from mtp.kernels.decoder import gemma_rms_norm


def fuse_layers(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Gives norms, rotary embeddings and activations of a model that is not compiled their kernels.

    Batch-invariant mode keeps what the host chose, and so does a model that is compiled.
    """
    if not _is_compiled(model):
        fuse_gemma_norms(model)
        use_kernels_of_the_host(model, vllm_config)


def leave_uncompiled(model: nn.Module) -> int:
    """Takes a draft of several modules out of the host's compilation, before its first forward.

    The host compiles a model once and asks no more what for, so whichever module ran first would run for all of them.

    Returns:
        how many parts of it would have been compiled.
    """
    parts = _compiled_parts(model)
    for part in parts:
        part.do_not_compile = True
    return len(parts)


def _is_compiled(model: nn.Module) -> bool:
    return bool(_compiled_parts(model))


def _compiled_parts(model: nn.Module) -> list[Any]:
    """What the host compiles of it (`support_torch_compile`)."""
    return [
        module
        for module in model.modules()
        if isinstance(module, TorchCompileWithNoGuardsWrapper) and not getattr(module, "do_not_compile", True)
    ]


def use_kernels_of_the_host(model: nn.Module, vllm_config: VllmConfig) -> int:
    """Has rotary embeddings and activations run as the host's own kernels, as they do in an eager engine.

    Returns:
        how many didn't.
    """
    if envs.VLLM_BATCH_INVARIANT:
        return 0
    with set_current_vllm_config(vllm_config):
        found = [
            (parent, name, layer)
            for parent in model.modules()
            for name, layer in parent.named_children()
            if isinstance(layer, RotaryEmbeddingBase | SiluAndMul) and not layer.enabled()
        ]
    # The target has the same rotary embeddings, and is compiled with them: so of copies, one for each, with the same
    # tables. All else is a copy's own: a shallow one has the dicts of its original, and a reload that sets the tables
    # aside and puts them back, layer by layer, finds nothing to set aside in the second layer and leaves both with it.
    copied: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    with set_current_vllm_config(vllm_config):
        for parent, name, layer in found:
            own = copy.deepcopy(layer, copied)
            own._enforce_enable = True
            own._forward_method = functools.partial(
                _unless_compiling, own.forward_native, own.dispatch_forward(compile_native=False)
            )
            setattr(parent, name, own)
    return len(found)


def _unless_compiling(native: Callable[..., Any], kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return native(*args, **kwargs) if torch.compiler.is_compiling() else kernel(*args, **kwargs)


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


def _forward(
    norm: GemmaRMSNorm, unfused: Callable[..., Any], x: torch.Tensor, residual: torch.Tensor | None = None
) -> Any:
    if residual is not None:
        return unfused(x, residual)
    return gemma_rms_norm(x, norm.weight, norm.variance_epsilon)
