"""An ERNIE 4.5 checkpoint of a dense layer, one with experts, and an MTP block."""

from pathlib import Path
from typing import Any

from bench.reference.tiny import TinyWeights

HIDDEN, LAYERS, VOCAB, HEADS, KV_HEADS, HEAD_DIM, INNER, EXPERTS = 64, 2, 256, 2, 1, 32, 96, 4

CONFIG: dict[str, Any] = {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "dtype": "float32",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "moe_num_experts": EXPERTS,
    "moe_num_shared_experts": 1,
    "moe_k": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": LAYERS - 1,
    "moe_layer_interval": 1,
    "use_bias": False,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_checkpoint(folder: Path, bias_scale: float = 0.0) -> str:
    """Writes the checkpoint and returns its path.

    Args:
        bias_scale: by how much the bias that moves the choice of experts differs between them. vLLM's routing on a CPU
            leaves that bias out where scores are a softmax, so engines there are right where it moves nothing.
    """
    weights = TinyWeights(HIDDEN)
    weights.ends(VOCAB)
    layers, block, bias = [f"model.layers.{layer}" for layer in range(LAYERS)], "model.mtp_block.0", "mlp.moe_statics"
    for layer in (*layers, block):
        weights.attention(layer, HEADS, KV_HEADS, HEAD_DIM)
    for layer in (layers[0], block):
        weights.mlp(f"{layer}.mlp", INNER)
    weights.experts(layers[1], EXPERTS, INNER, bias=f"{bias}.e_score_correction_bias")
    # A row for each kind of expert, and text has one. Large, as real ones are.
    weights.tensors[f"{layers[1]}.{bias}.e_score_correction_bias"] = 20 + weights.noise(1, EXPERTS, scale=bias_scale)
    weights.gains("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0")
    weights.projection("model.mtp_linear_proj.0")
    return weights.save(folder, CONFIG)


def write_with_bias(folder: Path) -> str:
    """Of which some experts are chosen for their bias."""
    return write_checkpoint(folder, bias_scale=0.1)
