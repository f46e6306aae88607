"""A Qwen3.5 checkpoint of text alone: a gated delta net, a full layer, and one or two modules."""

from pathlib import Path
from typing import Any

import torch

from bench.reference.tiny import TinyWeights

HIDDEN, LAYERS, VOCAB, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 2, 256, 2, 1, 32, 96
LINEAR_KEY_HEADS, LINEAR_VALUE_HEADS, LINEAR_HEAD_DIM, KERNEL = 1, 2, 64, 4

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "linear_num_key_heads": LINEAR_KEY_HEADS,
    "linear_num_value_heads": LINEAR_VALUE_HEADS,
    "linear_key_head_dim": LINEAR_HEAD_DIM,
    "linear_value_head_dim": LINEAR_HEAD_DIM,
    "linear_conv_kernel_dim": KERNEL,
    "attn_output_gate": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_checkpoint(folder: Path, modules: int = 1, kv_heads: int = KV_HEADS, head_dim: int = HEAD_DIM) -> str:
    """Writes the checkpoint and returns its path.

    Args:
        kv_heads, head_dim: of the full layers. The more a token's row takes there, the shorter are vLLM's blocks, which
            hold as many rows as a state takes.
    """
    weights = TinyWeights(HIDDEN, zero_centered=True)
    weights.ends(VOCAB)
    _delta_net(weights, "model.layers.0")
    for layer in ("model.layers.1", *(f"mtp.layers.{module}" for module in range(modules))):
        weights.attention(layer, HEADS, kv_heads, head_dim, head_norms=True)
        weights.linear(f"{layer}.self_attn.q_proj", 2 * HEADS * head_dim, HIDDEN)  # with the gates of the heads
        weights.mlp(f"{layer}.mlp", INNER)
    weights.gains("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    weights.projection("mtp.fc")
    for name, tensor in weights.tensors.items():
        # Engines have it in bfloat16, and the reference is to start from the same weights.
        weights.tensors[name] = tensor if name.endswith("A_log") else tensor.bfloat16()
    sizes = {"num_key_value_heads": kv_heads, "head_dim": head_dim, "mtp_num_hidden_layers": modules}
    return weights.save(folder, CONFIG | sizes)


def write_two_modules(folder: Path) -> str:
    return write_checkpoint(folder, modules=2)


def write_short_blocks(folder: Path, modules: int = 1) -> str:
    """One whose blocks are short enough for several in a prompt of its context."""
    return write_checkpoint(folder, modules, kv_heads=2, head_dim=64)


def write_short_blocks_of_two(folder: Path) -> str:
    return write_short_blocks(folder, modules=2)


def _delta_net(weights: TinyWeights, layer: str) -> None:
    weights.gains(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    name, value_size = f"{layer}.linear_attn", LINEAR_VALUE_HEADS * LINEAR_HEAD_DIM
    mixed = 2 * LINEAR_KEY_HEADS * LINEAR_HEAD_DIM + value_size
    rows = {"in_proj_qkv": mixed, "in_proj_z": value_size, "in_proj_b": LINEAR_VALUE_HEADS}
    for part, count in (rows | {"in_proj_a": LINEAR_VALUE_HEADS}).items():
        weights.linear(f"{name}.{part}", count, HIDDEN)
    weights.linear(f"{name}.out_proj", HIDDEN, value_size)
    weights.tensors[f"{name}.conv1d.weight"] = weights.noise(mixed, 1, KERNEL, scale=0.5)
    weights.tensors[f"{name}.dt_bias"] = weights.noise(LINEAR_VALUE_HEADS, scale=0.5)
    weights.tensors[f"{name}.A_log"] = torch.linspace(-3.0, 0.0, LINEAR_VALUE_HEADS)
    weights.tensors[f"{name}.norm.weight"] = 1 + weights.noise(LINEAR_HEAD_DIM, scale=0.1)
    weights.mlp(f"{layer}.mlp", INNER)
