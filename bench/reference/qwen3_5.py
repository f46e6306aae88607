"""Qwen3.5 in plain float32 torch: gated delta nets beside full attention, and modules as EXAONE-MoE has them."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.reference.dense import Attention, Layer, Routing, Rows, read_config, read_tensors, rms_norm, with_prefix
from bench.reference.exaone_moe import DenseExaoneMoe

NO_EXPERTS = Routing(1, "softmax", False, 1.0)


class DenseQwen3_5(DenseExaoneMoe):
    """The weights of a dense Qwen3.5 checkpoint of text alone."""

    def __init__(self, folder: Path) -> None:
        self.config = config = read_config(folder)
        self.hidden_states_flow, self.eps = True, config["rms_norm_eps"]
        # Norms' gains are one more than the checkpoint says, but for that at the end of a delta net.
        tensors = {
            name: tensor + 1.0 if "norm" in name and "linear_attn" not in name else tensor
            for name, tensor in read_tensors(folder).items()
        }
        self.take_ends(tensors)
        self.mtp = with_prefix(tensors, "mtp.")
        self.target = [
            self._layer(kind, with_prefix(tensors, f"model.layers.{index}."))
            for index, kind in enumerate(config["layer_types"])
        ]
        self.modules = [
            self._layer(
                "full_attention",
                with_prefix(self.mtp, f"layers.{index}.") | {"final_layernorm.weight": self.mtp["norm.weight"]},
            )
            for index in range(config["mtp_num_hidden_layers"])
        ]

    def _layer(self, kind: str, weights: dict[str, Tensor]) -> Layer:
        if kind == "linear_attention":
            return DeltaLayer(self.config, weights)
        attention = _attention(self.config)
        return Layer(attention, self.eps, split_gates_off(weights, attention.head_dim), NO_EXPERTS)


class DeltaLayer(Layer):
    """A layer whose attention is a gated delta net (arXiv 2412.06464).

    Of `Rows`, `keys` are the inputs of its convolution, and `values` its states after each row.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.key_heads, self.value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        self.key_dim, self.value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        self.sizes = [self.key_heads * self.key_dim] * 2 + [self.value_heads * self.value_dim]
        state_size = self.value_heads * self.key_dim * self.value_dim
        rows = Attention(1, 1, sum(self.sizes), None, 0, 0.0, gated=False, value_dim=state_size)
        super().__init__(rows, config["rms_norm_eps"], weights, NO_EXPERTS)

    def _attend(self, x: Tensor, rows: Rows) -> Tensor:
        new, first = len(x), rows.count
        mixed = self._linear(x, "linear_attn.in_proj_qkv")
        query, key, value = self._convolve(rows.keys[:first, 0], mixed).split(self.sizes, dim=-1)
        repeat = self.value_heads // self.key_heads
        query, key = (
            _unit(heads.view(new, self.key_heads, self.key_dim)).repeat_interleave(repeat, dim=1)
            for heads in (query, key)
        )
        query, value = query * self.key_dim**-0.5, value.view(new, self.value_heads, self.value_dim)
        strength = self._linear(x, "linear_attn.in_proj_b").sigmoid()
        time = F.softplus(self._linear(x, "linear_attn.in_proj_a") + self.weights["linear_attn.dt_bias"])
        decay = (-self.weights["linear_attn.A_log"].exp() * time).exp()
        shape = self.value_heads, self.key_dim, self.value_dim
        state = rows.values[first - 1].view(shape) if first else torch.zeros(shape)
        states, outputs = [], []
        for row in range(new):
            state = state * decay[row, :, None, None]
            known = torch.einsum("hk,hkv->hv", key[row], state)
            learnt = (value[row] - known) * strength[row, :, None]
            state = state + key[row, :, :, None] * learnt[:, None, :]
            states.append(state.flatten())
            outputs.append(torch.einsum("hk,hkv->hv", query[row], state))
        rows.extend(mixed[:, None], torch.stack(states)[:, None])
        y = rms_norm(torch.stack(outputs), self.weights["linear_attn.norm.weight"], self.eps)
        gates = F.silu(self._linear(x, "linear_attn.in_proj_z")).view_as(y)
        return self._linear((y * gates).flatten(1), "linear_attn.out_proj")

    def _convolve(self, before: Tensor, mixed: Tensor) -> Tensor:
        """`[new, channels]`: each channel over its last rows, the row's own among them."""
        kernel = self.weights["linear_attn.conv1d.weight"][:, 0]
        length = kernel.shape[1]
        padded = torch.cat([torch.zeros(length - 1, mixed.shape[1]), before, mixed])[-(len(mixed) + length - 1) :]
        return F.silu((padded.unfold(0, length, 1) * kernel).sum(-1))


def _unit(x: Tensor) -> Tensor:
    """Vectors of length one, in the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def split_gates_off(weights: dict[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """A layer's weights with those of its gates by themselves: a head's stand behind those of its query."""
    name = "self_attn.q_proj.weight"
    query, gates = weights[name].unflatten(0, (-1, 2, head_dim)).unbind(1)
    return weights | {name: query.flatten(0, 1), "self_attn.g_proj.weight": gates.flatten(0, 1)}


def _attention(config: dict[str, Any]) -> Attention:
    rope = config["rope_parameters"]
    return Attention(
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        window=None,
        rotary_dim=int(config["head_dim"] * rope["partial_rotary_factor"]),
        theta=rope["rope_theta"],
        gated=True,
    )
