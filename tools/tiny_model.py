"""A Step-3.5-style language model in plain PyTorch, small enough to train in minutes.

The parameter names are those of the real checkpoints (`model.layers.{N+i}.eh_proj`, `shared_head.output`, ...), so
that the state dict *is* the checkpoint that vLLM loads.

Multi-token prediction: module i at row p consumes the hidden state of module i-1 at row p (the target's, for i = 0)
and the embedding of token p+1+i, and predicts token p+2+i (DeepSeek-V3, arXiv 2412.19437, section 2.2).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.shapes import TinyConfig


class GemmaRMSNorm(nn.Module):
    """Root mean square norm whose gain is `1 + weight`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight.float())
        return y.to(x.dtype)


def rotary_tables(length: int, rotary_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each `[length, rotary_dim // 2]` float32."""
    inverse = theta ** (-torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim)
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first `2 * cos.shape[-1]` features of `x` `[batch, heads, length, head_dim]` in two halves."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: TinyConfig, layer: int) -> None:
        super().__init__()
        self.config, self.sliding = config, config.is_sliding(layer)
        hidden, dim = config.hidden_size, config.head_dim
        self.heads = config.num_sliding_heads if self.sliding else config.num_full_heads
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.g_proj = nn.Linear(hidden, self.heads, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=False)
        self.q_norm = GemmaRMSNorm(dim, config.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(dim, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        config = self.config
        split = lambda y, heads: y.view(batch, length, heads, config.head_dim).transpose(1, 2)  # noqa: E731
        q = self.q_norm(split(self.q_proj(x), self.heads))
        k = self.k_norm(split(self.k_proj(x), config.num_kv_heads))
        v = split(self.v_proj(x), config.num_kv_heads)
        if self.sliding:
            cos, sin = rotary_tables(length, config.head_dim, config.sliding_rope_theta, x.device)
        else:
            rotary_dim = int(config.head_dim * config.full_rotary_factor)
            cos, sin = rotary_tables(length, rotary_dim, config.full_rope_theta, x.device)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        repeat = self.heads // config.num_kv_heads
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        mask = None
        if self.sliding:
            rows = torch.arange(length, device=x.device)
            distance = rows[:, None] - rows[None, :]
            mask = (distance >= 0) & (distance < config.sliding_window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        y = y * torch.sigmoid(self.g_proj(x)).transpose(1, 2).unsqueeze(-1)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class ExpertWeights(nn.Module):
    """One projection of all experts, packed `[experts, out, in]` as in the checkpoints."""

    def __init__(self, experts: int, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features).normal_(std=0.02))


class MoE(nn.Module):
    """Top-k mixture; at this size every expert is computed for every row and the unused ones are weighted zero."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        experts, hidden, width = config.moe_num_experts, config.hidden_size, config.moe_intermediate_size
        self.top_k = config.moe_top_k
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.register_buffer("router_bias", torch.zeros(experts))
        self.gate_proj = ExpertWeights(experts, width, hidden)
        self.up_proj = ExpertWeights(experts, width, hidden)
        self.down_proj = ExpertWeights(experts, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x.float(), self.gate.weight.float()).softmax(dim=-1)
        top, index = scores.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, index, top / top.sum(-1, keepdim=True))
        up = torch.einsum("bth,eih->beti", x, self.up_proj.weight.to(x.dtype))
        gate = torch.einsum("bth,eih->beti", x, self.gate_proj.weight.to(x.dtype))
        y = torch.einsum("beti,ehi->beth", F.silu(gate) * up, self.down_proj.weight.to(x.dtype))
        return torch.einsum("beth,bte->bth", y, weights.to(x.dtype))


class DecoderLayer(nn.Module):
    def __init__(self, config: TinyConfig, layer: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.is_moe = layer == config.moe_layer
        if self.is_moe:
            self.moe = MoE(config)
            self.share_expert = MLP(config.hidden_size, config.moe_intermediate_size)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x)))
        y = self.post_attention_layernorm(x)
        return x + self.dropout(self.moe(y) + self.share_expert(y) if self.is_moe else self.mlp(y))


class SharedHead(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.norm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class MTPModule(DecoderLayer):
    """A decoder layer between the projection of `[embedding, hidden state]` and a head of its own."""

    def __init__(self, config: TinyConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.enorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = SharedHead(config)

    def forward_module(self, embeddings: Tensor, hidden_states: Tensor) -> Tensor:
        return self.forward(self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1)))


class Trunk(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        targets = len(config.target_layers)
        # One list, as in the checkpoint: the modules are the layers past the target's.
        self.layers = nn.ModuleList(
            DecoderLayer(config, i) if i < targets else MTPModule(config, i) for i in range(len(config.layers))
        )
        self.norm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyStep3p5(nn.Module):
    """The target model and its chained modules."""

    def __init__(self, config: TinyConfig) -> None:
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
        targets = len(self.config.target_layers)
        embeddings = self.model.embed_tokens(ids)
        hidden = embeddings
        for layer in self.model.layers[:targets]:
            hidden = layer(hidden)
        logits = self.lm_head(self.model.norm(hidden))
        module_logits = []
        for i, module in enumerate(self.model.layers[targets:]):
            shifted = F.pad(embeddings[:, 1 + i :], (0, 0, 0, 1 + i))
            assert isinstance(module, MTPModule)
            hidden = module.forward_module(shifted, hidden)
            module_logits.append(module.shared_head(hidden))
        return logits, module_logits
