"""A DeepSeek-V3 checkpoint of a dense layer, one with experts, and an MTP layer, all with latent attention."""

from pathlib import Path
from typing import Any

from bench.reference.tiny import TinyWeights

HIDDEN, LAYERS, VOCAB, HEADS, INNER, EXPERTS = 64, 2, 256, 2, 96, 4
QUERY_RANK, RANK, NOPE_DIM, ROPE_DIM, VALUE_DIM = 48, 512, 128, 64, 128  # kernels know no others

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "float32",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": QUERY_RANK,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE_DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "v_head_dim": VALUE_DIM,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "rope_interleave": True,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_checkpoint(folder: Path, dense_layers: int = 1) -> str:
    """Writes the checkpoint and returns its path."""
    config = CONFIG | {"first_k_dense_replace": dense_layers}
    weights = TinyWeights(HIDDEN)
    weights.ends(VOCAB)
    weights.sparse_decoder(config, lambda layer: _latent_attention(weights, layer))
    module = f"model.layers.{LAYERS}"
    shared = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    weights.tensors |= {
        f"{module}.{name}.weight": weights.tensors[f"{of}.weight"].clone() for name, of in shared.items()
    }
    return weights.save(folder, config)


def write_dense_target(folder: Path) -> str:
    """The same, and only the MTP layer has experts: no backend has latent attention in float32, and in 16 bits a target
    that nearly ties chooses other experts than the reference's.
    """
    return write_checkpoint(folder, dense_layers=LAYERS)


def _latent_attention(weights: TinyWeights, layer: str) -> None:
    weights.gains(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    name = f"{layer}.self_attn"
    weights.linear(f"{name}.q_a_proj", QUERY_RANK, HIDDEN)
    weights.gains(f"{name}.q_a_layernorm", size=QUERY_RANK)
    weights.linear(f"{name}.q_b_proj", HEADS * (NOPE_DIM + ROPE_DIM), QUERY_RANK)
    weights.linear(f"{name}.kv_a_proj_with_mqa", RANK + ROPE_DIM, HIDDEN)
    weights.gains(f"{name}.kv_a_layernorm", size=RANK)
    weights.linear(f"{name}.kv_b_proj", HEADS * (NOPE_DIM + VALUE_DIM), RANK)
    weights.linear(f"{name}.o_proj", HIDDEN, HEADS * VALUE_DIM)
    weights.tensors[f"{name}.o_proj.weight"] /= 2  # of values as wide as kernels want them little is left of a token
