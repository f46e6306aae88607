"""Step-3.5: chained modules, each one decoder layer with a head of its own, over full and sliding KV cache groups."""

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import vllm.envs as envs
from torch import nn
from vllm.config import VllmConfig, replace
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.models.step3p5 import Step3p5Attention, Step3p5DecoderLayer, Step3p5MLP
from vllm.model_executor.models.step3p5_mtp import (
    Step3p5AMultiTokenPredictor,
    Step3p5AMultiTokenPredictorLayer,
    Step3p5MTP,
)
from vllm.model_executor.models.utils import get_draft_quant_config

from mtp.fusion.gemms import is_plain, store_side_by_side, weight_of_both
from mtp.fusion.layers import fuse_layers
from mtp.kernels import has_kernels
from mtp.kernels.decoder import add_gemma_rms_norm, embed_norm_concat, gate_heads, gemma_rms_norm, norm_rope
from mtp.passes import DraftPasses
from mtp.plan import DraftDescriptor
from proposers.host.patching import source_digest
from proposers.v1 import MultiGroupProposer

logger = init_logger(f"vllm.{__name__}")

# The forwards of vLLM 0.32 and 0.33 that `run_module` computes the same as.
KNOWN_FORWARDS = "3a7f9e8ee00e6e35"


class Step3p5Passes(DraftPasses):
    """What is Step-3.5's own, on either runner."""

    descriptor: ClassVar = DraftDescriptor("Step3p5MTP", modules_key="num_nextn_predict_layers", own_heads=True)

    def prepare_model(self) -> None:
        fuse_layers(self.model, self.vllm_config)
        self.takes_wanted = fuse_modules(self.model)

    def top_tokens(self, hidden: torch.Tensor, module: int) -> torch.Tensor:
        """The host's Step3p5MTP has no such method, so the module's head is asked directly."""
        predictor = self.model.model
        head = predictor.layers[str(predictor.mtp_start_layer_idx + module)].shared_head
        return predictor.logits_processor.get_top_tokens(head.head, head(hidden))


class Step3p5Proposer(Step3p5Passes, MultiGroupProposer):
    def _create_draft_vllm_config(self) -> VllmConfig:
        # Layers are built from the draft's config, which counts the modules in, and quantised by the draft's own.
        base = super()._create_draft_vllm_config()
        return replace(base, model_config=self.draft_model_config, quant_config=get_draft_quant_config(base))


def fuse_modules(model: Any) -> bool:
    """Has a `Step3p5MTP` run as `run_module`, unless in batch-invariant mode, or where it is not what that knows.

    Returns:
        whether it does.
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
    if forwards_of_the_host() != KNOWN_FORWARDS or type(model) is not Step3p5MTP:
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


def forwards_of_the_host() -> str:
    model = Step3p5MTP, Step3p5AMultiTokenPredictor, Step3p5AMultiTokenPredictorLayer
    return source_digest(*(x.forward for x in (*model, Step3p5DecoderLayer, Step3p5Attention, Step3p5MLP)))


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
    """`Step3p5MTP.forward` with one launch for what stands between two products.

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
    token_ids = None
    if inputs_embeds is None:
        embedding = predictor.embed_tokens
        if _is_a_table(embedding):
            token_ids, inputs_embeds = input_ids, embedding.weight
        else:
            inputs_embeds = embedding(input_ids)
    eps = module.enorm.variance_epsilon
    hidden = module.eh_proj(
        embed_norm_concat(token_ids, inputs_embeds, hidden_states, module.enorm.weight, module.hnorm.weight, eps)
    )
    layer = module.mtp_block
    # Ranks meet in the experts, each with as many rows as the others were told.
    early, late = (None, wanted) if layer.use_moe else (wanted, None)
    normed = gemma_rms_norm(hidden, layer.input_layernorm.weight, eps)
    attended = _attend(layer.self_attn, positions, normed, early)
    hidden, normed = add_gemma_rms_norm(attended, hidden, layer.post_attention_layernorm.weight, eps, early)
    hidden = layer.moe(normed) + hidden if layer.use_moe else _add_mlp(layer.mlp, normed, hidden)
    return hidden if late is None else hidden[late]


def _attend(attention: Any, positions: torch.Tensor, hidden: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
    """Queries of all rows, since a backend's metadata counts them; after that only the wanted ones."""
    query, key, value, gates = _project(attention, hidden)
    query, key = (x.unflatten(-1, (-1, attention.head_dim)) for x in (query, key))
    rotary = attention.rotary_emb
    # On a CPU vLLM's own kernels for the two are the quicker.
    if has_kernels(query) and attention.use_rope and _turns_halves(rotary):
        query_norm, key_norm = attention.q_norm, attention.k_norm
        query, key = norm_rope(
            query,
            key,
            query_norm.weight,
            key_norm.weight,
            query_norm.variance_epsilon,
            positions,
            rotary._match_cos_sin_cache_dtype(query),
        )
        query, key = query.flatten(1), key.flatten(1)
    else:
        query, key = attention.q_norm(query).flatten(1), attention.k_norm(key).flatten(1)
        if attention.use_rope:
            query, key = rotary(positions, query, key)
    out = attention.attn(query, key, value)
    if gates is not None:
        out = gate_heads(out, gates, wanted)
    elif wanted is not None:
        out = out[wanted]
    out, _ = attention.o_proj(out)
    return out


def _project(
    attention: Any, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Queries, keys, values, and where there are any the heads' gates."""
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]
    if attention.use_head_wise_attn_gate:
        weight = weight_of_both(attention.qkv_proj, attention.g_proj)
        if weight is not None:
            query, key, value, gates = F.linear(hidden, weight).split([*sizes, attention.num_heads], dim=-1)
            return query, key, value, gates
    qkv, _ = attention.qkv_proj(hidden)
    query, key, value = qkv.split(sizes, dim=-1)
    gates = attention.g_proj(hidden)[0] if attention.use_head_wise_attn_gate else None
    return query, key, value, gates


def _add_mlp(mlp: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The residual stream after the MLP; `residual` may be written to.

    The product that adds to it rounds once in 16-bit, a product and an addition twice.
    """
    down = mlp.down_proj
    if not (is_plain(down) and down.tp_size == 1):
        return mlp(x) + residual
    gate_up, _ = mlp.gate_up_proj(x)
    return residual.addmm_(mlp.act_fn(gate_up), down.weight.t())


def _is_a_table(embedding: Any) -> bool:
    """Whether a row of its weight is what it returns for a token: not of a shard, quantised, or under an adapter."""
    if type(embedding) is not VocabParallelEmbedding or embedding.tp_size > 1:
        return False
    return isinstance(embedding.quant_method, UnquantizedEmbeddingMethod)


def _turns_halves(rotary: nn.Module) -> bool:
    """Whether all that is particular to it is in its table: that of YaRN and the like is, that of M-RoPE is not."""
    if not isinstance(rotary, RotaryEmbedding) or not rotary.is_neox_style:
        return False
    return type(rotary).forward_native is RotaryEmbedding.forward_native
