"""Step-3.5's modules in fewer launches than vLLM's: its order of calls, out of the blocks of `mtp/fusion`."""

import functools
from typing import Any

import torch
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.models.step3p5 import Step3p5Attention, Step3p5DecoderLayer, Step3p5MLP
from vllm.model_executor.models.step3p5_mtp import (
    Step3p5AMultiTokenPredictor,
    Step3p5AMultiTokenPredictorLayer,
    Step3p5MTP,
)

from mtp.fusion.blocks import add_mlp, embed_and_norm, norm_and_rotate, project
from mtp.fusion.gemms import store_side_by_side
from mtp.fusion.guard import KnownForwards
from mtp.kernels.decoder import add_gemma_rms_norm, gate_heads, gemma_rms_norm

logger = init_logger(f"vllm.{__name__}")

_MODULES = Step3p5MTP, Step3p5AMultiTokenPredictor, Step3p5AMultiTokenPredictorLayer
_LAYERS = Step3p5DecoderLayer, Step3p5Attention, Step3p5MLP

# The forwards of vLLM 0.32 and 0.33 that `run_module` computes the same as.
KNOWN_FORWARDS = KnownForwards((*_MODULES, *_LAYERS), "3a7f9e8ee00e6e35")


def fuse_modules(model: Any) -> bool:
    """Has a `Step3p5MTP` run as `run_module`, unless in batch-invariant mode, or where it is not what that knows.

    Returns:
        whether it does, and so takes `wanted`.
    """
    if envs.VLLM_BATCH_INVARIANT:
        return False
    if not _is_known(model):
        logger.info("These Step-3.5 modules are others than those known, so they run as they are, and slower.")
        return False
    for module in model.model.layers.values():
        attention = module.mtp_block.self_attn
        if attention.use_head_wise_attn_gate:
            store_side_by_side(attention.qkv_proj, attention.g_proj)
    model.forward = functools.partial(run_module, model.model)
    return True


def _is_known(model: Any) -> bool:
    """Whether all of the modules are vLLM's own, and of a release that is known: others may compute something else."""
    if not KNOWN_FORWARDS.holds() or type(model) is not Step3p5MTP:
        return False
    if type(model.model) is not Step3p5AMultiTokenPredictor:
        return False
    return all(_is_known_module(module) for module in model.model.layers.values())


def _is_known_module(module: Any) -> bool:
    # From the outside in: what isn't vLLM's may not have what is asked for next.
    if type(module) is not Step3p5AMultiTokenPredictorLayer or type(module.mtp_block) is not Step3p5DecoderLayer:
        return False
    layer, attention = module.mtp_block, module.mtp_block.self_attn
    if type(attention) is not Step3p5Attention or not (layer.use_moe or type(layer.mlp) is Step3p5MLP):
        return False
    norms = (module.enorm, module.hnorm, layer.input_layernorm, layer.post_attention_layernorm)
    return all(type(norm) is GemmaRMSNorm for norm in (*norms, attention.q_norm, attention.k_norm))


def run_module(
    predictor: Any,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    intermediate_tensors: None = None,
    inputs_embeds: torch.Tensor | None = None,
    spec_step_idx: int = 0,
    wanted: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Step3p5MTP.forward` with one launch for what stands between two GEMMs.

    The host's is eager, and in a pass of few rows such launches are an eighth of the device's time.

    Args:
        input_ids, positions: `[num_rows]`.
        hidden_states: `[num_rows, hidden_size]`, the target's or the module's before.
        inputs_embeds: `[num_rows, hidden_size]`, in place of `input_ids`.
        wanted: `[num_wanted]` integers, the rows whose hidden states are; None: all. The others' keys and values are
            written too, and with that they are done: what follows attention is two thirds of a module's work.

    Returns:
        `[num_wanted, hidden_size]`.
    """
    module = predictor.layers[str(predictor.mtp_start_layer_idx + spec_step_idx % predictor.num_mtp_layers)]
    embedding = predictor.embed_tokens
    hidden = module.eh_proj(
        embed_and_norm(embedding, input_ids, inputs_embeds, hidden_states, module.enorm, module.hnorm)
    )
    layer, eps = module.mtp_block, module.enorm.variance_epsilon
    # Ranks meet in the experts, each with as many rows as the others were told.
    early, late = (None, wanted) if layer.use_moe else (wanted, None)
    normed = gemma_rms_norm(hidden, layer.input_layernorm.weight, eps)
    attended = _attend(layer.self_attn, positions, normed, early)
    hidden, normed = add_gemma_rms_norm(attended, hidden, layer.post_attention_layernorm.weight, eps, early)
    hidden = layer.moe(normed) + hidden if layer.use_moe else add_mlp(layer.mlp, normed, hidden)
    return hidden if late is None else hidden[late]


def _attend(attention: Any, positions: torch.Tensor, hidden: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    """Queries of all rows, since a backend's metadata counts them; after that only the wanted ones."""
    gate_proj = attention.g_proj if attention.use_head_wise_attn_gate else None
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]
    query, key, value, gates = project(attention.qkv_proj, gate_proj, hidden, sizes)
    query, key = (x.unflatten(-1, (-1, attention.head_dim)) for x in (query, key))
    rotary = attention.rotary_emb if attention.use_rope else None
    query, key = norm_and_rotate(query, key, attention.q_norm, attention.k_norm, rotary, positions)
    out = attention.attn(query, key, value)
    if gates is not None:
        out = gate_heads(out, gates, wanted)
    elif wanted is not None:
        out = out[wanted]
    out, _ = attention.o_proj(out)
    return out
