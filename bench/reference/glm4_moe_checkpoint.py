"""A GLM-4.5 checkpoint of a dense layer, one with experts, and an MTP layer."""

from pathlib import Path
from typing import Any

from bench.reference.tiny import TinyWeights

HIDDEN, LAYERS, VOCAB, HEADS, KV_HEADS, HEAD_DIM, INNER, EXPERTS = 64, 2, 256, 2, 1, 32, 96, 4

CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "dtype": "float32",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
    "attention_bias": False,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_checkpoint(folder: Path) -> str:
    """Writes the checkpoint and returns its path."""
    weights = TinyWeights(HIDDEN)
    weights.ends(VOCAB)
    weights.sparse_decoder(CONFIG, lambda layer: weights.attention(layer, HEADS, KV_HEADS, HEAD_DIM, head_norms=True))
    return weights.save(folder, CONFIG)
