"""Checkpoints of tiny models with random weights, of several families."""

import functools
from pathlib import Path
from typing import Any

import torch

from bench.reference.mimo_checkpoint import write_checkpoint
from bench.reference.tiny import TinyWeights

# Tiny models as transformers makes them: three layers, so that the last one is not the second.
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,  # with the next one the only size that the CPU backend has
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 3,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}),
    # Its layers return a residual that is not to be added to the hidden states.
    "cohere": ("CohereConfig", {"logit_scale": 1.0}),
    # Short convolutions and full attention.
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"], "conv_dim": 64, "block_dim": 64}),
    "deepseek": ("DeepseekV3Config", MLA),
}


@functools.cache
def write_model(family: str, folder: Path) -> str:
    """Writes a tiny model of that family, with random weights, and returns its path."""
    if family == "mimo":
        return write_checkpoint(folder)
    import transformers

    name, more = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES | more))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms: all ones would hide a norm too many or too few
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return str(folder)


def write_eagle(folder: Path, method: str) -> str:
    """Writes a draft of one layer for the tiny Llama, as EAGLE or as EAGLE-3 has it, and returns its path."""
    hidden, vocab, heads, head_dim = SIZES["hidden_size"], SIZES["vocab_size"], SIZES["num_attention_heads"], 32
    weights = TinyWeights(hidden)
    layer, takes, width = ("midlayer", 3, 2 * hidden) if method == "eagle3" else ("layers.0", 2, hidden)
    for name, rows in (("q_proj", heads * head_dim), ("k_proj", head_dim), ("v_proj", head_dim)):
        weights.linear(f"{layer}.self_attn.{name}", rows, width)
    weights.linear(f"{layer}.self_attn.o_proj", hidden, heads * head_dim)
    weights.mlp(f"{layer}.mlp", SIZES["intermediate_size"])
    weights.gains(f"{layer}.post_attention_layernorm")
    weights.linear("fc", hidden, takes * hidden)
    if method == "eagle3":
        weights.gains(f"{layer}.input_layernorm", f"{layer}.hidden_norm", "norm")
        weights.linear("lm_head", vocab, hidden)
    name = "LlamaForCausalLMEagle3" if method == "eagle3" else "LlamaForCausalLM"
    layers = {"num_hidden_layers": 1, "draft_vocab_size": vocab, "tie_word_embeddings": False}
    return weights.save(folder, SIZES | layers | {"architectures": [name], "model_type": "llama", "rms_norm_eps": 1e-6})
