"""Shapes of models as they are served, for benchmarks with dummy weights: their layers, as many as are asked for."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.shapes import COMMON, layer_types

NUM_MODULES = 3
# Of the target's sparse layers; the large models have more, which a step of a small batch doesn't touch either.
NUM_EXPERTS = 32
TOP_K = 8
BYTES = 2  # of an element, bfloat16


def step3p5(num_layers: int, vocab_size: int) -> dict[str, Any]:
    """The `config.json` of a Step-3.5 with three modules.

    Every fourth layer has full attention, and the target's layers past the third have experts.
    """
    total = num_layers + NUM_MODULES
    sliding = [i % 4 != 0 for i in range(total)]
    heads = {"num_attention_groups": 8, "head_dim": 128}
    return COMMON | {
        "vocab_size": vocab_size,
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": NUM_MODULES,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        **heads,
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96, **heads},
        "layer_types": layer_types(sliding),
        "rope_theta": [1e4 if is_sliding else 5e6 for is_sliding in sliding],
        "partial_rotary_factors": [1.0 if is_sliding else 0.5 for is_sliding in sliding],
        "sliding_window": 512,
        "max_position_embeddings": 65536,
        "max_seq_len": 65536,
        "rms_norm_eps": 1e-5,
        "moe_layers_enum": ",".join(map(str, range(3, num_layers))),
        "moe_num_experts": NUM_EXPERTS,
        "moe_top_k": TOP_K,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 3.0,
    }


def mimo_v2(num_layers: int, vocab_size: int) -> dict[str, Any]:
    """The `config.json` of a MiMo-V2-Flash with three modules.

    Layers 0, 5, 11, ... have full attention, and all but the first have experts. Values are narrower than keys.
    """
    sliding = [i != 0 and i % 6 != 5 for i in range(num_layers)]
    return {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "hidden_act": "silu",
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": NUM_MODULES,  # which dummy weights can't tell
        "hybrid_layer_pattern": [int(is_sliding) for is_sliding in sliding],
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "attention_bias": False,
        "attention_value_scale": 0.707,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": 1e-5,
        "max_position_embeddings": 65536,
        "moe_layer_freq": [0, *[1] * (num_layers - 1)],
        "n_routed_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "layer_types": layer_types(sliding),
        "mlp_layer_types": ["dense", *["sparse"] * (num_layers - 1)],
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
            for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
        },
    }


def mimo(num_layers: int, vocab_size: int) -> dict[str, Any]:
    """The `config.json` of a MiMo-7B with its module: all layers are dense."""
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",  # as which vLLM reads it without the model's own code
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "hidden_act": "silu",
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rope_theta": 640000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def deepseek_v3(num_layers: int, vocab_size: int) -> dict[str, Any]:
    """The `config.json` of a DeepSeek-V3 with its module: latent attention, and experts past the third layer."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "hidden_act": "silu",
        "num_hidden_layers": num_layers,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
        "rope_theta": 10000.0,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape.

    Attributes:
        make_config: the `config.json` of so many layers and tokens.
        vocab_size: the model's own.
        row_bytes: that a token takes in the KV cache of a layer, by the layer's attention.
        module_types: the attention of each module.
    """

    make_config: Callable[[int, int], dict[str, Any]]
    vocab_size: int
    row_bytes: dict[str, int]
    module_types: tuple[str, ...] | None = None

    def kv_bytes(self, config: dict[str, Any], num_tokens: int, *, with_modules: bool = True, chunks: int = 1) -> int:
        """Bytes that the KV cache holds of a request.

        Args:
            with_modules: counts those of the modules in.
            chunks: windows that a sliding layer holds.
        """
        num_layers = config["num_hidden_layers"]
        all_types = config.get("layer_types", ["full_attention"] * num_layers)
        types = all_types[:num_layers]
        if with_modules:
            types = [*types, *(self.module_types or all_types[num_layers:])]
        window = chunks * config.get("sliding_window", 0)
        rows = {"full_attention": num_tokens, "sliding_attention": min(num_tokens, window)}
        return sum(rows[kind] * self.row_bytes[kind] for kind in types)


SHAPES = {
    "step3p5": Shape(step3p5, 128896, dict.fromkeys(("full_attention", "sliding_attention"), 8 * (128 + 128) * BYTES)),
    "mimo-v2": Shape(
        mimo_v2,
        152576,
        {"full_attention": 4 * (192 + 128) * BYTES, "sliding_attention": 8 * (192 + 128) * BYTES},
        ("sliding_attention",) * NUM_MODULES,
    ),
    "mimo": Shape(mimo, 151680, {"full_attention": 8 * (128 + 128) * BYTES}, ("full_attention",)),
    "deepseek-v3": Shape(deepseek_v3, 129280, {"full_attention": (512 + 64) * BYTES}, ("full_attention",)),
}


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="step3p5", help="whose layers")
    parser.add_argument("--layers", type=int, default=8, help="of the target")
    parser.add_argument("--vocab-size", type=int, help="default: the model's own")
