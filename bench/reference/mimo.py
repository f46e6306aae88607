"""MiMo in plain float32 torch: a Qwen2 decoder, and one module that every draft is made by."""

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
    rms_norm,
    with_prefix,
)

NO_EXPERTS = Routing(1, "softmax", False, 1.0)


class DenseMiMo(DenseModel):
    """The weights of a MiMo checkpoint. The module has no head of its own: it takes the target's."""

    embeds_row_0 = False

    def __init__(self, folder: Path) -> None:
        self.config = config = read_config(folder)
        self.hidden_states_flow = True
        self.eps = config["rms_norm_eps"]
        tensors = read_tensors(folder)
        self.take_ends(tensors)
        self.target, self.modules = (
            [
                Layer(_attention(config), self.eps, with_prefix(tensors, f"model.{name}.{index}."), NO_EXPERTS)
                for index in range(count)
            ]
            for name, count in (
                ("layers", config["num_hidden_layers"]),
                ("mtp_layers", config["num_nextn_predict_layers"]),
            )
        )

    def module_logits(self, module: int, hidden: Tensor) -> Tensor:
        """The module's hidden states are normed already (`final_layernorm`), for its head and for its next step."""
        return F.linear(hidden, self.head)

    def module_input(self, module: int, tokens: Tensor, hidden: Tensor, first: int) -> Tensor:
        """`input_proj([hidden_layernorm(hidden), token_layernorm(embedding)])`."""
        weights = self.modules[module].weights
        embedding = self.embed(tokens, first)
        hidden = rms_norm(hidden, weights["hidden_layernorm.weight"], self.eps)
        embedding = rms_norm(embedding, weights["token_layernorm.weight"], self.eps)
        return F.linear(torch.cat([hidden, embedding], dim=-1), weights["input_proj.weight"])


def _attention(config: dict[str, Any]) -> Attention:
    head_dim = config["head_dim"]
    return Attention(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        window=None,
        rotary_dim=head_dim,
        theta=config["rope_theta"],
        gated=False,
    )
