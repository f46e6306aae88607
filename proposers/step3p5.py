"""Step-3.5: chained modules, each one decoder layer with a head of its own, over full and sliding KV cache groups."""

import functools
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import nn
from vllm.config import VllmConfig, replace
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.models.step3p5 import Step3p5Attention, Step3p5DecoderLayer
from vllm.model_executor.models.step3p5_mtp import Step3p5AMultiTokenPredictor, Step3p5AMultiTokenPredictorLayer
from vllm.model_executor.models.utils import get_draft_quant_config

from mtp.compat import source_digest
from mtp.fused import add_gemma_rms_norm, embed_norm_concat, gate_heads, gemma_rms_norm, norm_rope
from mtp.kernels import has_kernels
from mtp.layers import fuse_layers
from mtp.passes import DraftPasses
from mtp.proposer import MultiGroupProposer
from mtp.steps import DraftDescriptor

logger = init_logger(f"vllm.{__name__}")

# The forwards of vLLM 0.32 and 0.33 that `run_module` computes the same as.
KNOWN_FORWARDS = "e1dd7f0ebbb6ac0a"


class Step3p5Passes(DraftPasses):
    """What is Step-3.5's own, on either runner."""

    descriptor: ClassVar = DraftDescriptor("Step3p5MTP", modules_key="num_nextn_predict_layers", own_heads=True)

    def prepare_model(self) -> None:
        fuse_layers(self.model, self.vllm_config)
        fuse_modules(self.model.model)

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


def fuse_modules(predictor: nn.Module) -> bool:
    """Has the modules run as `run_module`, unless in batch-invariant mode, or where they are not those it knows.

    Returns:
        whether they do.
    """
    if envs.VLLM_BATCH_INVARIANT:
        return False
    if not _is_known(predictor):
        logger.info("These Step-3.5 modules are others than those known, so they run as they are, and slower.")
        return False
    predictor.forward = functools.partial(run_module, predictor)
    return True


def _is_known(predictor: Any) -> bool:
    """Whether all of the modules are vLLM's own, and of a release that is known: others may compute something else."""
    if forwards_of_the_host() != KNOWN_FORWARDS or type(predictor) is not Step3p5AMultiTokenPredictor:
        return False
    return all(_is_known_module(module) for module in predictor.layers.values())


def _is_known_module(module: Any) -> bool:
    # From the outside in: what isn't vLLM's may not have what is asked for next.
    if type(module) is not Step3p5AMultiTokenPredictorLayer or type(module.mtp_block) is not Step3p5DecoderLayer:
        return False
    layer, attention = module.mtp_block, module.mtp_block.self_attn
    if type(attention) is not Step3p5Attention:
        return False
    norms = (module.enorm, module.hnorm, layer.input_layernorm, layer.post_attention_layernorm)
    return all(type(norm) is GemmaRMSNorm for norm in (*norms, attention.q_norm, attention.k_norm))


def forwards_of_the_host() -> str:
    modules = Step3p5AMultiTokenPredictor, Step3p5AMultiTokenPredictorLayer, Step3p5DecoderLayer, Step3p5Attention
    return source_digest(*(module.forward for module in modules))


def run_module(
    predictor: Any,
    input_ids: torch.Tensor | None,
    positions: torch.Tensor,
    previous_hidden_states: torch.Tensor,
    inputs_embeds: torch.Tensor | None = None,
    spec_step_idx: int = 0,
) -> torch.Tensor:
    """`Step3p5AMultiTokenPredictor.forward` with one launch for what stands between two products.

    The host's is eager, and in a pass of few rows such launches are an eighth of the device's time.

    Args:
        input_ids, positions: `[num_rows]`.
        previous_hidden_states: `[num_rows, hidden_size]`, the target's or the module's before.
        inputs_embeds: `[num_rows, hidden_size]`, in place of `input_ids`.

    Returns:
        `[num_rows, hidden_size]`.
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
        embed_norm_concat(
            token_ids, inputs_embeds, previous_hidden_states, module.enorm.weight, module.hnorm.weight, eps
        )
    )
    layer = module.mtp_block
    normed = gemma_rms_norm(hidden, layer.input_layernorm.weight, eps)
    attended = _attend(layer.self_attn, positions, normed)
    hidden, normed = add_gemma_rms_norm(attended, hidden, layer.post_attention_layernorm.weight, eps)
    return (layer.moe if layer.use_moe else layer.mlp)(normed) + hidden


def _attend(attention: Any, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    qkv, _ = attention.qkv_proj(hidden)
    query, key, value = qkv.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
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
    if attention.use_head_wise_attn_gate:
        gates, _ = attention.g_proj(hidden)
        out = gate_heads(out, gates)
    out, _ = attention.o_proj(out)
    return out


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
