"""GLM-4.5 in plain float32 torch: experts, and one module with a norm of its own before the head."""

from pathlib import Path

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


class DenseGlm4Moe(DenseModel):
    """The weights of a GLM-4.5 checkpoint. The module has the target's head, behind a norm of its own."""

    embeds_row_0 = False

    def __init__(self, folder: Path) -> None:
        self.config = config = read_config(folder)
        refuse_expert_groups(config)
        self.hidden_states_flow, self.eps = True, config["rms_norm_eps"]
        tensors = read_tensors(folder)
        self.take_ends(tensors)
        attention = Attention(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            window=None,
            rotary_dim=int(config["head_dim"] * config["partial_rotary_factor"]),
            theta=config["rope_theta"],
            gated=False,
        )
        scale = config["routed_scaling_factor"]
        routing = Routing(config["num_experts_per_tok"], "sigmoid", config["norm_topk_prob"], scale)
        num_layers = config["num_hidden_layers"]
        layers = [
            Layer(attention, self.eps, stack_experts(with_prefix(tensors, f"model.layers.{index}.")), routing)
            for index in range(num_layers + config["num_nextn_predict_layers"])
        ]
        self.target, self.modules = layers[:num_layers], layers[num_layers:]

    def target_state(self, hidden: Tensor) -> Tensor:
        """The module takes the target's hidden state behind its final norm."""
        return rms_norm(hidden, self.norm, self.eps)

    def module_logits(self, module: int, hidden: Tensor) -> Tensor:
        gain = self.modules[module].weights["shared_head.norm.weight"]
        return F.linear(rms_norm(hidden, gain, self.eps), self.head)
