"""A MiMo-V2-style language model in plain PyTorch, as small as the tiny Step-3.5-style one.

The parameter names are those of the real checkpoints (`model.mtp.layers.{i}.eh_proj`, `attention_sink_bias`, ...), so
that the state dict *is* the checkpoint that vLLM loads.

Multi-token prediction: module i at row p consumes the *target's* hidden state at row p, past the final norm, and the
embedding of token p+1+i, and predicts token p+2+i by the target's head. No hidden states flow between modules.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.shapes import layer_types
from tools.tiny_model import MLP, rotary_tables, rotate


@dataclass(frozen=True)
class TinyMiMoV2Config:
    """Sizes of the model; the defaults give 2.0 M parameters, which with the tokenizer take less than 4 MiB.

    Transformers' own class, too, loads what has as many heads in both kinds of layers and twice the KV heads in
    sliding ones. The large models do.
    """

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 256
    head_dim: int = 32  # of values, too: vLLM's attention on the CPU knows no other
    num_full_heads: int = 8
    num_full_kv_heads: int = 1
    num_sliding_heads: int = 8
    num_sliding_kv_heads: int = 2
    sliding_window: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    # F: full attention, S: sliding. All modules slide.
    target_layers: str = "FSSFSS"
    module_layers: str = "SSS"
    full_rope_theta: float = 100_000.0
    sliding_rope_theta: float = 10_000.0
    rotary_factor: float = 0.5
    value_scale: float = 0.707
    # On what each block adds, in training only.
    dropout: float = 0.1

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of the checkpoint, in MiMo-V2's own terms. It has no number of modules; the weights do."""
        sliding = [kind == "S" for kind in self.target_layers]
        types = layer_types(sliding)
        thetas = {"full_attention": self.full_rope_theta, "sliding_attention": self.sliding_rope_theta}
        return {
            "architectures": ["MiMoV2FlashForCausalLM"],
            "model_type": "mimo_v2_flash",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            "num_hidden_layers": len(self.target_layers),
            "hybrid_layer_pattern": [int(s) for s in sliding],
            "num_attention_heads": self.num_full_heads,
            "num_key_value_heads": self.num_full_kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.head_dim,
            "swa_num_attention_heads": self.num_sliding_heads,
            "swa_num_key_value_heads": self.num_sliding_kv_heads,
            "swa_head_dim": self.head_dim,
            "swa_v_head_dim": self.head_dim,
            "sliding_window": self.sliding_window,
            "sliding_window_size": self.sliding_window,
            "attention_bias": False,
            "attention_value_scale": self.value_scale,
            "add_full_attention_sink_bias": False,
            "add_swa_attention_sink_bias": True,
            "rope_theta": self.full_rope_theta,
            "swa_rope_theta": self.sliding_rope_theta,
            "partial_rotary_factor": self.rotary_factor,
            "layernorm_epsilon": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "moe_layer_freq": [0] * len(sliding),
            "n_routed_experts": 1,  # vLLM wants a number, of no layer
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            # The same as transformers' own class has it, which would otherwise take the large model's.
            "layer_types": types,
            "mlp_layer_types": ["dense"] * len(sliding),
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": self.rotary_factor}
                for kind, theta in thetas.items()
            },
        }


class RMSNorm(nn.Module):
    """Root mean square norm, in float32 whatever it is given."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def attend_in_window(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int) -> Tensor:
    """Every row attends to itself, to the `window - 1` rows before it and to its head's sink, which has no value.

    Rows are taken a window at a time, each with its own keys and those of the window before, so that nothing of the
    length's square is computed.

    Args:
        query, key, value: `[batch, heads, length, head_dim]`.
        sinks: `[heads]`, a logit in the softmax's denominator.
    """
    length, head_dim = query.shape[2:]
    count = -(-length // window)
    query, key, value = (
        F.pad(x, (0, 0, 0, count * window - length)).unflatten(2, (count, window)) for x in (query, key, value)
    )
    key, value = (torch.cat([F.pad(x[:, :, :-1], (0, 0, 0, 0, 1, 0)), x], dim=3) for x in (key, value))
    columns = torch.arange(2 * window, device=query.device)
    distance = columns[window:, None] - columns
    exists = (torch.arange(count, device=query.device)[:, None] > 0) | (columns >= window)
    visible = (distance >= 0) & (distance < window) & exists[:, None]
    scores = (query @ key.transpose(-1, -2)).float() * head_dim**-0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    sink = sinks.float()[:, None, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return (weights.to(value.dtype) @ value).flatten(2, 3)[:, :, :length]


class Attention(nn.Module):
    def __init__(self, config: TinyMiMoV2Config, *, sliding: bool) -> None:
        super().__init__()
        self.config, self.sliding = config, sliding
        hidden, dim = config.hidden_size, config.head_dim
        self.heads = config.num_sliding_heads if sliding else config.num_full_heads
        self.kv_heads = config.num_sliding_kv_heads if sliding else config.num_full_kv_heads
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=False)
        if sliding:
            self.attention_sink_bias = nn.Parameter(torch.zeros(self.heads))

    def forward(self, x: Tensor) -> Tensor:
        config, length = self.config, x.shape[1]
        q, k, v = (
            y.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x) * config.value_scale)
        )
        theta = config.sliding_rope_theta if self.sliding else config.full_rope_theta
        cos, sin = rotary_tables(length, int(config.head_dim * config.rotary_factor), theta, x.device)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        if self.sliding:
            y = attend_in_window(q, k, v, self.attention_sink_bias, config.sliding_window)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self, config: TinyMiMoV2Config, *, sliding: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, sliding=sliding)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class MTPModule(nn.Module):
    """A sliding decoder layer between the projection of `[embedding, hidden state]` and a norm."""

    def __init__(self, config: TinyMiMoV2Config) -> None:
        super().__init__()
        norm = lambda: RMSNorm(config.hidden_size, config.rms_norm_eps)  # noqa: E731
        self.dropout = nn.Dropout(config.dropout)
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.input_layernorm, self.pre_mlp_layernorm, self.final_layernorm = norm(), norm(), norm()
        self.self_attn = Attention(config, sliding=True)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, embeddings: Tensor, hidden_states: Tensor) -> Tensor:
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1))
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)))
        x = x + self.dropout(self.mlp(self.pre_mlp_layernorm(x)))
        return self.final_layernorm(x)


class Modules(nn.Module):
    def __init__(self, config: TinyMiMoV2Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MTPModule(config) for _ in config.module_layers)


class Trunk(nn.Module):
    def __init__(self, config: TinyMiMoV2Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, sliding=kind == "S") for kind in config.target_layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mtp = Modules(config)


class TinyMiMoV2(nn.Module):
    """The target model and its modules, which share its embedding and its head."""

    def __init__(self, config: TinyMiMoV2Config) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """`ids` `[batch, length]` to the target's logits and each module's, all `[batch, length, vocab]`.

        The last `1 + i` rows of module i have no token to consume: they are computed from zeros and mean nothing.
        """
        embeddings = self.model.embed_tokens(ids)
        hidden = embeddings
        for layer in self.model.layers:
            hidden = layer(hidden)
        hidden = self.model.norm(hidden)
        module_logits = []
        for i, module in enumerate(self.model.mtp.layers):
            shifted = F.pad(embeddings[:, 1 + i :], (0, 0, 0, 1 + i))
            module_logits.append(self.lm_head(module(shifted, hidden)))
        return self.lm_head(hidden), module_logits
