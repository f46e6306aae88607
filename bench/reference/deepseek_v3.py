"""DeepSeek-V3 in plain float32 torch: latent attention, experts, and a module that is normed at its end."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.reference.dense import (
    Attention,
    DenseModel,
    Layer,
    Routing,
    Rows,
    read_config,
    read_tensors,
    refuse_expert_groups,
    rms_norm,
    rotate,
    stack_experts,
    with_prefix,
)


class DenseDeepseekV3(DenseModel):
    """The weights of a DeepSeek-V3 checkpoint. Its module's norm is before its head and before its next step."""

    embeds_row_0 = False

    def __init__(self, folder: Path) -> None:
        self.config = config = read_config(folder)
        refuse_expert_groups(config)
        if config.get("rope_scaling"):
            raise NotImplementedError(f"The config scales its rotary embedding ({config['rope_scaling']}).")
        self.hidden_states_flow, self.eps = True, config["rms_norm_eps"]
        tensors = read_tensors(folder)
        self.take_ends(tensors)
        num_layers = config["num_hidden_layers"]
        self.target, self.modules = (
            [self._layer(with_prefix(tensors, f"model.layers.{index}.")) for index in indices]
            for indices in (range(num_layers), range(num_layers, num_layers + config["num_nextn_predict_layers"]))
        )

    def _layer(self, weights: dict[str, Tensor]) -> Layer:
        config = self.config
        scale = config["routed_scaling_factor"]
        routing = Routing(config["num_experts_per_tok"], "sigmoid", config["norm_topk_prob"], scale)
        weights = stack_experts(weights)
        if "shared_head.norm.weight" in weights:
            weights["final_layernorm.weight"] = weights["shared_head.norm.weight"]
        return LatentLayer(config, weights, routing)

    def target_state(self, hidden: Tensor) -> Tensor:
        """The module takes the target's hidden state behind its final norm."""
        return rms_norm(hidden, self.norm, self.eps)

    def module_logits(self, module: int, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)


class LatentLayer(Layer):
    """A layer with multi-head latent attention (arXiv 2405.04434).

    Of `Rows`, `keys` are what is cached: the normed latent and the rotated features that all heads share; there are no
    values.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], routing: Routing) -> None:
        self.heads, self.rank = config["num_attention_heads"], config["kv_lora_rank"]
        self.nope_dim, self.rope_dim = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.value_dim, self.theta = config["v_head_dim"], config["rope_theta"]
        cached = Attention(self.heads, 1, self.rank + self.rope_dim, None, 0, self.theta, gated=False, value_dim=0)
        super().__init__(cached, config["rms_norm_eps"], weights, routing)

    def _attend(self, x: Tensor, rows: Rows) -> Tensor:
        new, first = len(x), rows.count
        positions = torch.arange(first, first + new)
        query, query_rope = self._query(x).split([self.nope_dim, self.rope_dim], dim=-1)
        latent, key_rope = self._linear(x, "self_attn.kv_a_proj_with_mqa").split([self.rank, self.rope_dim], dim=-1)
        query_rope, key_rope = (
            rotate(features, positions, self.rope_dim, self.theta, interleaved=True)
            for features in (query_rope, key_rope[:, None])
        )
        latent = self._norm(latent, "self_attn.kv_a_layernorm")
        rows.extend(torch.cat([latent[:, None], key_rope], dim=-1), torch.empty(new, 1, 0))
        latents, rope = rows.keys[:, 0].split([self.rank, self.rope_dim], dim=-1)
        keys_and_values = self._linear(latents, "self_attn.kv_b_proj").unflatten(-1, (self.heads, -1))
        keys, values = keys_and_values.split([self.nope_dim, self.value_dim], dim=-1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) + torch.einsum("qhd,kd->hqk", query_rope, rope)
        visible = positions[:, None] >= torch.arange(first + new)
        scores = (scores * (self.nope_dim + self.rope_dim) ** -0.5).masked_fill(~visible, -math.inf)
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return self._linear(y.flatten(1), "self_attn.o_proj")

    def _query(self, x: Tensor) -> Tensor:
        """`[new, heads, nope_dim + rope_dim]`."""
        if "self_attn.q_proj.weight" in self.weights:
            query = self._linear(x, "self_attn.q_proj")
        else:
            query = self._norm(self._linear(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm")
            query = self._linear(query, "self_attn.q_b_proj")
        return query.unflatten(-1, (self.heads, -1))
