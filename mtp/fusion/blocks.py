"""What stands between the GEMMs of a decoder layer, as blocks to build a fused forward from.

Each block is what the host's layers compute, by the host's own modules where nothing can be gained, and takes these
modules as they are: weights are read at each call, since they may be updated while serving. The order of calls is the
architecture's own (`proposers/models/step3p5_modules.py` is one); that the host's forward is the one it was written for
is for a guard to say (`mtp/fusion/guard.py`).

Norms are Gemma's, whose gain is `1 + weight`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

from mtp.fp8 import is_quantised, product
from mtp.fusion.gemms import is_plain, product_of_both
from mtp.kernels import has_kernels
from mtp.kernels.decoder import embed_norm_concat, norm_rope


def embed_and_norm(
    embedding: Any,
    token_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    hidden: torch.Tensor,
    embedding_norm: Any,
    hidden_norm: Any,
) -> torch.Tensor:
    """The input of an MTP module's projection: a token's embedding beside the hidden state before it, both normed.

    Args:
        token_ids: `[num_rows]`; None where there are `inputs_embeds`, `[num_rows, hidden_size]`.
        hidden: `[num_rows, hidden_size]`.

    Returns:
        `[num_rows, 2 * hidden_size]`.
    """
    if inputs_embeds is None and _is_a_table(embedding):
        rows, embeddings = token_ids, embedding.weight
    else:
        rows, embeddings = None, embedding(token_ids) if inputs_embeds is None else inputs_embeds
    eps = embedding_norm.variance_epsilon
    return embed_norm_concat(rows, embeddings, hidden, embedding_norm.weight, hidden_norm.weight, eps)


def project(
    qkv_proj: Any, gate_proj: Any | None, hidden: torch.Tensor, sizes: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Queries, keys and values of rows, and the heads' gates where there are any: one GEMM if the weights lie so.

    Args:
        gate_proj: None: the heads have no gates.
        hidden: `[num_rows, hidden_size]`.
        sizes: of queries, keys and values on this rank.

    Returns:
        `[num_rows, size]` each, gates `[num_rows, num_heads]` or None.
    """
    both = None if gate_proj is None else product_of_both(qkv_proj, gate_proj, hidden)
    if both is not None:
        query, key, value, gates = torch.split(both, [*sizes, both.shape[-1] - sum(sizes)], dim=-1)
        return query, key, value, gates
    query, key, value = qkv_proj(hidden)[0].split(sizes, dim=-1)
    return query, key, value, None if gate_proj is None else gate_proj(hidden)[0]


def norm_and_rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    query_norm: Any,
    key_norm: Any,
    rotary: Any | None,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys after the norms of their heads, and their rotation.

    Args:
        query, key: `[num_rows, heads, head_dim]`.
        rotary: None: the layer rotates nothing.
        positions: `[num_rows]` integers.

    Returns:
        `[num_rows, heads * head_dim]` each.
    """
    # On a CPU vLLM's own kernels for the two are the quicker.
    if has_kernels(query) and rotary is not None and _rotates_halves(rotary):
        query, key = norm_rope(
            query,
            key,
            query_norm.weight,
            key_norm.weight,
            query_norm.variance_epsilon,
            positions,
            rotary._match_cos_sin_cache_dtype(query),
        )
        return query.flatten(1), key.flatten(1)
    query, key = query_norm(query).flatten(1), key_norm(key).flatten(1)
    return (query, key) if rotary is None else rotary(positions, query, key)


def add_mlp(mlp: Any, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The residual stream `[num_rows, hidden_size]` after a gated MLP of `x`; `residual` may be written to.

    The GEMM that adds to it rounds once in 16-bit, a GEMM and an addition twice.
    """
    down = mlp.down_proj
    if is_quantised(down) and down.tp_size == 1:
        return product(down, mlp.act_fn(mlp.gate_up_proj(x)[0]), residual)
    if not (is_plain(down) and down.tp_size == 1):
        total: torch.Tensor = mlp(x) + residual
        return total
    gate_up, _ = mlp.gate_up_proj(x)
    return residual.addmm_(mlp.act_fn(gate_up), down.weight.t())


def _is_a_table(embedding: Any) -> bool:
    """Whether a row of its weight is what it returns for a token: not of a shard, quantised, or under an adapter."""
    if type(embedding) is not VocabParallelEmbedding or embedding.tp_size > 1:
        return False
    return isinstance(embedding.quant_method, UnquantizedEmbeddingMethod)


def _rotates_halves(rotary: nn.Module) -> bool:
    """Whether all that is particular to it is in its table: that of YaRN and the like is, that of M-RoPE is not."""
    if not isinstance(rotary, RotaryEmbedding) or not rotary.is_neox_style:
        return False
    return type(rotary).forward_native is RotaryEmbedding.forward_native
