"""ERNIE 4.5 with experts in plain float32 torch, and its one module.

The module here is what vLLM makes of the checkpoint, since that is what drafts: its rotary embedding pairs the halves
of a head where the target's pairs neighbours, and nothing norms its output before the head.
"""

from dataclasses import replace
from pathlib import Path

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
    stack_experts,
    with_prefix,
)


class DenseErnie4_5Moe(DenseModel):
    """The weights of an ERNIE 4.5 checkpoint. The module has no head of its own: it takes the target's."""

    embeds_row_0 = False

    def __init__(self, folder: Path) -> None:
        self.config = config = read_config(folder)
        self.hidden_states_flow, self.eps = True, config["rms_norm_eps"]
        tensors = read_tensors(folder)
        self.take_ends(tensors)
        attention = Attention(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            window=None,
            rotary_dim=config["head_dim"],
            theta=config["rope_theta"],
            gated=False,
            interleaved=True,
        )
        routing, bias = Routing(config["moe_k"], "softmax", True, 1.0), "mlp.moe_statics.e_score_correction_bias"
        self.target = [
            Layer(attention, self.eps, stack_experts(with_prefix(tensors, f"model.layers.{index}."), bias), routing)
            for index in range(config["num_hidden_layers"])
        ]
        block = with_prefix(tensors, "model.mtp_block.0.")
        self.modules = [Layer(replace(attention, interleaved=False), self.eps, block, routing)]
        self._embedding_norm = tensors["model.mtp_emb_norm.0.weight"]
        self._hidden_norm = tensors["model.mtp_hidden_norm.0.weight"]
        self._projection = tensors["model.mtp_linear_proj.0.weight"]

    def target_state(self, hidden: Tensor) -> Tensor:
        """The module takes the target's hidden state behind its final norm."""
        return rms_norm(hidden, self.norm, self.eps)

    def module_logits(self, module: int, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)

    def module_input(self, module: int, tokens: Tensor, hidden: Tensor, first: int) -> Tensor:
        """`linear_proj([emb_norm(embedding), hidden_norm(hidden)])`."""
        embedding = self.embed(tokens, first)
        embedding = rms_norm(embedding, self._embedding_norm, self.eps)
        hidden = rms_norm(hidden, self._hidden_norm, self.eps)
        return F.linear(torch.cat([embedding, hidden], dim=-1), self._projection)
