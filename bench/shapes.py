"""Step-3.5's `config.json`, of the tiny model and of whatever shape a benchmark needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COMMON: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "dtype": "bfloat16",
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "norm_expert_weight": True,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""What does not depend on the shape."""


def layer_types(sliding: Sequence[bool]) -> list[str]:
    """The entry of that name: whether each layer, modules included, attends to a sliding window or to everything."""
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding]


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the tiny model (`tools/tiny_model.py`); the defaults give 4.9 M parameters."""

    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 480
    head_dim: int = 32
    num_kv_heads: int = 2
    num_full_heads: int = 6
    num_sliding_heads: int = 8
    sliding_window: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    # F: full attention, S: sliding; the target's layers, then the modules'.
    target_layers: str = "FSSFSS"
    module_layers: str = "FSS"
    moe_layer: int = 3
    moe_num_experts: int = 4
    moe_top_k: int = 2
    moe_intermediate_size: int = 192
    full_rope_theta: float = 100_000.0
    sliding_rope_theta: float = 10_000.0
    full_rotary_factor: float = 0.5
    # On what each block adds, in training only: the text is small enough to be learnt by heart.
    dropout: float = 0.3

    @property
    def layers(self) -> str:
        return self.target_layers + self.module_layers

    def is_sliding(self, layer: int) -> bool:
        return self.layers[layer] == "S"

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of the checkpoint, in Step-3.5's own terms."""
        sliding = [kind == "S" for kind in self.layers]
        return COMMON | {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": len(self.target_layers),
            "num_nextn_predict_layers": len(self.module_layers),
            "num_attention_heads": self.num_full_heads,
            "num_attention_groups": self.num_kv_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": self.num_sliding_heads,
                "num_attention_groups": self.num_kv_heads,
                "head_dim": self.head_dim,
            },
            # One entry per layer, modules included, as the real config has it.
            "layer_types": layer_types(sliding),
            "rope_theta": [self.sliding_rope_theta if s else self.full_rope_theta for s in sliding],
            "partial_rotary_factors": [1.0 if s else self.full_rotary_factor for s in sliding],
            "sliding_window": self.sliding_window,
            "max_position_embeddings": self.max_position_embeddings,
            "max_seq_len": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "moe_layers_enum": str(self.moe_layer),
            "moe_num_experts": self.moe_num_experts,
            "moe_top_k": self.moe_top_k,
            "moe_intermediate_size": self.moe_intermediate_size,
            "share_expert_dim": self.moe_intermediate_size,
            # vLLM's CPU backend routes by softmax; the large models use a sigmoid.
            "moe_router_activation": "softmax",
            "moe_router_scaling_factor": 1.0,
        }
