"""EXAONE-MoE in plain float32 torch: sliding and full layers, and modules that share all but their decoder layer."""

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
    read_config,
    read_tensors,
    refuse_expert_groups,
    rms_norm,
    stack_experts,
    with_prefix,
)


class DenseExaoneMoe(DenseModel):
    """The weights of an EXAONE-MoE checkpoint. A module is normed at its end, for the head and for the next one."""

    def __init__(self, folder: Path) -> None:
        self.config = config = read_config(folder)
        refuse_expert_groups(config)
        self.hidden_states_flow, self.eps = True, config["rms_norm_eps"]
        tensors = read_tensors(folder)
        self.take_ends(tensors)
        self.mtp = with_prefix(tensors, "mtp.")
        scale = config["routed_scaling_factor"]
        routing = Routing(config["num_experts_per_tok"], "sigmoid", config["norm_topk_prob"], scale)
        slides = "sliding_attention" in config["layer_types"]
        self.target = [
            Layer(
                # A full layer beside sliding ones has no positions.
                _attention(config, kind, rotated=kind == "sliding_attention" or not slides),
                self.eps,
                stack_experts(with_prefix(tensors, f"model.layers.{index}."), "mlp.e_score_correction_bias"),
                routing,
            )
            for index, kind in enumerate(config["layer_types"])
        ]
        self.modules = [
            Layer(
                _attention(config, kind, rotated=True),
                self.eps,
                with_prefix(self.mtp, f"layers.{index}.") | {"final_layernorm.weight": self.mtp["norm.weight"]},
                routing,
            )
            for index, kind in enumerate(config.get("mtp_layer_types") or config["layer_types"])
            if index < config["num_nextn_predict_layers"]
        ]

    def target_state(self, hidden: Tensor) -> Tensor:
        """The first module takes the target's hidden state behind its final norm."""
        return rms_norm(hidden, self.norm, self.eps)

    def module_logits(self, module: int, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)

    def module_input(self, module: int, tokens: Tensor, hidden: Tensor, first: int) -> Tensor:
        """`fc([norm(embedding), norm(hidden)])`, by the same weights in every module."""
        embedding = rms_norm(self.embeddings[tokens], self.mtp["pre_fc_norm_embedding.weight"], self.eps)
        hidden = rms_norm(hidden, self.mtp["pre_fc_norm_hidden.weight"], self.eps)
        return F.linear(torch.cat([embedding, hidden], dim=-1), self.mtp["fc.weight"])


def _attention(config: dict[str, Any], kind: str, rotated: bool) -> Attention:
    return Attention(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        window=config["sliding_window"] if kind == "sliding_attention" else None,
        rotary_dim=config["head_dim"] if rotated else 0,
        theta=config["rope_parameters"]["rope_theta"],
        gated=False,
    )
