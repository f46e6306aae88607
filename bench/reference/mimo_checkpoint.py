"""A MiMo checkpoint of two layers and one MTP layer, with weights under which drafts are often right.

The target's layers add little to the residual stream, so a token nearly decides the next one; the MTP layer passes the
embedding of the token it is given through the same head, and adds some of what else it is given, so it often knows it.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, VOCAB, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 2, 128, 2, 2, 32, 96

CONFIG = {
    "architectures": ["MiMoForCausalLM"],
    # vLLM reads MiMo's own config class from the hub; it is Qwen2's but for the count of MTP layers.
    "model_type": "qwen2",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_checkpoint(folder: Path, vocab_size: int = VOCAB) -> str:
    """Writes the checkpoint and returns its path."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def block(prefix: str, scale: float) -> dict[str, torch.Tensor]:
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        tensors = {f"{prefix}.{name}.weight": noise(*shape, scale=scale) for name, shape in shapes.items()}
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = shapes[f"self_attn.{name}"][0]
            tensors[f"{prefix}.self_attn.{name}.bias"] = noise(rows, scale=scale)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(HIDDEN)
        return tensors

    weights = {
        "model.embed_tokens.weight": noise(vocab_size, HIDDEN, scale=1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": noise(vocab_size, HIDDEN, scale=1.0),
    }
    for layer in range(LAYERS):
        weights |= block(f"model.layers.{layer}", 0.09)
    module = "model.mtp_layers.0"
    weights |= block(module, 0.09)
    hidden, embedding = noise(HIDDEN, HIDDEN, scale=0.04), torch.eye(HIDDEN)
    weights[f"{module}.input_proj.weight"] = torch.cat([hidden, embedding], dim=1)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{module}.{name}.weight"] = 1.0 + noise(HIDDEN, scale=0.1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocab_size}))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def write_adapter(folder: Path) -> str:
    """Writes a LoRA adapter of the target, as PEFT has them, which turns it into another model; returns its path."""
    generator = torch.Generator().manual_seed(1)
    rank, shapes = 4, {"self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "mlp.down_proj": (HIDDEN, INTERMEDIATE)}
    weights = {}
    for layer in range(LAYERS):
        for name, (rows, columns) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.3
            weights[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.3
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [x.split(".")[1] for x in shapes],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return str(folder)
