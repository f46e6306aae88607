"""An EXAONE-MoE checkpoint: a sliding layer, a full one with experts, and one or two modules."""

from pathlib import Path
from typing import Any

from bench.reference.tiny import TinyWeights

HIDDEN, LAYERS, VOCAB, HEADS, KV_HEADS, HEAD_DIM, INNER, EXPERTS, WINDOW = 64, 2, 256, 2, 1, 32, 96, 4, 48

CONFIG: dict[str, Any] = {
    "architectures": ["ExaoneMoeForCausalLM"],
    "model_type": "exaone_moe",
    "dtype": "float32",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "layer_types": ["sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "first_k_dense_replace": 1,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_experts": EXPERTS,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_checkpoint(folder: Path, mtp_layer_types: tuple[str, ...] = ("full_attention",)) -> str:
    """Writes the checkpoint, with a module for each of the types, and returns its path."""
    weights = TinyWeights(HIDDEN)
    weights.ends(VOCAB)
    layers = [f"model.layers.{layer}" for layer in range(LAYERS)]
    modules = [f"mtp.layers.{module}" for module in range(len(mtp_layer_types))]
    for layer in (*layers, *modules):
        weights.attention(layer, HEADS, KV_HEADS, HEAD_DIM, head_norms=True)
    for layer in (layers[0], *modules):
        weights.mlp(f"{layer}.mlp", INNER)
    weights.experts(layers[1], EXPERTS, INNER, bias="mlp.e_score_correction_bias")
    weights.gains("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    weights.projection("mtp.fc")
    count = len(mtp_layer_types)
    return weights.save(folder, CONFIG | {"num_nextn_predict_layers": count, "mtp_layer_types": list(mtp_layer_types)})


def write_two_sliding_modules(folder: Path) -> str:
    """Their layers lie in two KV cache groups."""
    return write_checkpoint(folder, ("sliding_attention", "sliding_attention"))
