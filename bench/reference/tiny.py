"""Random weights of tiny checkpoints, under which drafts are often right.

With random weights alone hardly any draft is accepted, and then rejections and acceptance are not really tried. So the
layers add little to the residual stream, and a token nearly decides the next one; a module passes the embedding of the
token that it is given through the same head, and adds some of the hidden state.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYER_SCALE, HIDDEN_STATE_SCALE, GAIN_SCALE = 0.07, 0.03, 0.1


class TinyWeights:
    """The tensors of a checkpoint, as they are made.

    Attributes:
        zero_centered: gains are stored as what they are more than one.
    """

    def __init__(self, hidden_size: int, *, zero_centered: bool = False) -> None:
        self.hidden_size, self.zero_centered = hidden_size, zero_centered
        self.tensors: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)

    def noise(self, *shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=self._generator) * scale

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        self.tensors[f"{name}.weight"] = self.noise(rows, columns, scale=LAYER_SCALE)
        if bias:
            self.tensors[f"{name}.bias"] = self.noise(rows, scale=LAYER_SCALE)

    def gains(self, *names: str, size: int | None = None) -> None:
        """Norms of the hidden size, or of `size`. All ones would hide a norm too many or too few."""
        for name in names:
            gain = self.noise(size or self.hidden_size, scale=GAIN_SCALE)
            self.tensors[f"{name}.weight"] = gain if self.zero_centered else 1 + gain

    def ends(self, vocab_size: int, prefix: str = "model.") -> None:
        """Embeddings, the final norm and a head."""
        self.tensors[f"{prefix}embed_tokens.weight"] = self.noise(vocab_size, self.hidden_size, scale=1.0)
        self.tensors["lm_head.weight"] = self.noise(vocab_size, self.hidden_size, scale=1.0)
        self.gains(f"{prefix}norm")

    def attention(self, layer: str, heads: int, kv_heads: int, head_dim: int, *, head_norms: bool = False) -> None:
        """Attention of a layer `model.layers.0`, and the layer's two norms."""
        self.gains(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            self.linear(f"{layer}.self_attn.{name}_proj", count * head_dim, self.hidden_size)
        self.linear(f"{layer}.self_attn.o_proj", self.hidden_size, heads * head_dim)
        if head_norms:
            self.gains(f"{layer}.self_attn.q_norm", f"{layer}.self_attn.k_norm", size=head_dim)

    def mlp(self, prefix: str, inner_size: int) -> None:
        for name in ("gate_proj", "up_proj"):
            self.linear(f"{prefix}.{name}", inner_size, self.hidden_size)
        self.linear(f"{prefix}.down_proj", self.hidden_size, inner_size)

    def experts(self, layer: str, count: int, inner_size: int, bias: str = "mlp.gate.e_score_correction_bias") -> None:
        """Experts of a layer, a shared one, and the gate with its bias, which is called `bias`."""
        self.linear(f"{layer}.mlp.gate", count, self.hidden_size)
        self.tensors[f"{layer}.{bias}"] = self.noise(count, scale=GAIN_SCALE)
        for expert in ("shared_experts", *(f"experts.{index}" for index in range(count))):
            self.mlp(f"{layer}.mlp.{expert}", inner_size)

    def sparse_decoder(self, config: dict[str, Any], attention: Callable[[str], None]) -> None:
        """Dense layers, layers with experts, and an MTP layer after them, as DeepSeek-V3 and others name them.

        Args:
            attention: makes the attention and the norms of the layer of that name.
        """
        num_layers, inner_size = config["num_hidden_layers"], config["intermediate_size"]
        for index in range(num_layers + 1):
            layer = f"model.layers.{index}"
            attention(layer)
            if index < config["first_k_dense_replace"]:
                self.mlp(f"{layer}.mlp", inner_size)
            else:
                self.experts(layer, config["n_routed_experts"], config["moe_intermediate_size"])
        module = f"model.layers.{num_layers}"
        self.gains(f"{module}.enorm", f"{module}.hnorm", f"{module}.shared_head.norm")
        self.projection(f"{module}.eh_proj")

    def projection(self, name: str) -> None:
        """A module's projection of `[embedding, hidden state]`."""
        hidden = self.noise(self.hidden_size, self.hidden_size, scale=HIDDEN_STATE_SCALE)
        self.tensors[f"{name}.weight"] = torch.cat([torch.eye(self.hidden_size), hidden], dim=1)

    def save(self, folder: Path, config: dict[str, Any]) -> str:
        """Writes the checkpoint and returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)
